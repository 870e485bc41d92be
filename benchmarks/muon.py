"""Cost of Muon after every token: a memory layer with rule "muon" and one with "gd", forward and backward, in turn.

    python benchmarks/muon.py [--rounds 9] [--tokens 2048]

256 wide, 4 heads, monomials of 10 dims (66 features), chunks of 64. The ratio is the median over rounds; the CPU time of one thread is
printed beside it, which is steadier on a busy machine. "dense" computes the same rule on whole matrices, as a memory with momentum does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from harness import machine, table
from mnemos.memory import NeuralMemory

WINDOWS = (16, 8)
RULES = {
    "gd": {"momentum": False},
    "muon": {"momentum": False, "rule": "muon", "commit_every": 1},
    "muon, dense": {"momentum": True, "rule": "muon", "commit_every": 1},
}


def layer(rule: str, window: int, tokens: int) -> Callable[[], tuple[float, float]]:
    """One step, which returns its wall-clock time and its CPU time."""
    torch.manual_seed(0)
    memory = NeuralMemory(
        dim=256, heads=4, features="monomials", key_dim=10, window=window, gate="token", chunk_size=64, **RULES[rule]
    )
    x = torch.randn(1, tokens, 256)

    def step() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        y, _ = memory(x)
        y.square().mean().backward()
        memory.zero_grad()
        return time.perf_counter() - wall, time.process_time() - cpu

    step()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dense", action="store_true", help="also the dense form: some seconds a step")
    options = parser.parse_args()
    print(machine(), "\n", flush=True)
    rules = [rule for rule in RULES if options.dense or "dense" not in rule]
    steps = {(rule, window): layer(rule, window, options.tokens) for window in WINDOWS for rule in rules}
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in steps}
    for _ in range(options.rounds):
        for case, step in steps.items():
            taken[case].append(step())
    rows = []
    for (rule, window), found in taken.items():
        ratios = [[a[i] / b[i] for a, b in zip(found, taken["gd", window])] for i in range(2)]
        middle = statistics.median(wall for wall, _ in found)
        spread = f"{min(ratios[0]):.2f} to {max(ratios[0]):.2f}"
        rows.append(
            [rule, str(window), f"{1e3 * middle:.0f}", *(f"{statistics.median(r):.2f}" for r in ratios), spread]
        )
    print(table(["rule", "window", "ms", "of gd", "of gd, CPU time", "range"], rows))


if __name__ == "__main__":
    main()
