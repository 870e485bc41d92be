"""Speed of two source trees side by side: decoding and training, taken in turn so that both meet the same machine.

    git worktree add /tmp/before HEAD~20
    python benchmarks/revisions.py /tmp/before/src src            # ratios, new time / old time; below 1 is faster

Each tree has a process of its own, which waits while the other one works. A round is one measurement of each, in changing order;
a decoding round has 20 tokens, so that both trees meet the same moment of a busy machine. The ratio printed is the median over
rounds of new / old; beside it the interval that holds the median in 95 of 100 such runs (from the order of the rounds), and the
rounds' middle half.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

JOBS = (
    "decode titans-lmm",
    "decode titans-mag",
    "decode titans-mal",
    "decode titans-mac",
    "decode atlas-mag",
    "train titans-lmm",
    "train titans-mag",
    "train titans-mac",
    "train atlas",
)
DECODED_TOKENS, TRAINED_TOKENS = 20, 1024


def worker() -> None:
    """Answer every line of standard input, the name of a job, with its seconds."""
    import torch

    from models import make

    torch.manual_seed(0)
    prepared = {}
    for line in sys.stdin:
        kind, name = line.split()
        if line not in prepared:
            model = make(name, 4 if kind == "decode" else 2)
            prepared[line] = _decoding(torch, model.eval()) if kind == "decode" else _training(torch, model.train())
            prepared[line]()
        start = time.perf_counter()
        prepared[line]()
        print(json.dumps(time.perf_counter() - start), flush=True)


def _decoding(torch, model):
    ids = torch.randint(0, 256, (1, 100))
    state, token = model.state(ids), ids[:, :1]

    @torch.no_grad()
    def run():
        nonlocal state
        state.inplace = True
        for _ in range(DECODED_TOKENS):
            state = model(token, past_key_values=state, use_cache=True).past_key_values

    return run


def _training(torch, model):
    ids = torch.randint(0, 256, (1, TRAINED_TOKENS))

    def run():
        model(ids, labels=ids).loss.backward()
        model.zero_grad()

    return run


def start(source: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.path.abspath(source), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, os.path.abspath(__file__), "--worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(process: subprocess.Popen, job: str) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{job}\n")
    process.stdin.flush()
    return float(json.loads(process.stdout.readline()))


def compare(old: str, new: str, jobs: list[str], rounds: int) -> None:
    from harness import machine, table

    print(machine())
    trees = [start(old), start(new)]
    rows = []
    for job in jobs:
        pairs = []
        for i in range(rounds + 2):
            taken = {}
            for which in (0, 1) if i % 2 else (1, 0):
                taken[which] = ask(trees[which], job)
            pairs.append((taken[0], taken[1]))
        ratios = sorted(b / a for a, b in pairs[2:])
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        reach = round(0.98 * len(ratios) ** 0.5)  # ranks around the middle: a binomial count has deviation sqrt(n) / 2
        first, last = (ratios[min(max(len(ratios) // 2 + d, 0), len(ratios) - 1)] for d in (-reach, reach))
        before, after = (statistics.median(x) * 1e3 for x in zip(*pairs[2:]))
        rows.append(
            [
                job,
                f"{before:.1f}",
                f"{after:.1f}",
                f"{statistics.median(ratios):.3f}",
                f"{first:.3f} to {last:.3f}",
                f"{low:.3f} to {high:.3f}",
            ]
        )
    for tree in trees:
        tree.terminate()
    print(table(["job", "old ms", "new ms", "new / old", "95 % of it", "middle half"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", help="the src folder of the older tree")
    parser.add_argument("new", nargs="?", help="the src folder of the newer tree")
    parser.add_argument("--only", nargs="+", default=list(JOBS), metavar="JOB", help=f"some of: {', '.join(JOBS)}")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        worker()
    elif chosen.old is None or chosen.new is None:
        parser.error("give two src folders")
    else:
        compare(chosen.old, chosen.new, chosen.only, chosen.rounds)


if __name__ == "__main__":
    main()
