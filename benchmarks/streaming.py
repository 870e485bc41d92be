"""Constant cost: `step` at position 10 and 1,000,000, and a million tokens through `scan` in flat memory.

python benchmarks/streaming.py [--tokens 1000000]
"""

from __future__ import annotations

import argparse
import functools
import time

import torch

from harness import machine, median, memory, table, times
from mnemos.memory import Gates, MemorySpec, scan, step

HEADS, DIM, BLOCK = 4, 64, 2048


def tokens(length: int):
    q, k = (torch.nn.functional.normalize(torch.randn(1, length, HEADS, DIM), dim=-1) for _ in range(2))
    gates = Gates(
        *(low + (high - low) * torch.rand(1, length, HEADS) for low, high in ((0, 0.01), (0, 0.9), (0.99, 1)))
    )
    return q, k, torch.randn(1, length, HEADS, DIM), gates


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    limit = parser.parse_args().tokens
    torch.manual_seed(0)
    print(machine(), "\n", flush=True)
    spec = MemorySpec(key_dim=DIM, value_dim=DIM, chunk_size=64)
    state = spec.initial_state([torch.randn(HEADS, *s) * s[0] ** -0.5 for s in spec.shapes], batch=1)
    block, one = tokens(BLOCK), tokens(1)
    report_at = sorted({10, 10_000, 100_000, limit})
    rows, position, start = [], 0, time.perf_counter()
    for target in report_at:
        while position < target:
            n = min(BLOCK, target - position)
            q, k, v, gates = block
            y, state = scan(q[:, :n], k[:, :n], v[:, :n], gates.map(lambda x, n=n: x[:, :n]), state, spec)
            position += n
        elapsed = time.perf_counter() - start
        per_step = median(times(functools.partial(step, *one, state, spec), runs=200, warm=20))
        assert torch.isfinite(y).all()
        rows.append(
            [
                f"{position:,}",
                f"{memory('VmRSS'):.0f} MB",
                f"{state.nbytes:,}",
                f"{1e3 * per_step:.3f} ms",
                f"{position / elapsed:,.0f}",
            ]
        )
        print("  " + "  ".join(rows[-1]), flush=True)
    print(table(["tokens read", "resident memory", "state bytes", "one step", "tokens/s in scan so far"], rows))


if __name__ == "__main__":
    main()
