"""Small corpora and ways to open them, for the tests of this folder."""

from __future__ import annotations

import json
import random
from pathlib import Path

from mnemos.data import Data, DataConfig, open_data

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "a",
    "in",
    "that",
    "it",
    "is",
    "was",
    "he",
    "for",
    "on",
    "are",
    "with",
    "as",
    "his",
    "they",
    "be",
    "at",
    "one",
    "have",
    "this",
    "from",
]


def prose(chars: int, seed: int = 0) -> str:
    """Words at random, in sentences."""
    chance = random.Random(seed)
    text = ""
    while len(text) < chars:
        text += " ".join(chance.choices(WORDS, k=8)).capitalize() + ". "
    return text[:chars]


def jsonl(path: Path, documents: int, chars: int = 200, seed: int = 0) -> Path:
    """Documents of about `chars` characters, each with its number in front."""
    chance = random.Random(seed)
    lines = (
        json.dumps({"text": f"<{seed}-{i}> {prose(chance.randrange(chars // 2, chars * 2), seed * 10_000 + i)}"})
        for i in range(documents)
    )
    path.write_text("\n".join(lines) + "\n")
    return path


def opened(folder: Path, *sources, seed: int = 0, rank: int = 0, world_size: int = 1, **choices) -> Data:
    """Data in a cache of its own."""
    choices = {"cache_dir": str(folder / "cache"), "seq_len": 64, "batch_size": 4} | choices
    return open_data(DataConfig(sources=tuple(map(str, sources)), **choices), seed, rank, world_size)


def texts_of(data: Data, split: str) -> list[str]:
    """The documents of a split, as the shards hold them."""
    found = []
    for store, parts in zip(data.stores, data._parts):
        for start, length in zip(parts[split].starts, parts[split].lengths):
            ids = store.arrays[0][start : start + length] if len(store.arrays) == 1 else _across(store, start, length)
            found.append(data.tokenizer.decode(ids.tolist()))
    return found


def _across(store, start, length):
    import numpy as np

    out = np.zeros(length, np.int64)
    store.read(start, out)
    return out
