"""Start-up: CPU seconds (user + system) until a command that computes nothing has answered.

python benchmarks/startup.py [--runs 5] [--folder RUNS]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import machine, median, table
from mnemos.train import TrainConfig

COMMANDS = (["--version"], ["--help"], ["presets"])
MAIN = "import sys; from mnemos.cli import main; sys.exit(main())"


def cpu_seconds(code: str, *arguments: str) -> float:
    """Of one process that runs `code`, its children included."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--folder", help="the folder of runs that `mnemos runs` lists; without it, one with a single run"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or one_run(temporary)
        measure(options.runs, folder)


def one_run(folder: str) -> str:
    """Write the config and the metrics of a run of 1,000 steps; returns `folder`."""
    path = Path(folder, "first")
    path.mkdir()
    TrainConfig(name="first").save(path / "config.yaml")
    records = ({"step": step, "kind": "train", "loss": 2.5, "tokens": 4096 * step} for step in range(10, 1010, 10))
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


def measure(runs: int, folder: str) -> None:
    cases = {"python": ("pass",), "import torch": ("import torch",)}
    for words in COMMANDS:
        cases[f"mnemos {' '.join(words)}"] = (MAIN, *words)
    count = len(list(Path(folder).glob("*/config.yaml")))
    cases[f"mnemos runs ({count} in the folder)"] = (MAIN, "runs", "--folder", folder)
    rows = []
    for name, case in cases.items():
        cpu_seconds(*case)  # files into the cache
        found = sorted(cpu_seconds(*case) for _ in range(runs))
        rows.append([name, f"{median(found):.2f}", f"{found[0]:.2f}–{found[-1]:.2f}"])
    print(machine())
    print(table(["command", "CPU seconds", "range"], rows))


if __name__ == "__main__":
    main()
