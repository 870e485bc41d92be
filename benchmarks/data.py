"""Data: how fast batches are made, how long a training step waits for one, and how fast text is tokenised.

python benchmarks/data.py [--megabytes 64]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import machine, median, table
from mnemos.data import Data, DataConfig, embedded, open_data, train_bpe
from mnemos.data.build import encode_part
from mnemos.data.readers import ReadRules
from mnemos.data.sharding import Item
from mnemos.data.tokenizer import ByteTokenizer, Tokenizer

SHAPES = ((8, 512), (16, 2048), (4, 8192))
CHOICES: dict[str, dict[str, Any]] = {
    "stream": {"packing": "stream"},
    "documents": {"packing": "documents"},
    "windows, overlap 0.1": {"packing": "windows", "overlap_ratio": 0.1},
    "stream, carried": {"packing": "stream", "carry_state": True},
    "documents, carried": {"packing": "documents", "carry_state": True},
}


def corpus(path: Path, megabytes: float) -> None:
    """Paragraphs of the embedded text as documents of some 100 to 5,000 characters, shuffled, in a .jsonl file."""
    text = "\n\n".join(embedded.documents())
    chance = np.random.default_rng(0)
    size = 0
    with open(path, "w") as file:
        while size < megabytes * 1e6:
            length = int(np.exp(chance.uniform(np.log(100), np.log(5000))))
            start = int(chance.integers(0, len(text) - length))
            size += file.write(json.dumps({"text": text[start : start + length]}) + "\n")


def batches_per_second(data: Data, seconds: float = 1.0) -> list[float]:
    """Seconds of each batch, made when it is asked for."""
    found = []
    for _ in range(5):
        next(data.train)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        next(data.train)
        found.append(time.perf_counter() - start)
    return found


def making(path: Path, cache: str, seconds: float) -> str:
    rows = []
    for name, choices in CHOICES.items():
        for B, T in SHAPES:
            config = DataConfig((str(path),), seq_len=T, batch_size=B, prefetch=0, cache_dir=cache, **choices)
            taken = batches_per_second(open_data(config), seconds)
            rows.append(
                [
                    name,
                    f"{B} × {T}",
                    f"{1e3 * median(taken):.2f} ms",
                    f"{1e3 * float(np.quantile(taken, 0.99)):.2f} ms",
                    f"{B * T / np.mean(taken) / 1e6:.1f} M",
                ]
            )
    return table(["packing", "batch", "median", "99 %", "tokens/s"], rows)


def waiting(path: Path, cache: str, steps: int) -> str:
    """A real step of a nano model, with batches made ahead and without."""
    from mnemos.models import MnemosForCausalLM, presets

    torch.manual_seed(0)
    model = MnemosForCausalLM(presets.config("titans-mag", "nano")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = []
    for name in ("stream", "documents"):
        for prefetch in (0, 4):
            config = DataConfig(
                (str(path),), seq_len=256, batch_size=4, prefetch=prefetch, cache_dir=cache, packing=name
            )
            data = open_data(config)
            waits, works = [], []
            for i in range(steps + 3):
                start = time.perf_counter()
                batch = next(data.train)
                got = time.perf_counter()
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if i >= 3:
                    waits.append(got - start)
                    works.append(time.perf_counter() - got)
            data.train.close()
            share = sum(waits) / (sum(waits) + sum(works))
            rows.append(
                [name, str(prefetch), f"{1e3 * median(works):.0f} ms", f"{1e3 * max(waits):.2f} ms", f"{share:.3%}"]
            )
    return table(["packing", "made ahead", "step", "longest wait", "share of the time spent waiting"], rows)


def tokenising(path: Path, folder: Path, runs: int) -> str:
    """Read, tokenise and write a shard, in one process."""
    sample = "\n\n".join(embedded.documents())
    tokenizers: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "BPE 8,000": train_bpe([sample], 8000)}
    rows = []
    for name, tokenizer in tokenizers.items():
        taken, report = [], {}
        for _ in range(runs):
            start = time.perf_counter()
            report = encode_part([Item("jsonl", str(path))], 0, folder, tokenizer, ReadRules())["report"]
            taken.append(time.perf_counter() - start)
        spread = f"{min(taken):.2f}–{max(taken):.2f} s"
        best = median(taken)
        rows.append([name, f"{report['bytes'] / best / 1e6:.1f} MB", f"{report['tokens'] / best / 1e6:.2f} M", spread])
    return table(["tokenizer", "text/s", "tokens/s", "time"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    print(machine(), "\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "corpus.jsonl")
        corpus(path, arguments.megabytes)
        print(f"Making batches from {arguments.megabytes:g} MB of byte tokens, nothing made ahead:\n")
        print(making(path, folder, arguments.seconds), "\n", flush=True)
        print("Training titans-mag nano, batch 4 × 256:\n")
        print(waiting(path, folder, arguments.steps), "\n", flush=True)
        print("Reading JSON lines, tokenising, writing the shard, one process:\n")
        print(tokenising(path, Path(folder), 3))


if __name__ == "__main__":
    main()
