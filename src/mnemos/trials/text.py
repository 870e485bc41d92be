"""Bytes of a corpus for trials: a training part, a held-out part, and bits per byte. B batch rows, T tokens."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.embedded import documents
from ..data.reader import ReadRules
from ..data.readers import read
from ..data.report import ReadReport
from ..data.sources import resolve

TEST_SEED = 2**31  # no training batch has it
CHARACTERS = 2**21
MAX_BYTES = 2**26


@cache
def corpus(source: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and the last twentieth, held out. source: "embedded", or the path of a file."""
    if source == "embedded":
        data = "".join(documents(CHARACTERS)).encode()
    else:
        if not Path(source).is_file():
            raise ValueError(f"the corpus {source} does not exist; give its folder by --text")
        data = Path(source).read_bytes()
    return _parts(data)


@cache
def documents_corpus(sources: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """`corpus` of sources of `mnemos.data`: files, folders or named sources, at most `MAX_BYTES` of UTF-8.

    >>> learn, held_out = documents_corpus(("embedded",))
    >>> len(held_out) * 19 <= len(learn) + 19
    True
    """
    if sources == ("embedded",):
        return corpus("embedded")
    rules, report, pieces, left = ReadRules(), ReadReport(), [], MAX_BYTES
    for source in resolve(sources, rules):
        for item in source.items:
            for piece in read(item, rules, report):
                pieces.append(piece.text.encode(errors="replace")[:left])
                left -= len(pieces[-1])
                if left <= 0:
                    return _parts(b"".join(pieces))
    return _parts(b"".join(pieces))


def fingerprint(sources: tuple[str, ...]) -> str:
    """A hash of the files of sources, by name, size and time, that changes when a file is written again."""
    rules = ReadRules()
    found = [source.fingerprint(rules) for source in resolve(sources, rules)]
    return hashlib.sha256("".join(found).encode()).hexdigest()[:16]


def _parts(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    whole = np.frombuffer(data, np.uint8).astype(np.int64)
    border = len(whole) * 19 // 20
    return whole[:border], whole[border:]


def rows(text: np.ndarray, count: int, length: int, seed: int) -> Tensor:
    """Excerpts from random positions: (count, length)."""
    starts = np.random.default_rng(seed).integers(len(text) - length, size=count)
    return torch.from_numpy(np.stack([text[i : i + length] for i in starts]))


@torch.no_grad()
def bits(model: Any, ids: Tensor, skip: int = 1) -> float:
    """Mean bits per token from position `skip` on."""
    labels = ids.clone()
    labels[:, :skip] = -100
    batches = zip(ids.split(16), labels.split(16))
    total = sum(model(x, labels=y, use_cache=False).loss.double() * len(x) for x, y in batches)
    return float(total / len(ids) / math.log(2))
