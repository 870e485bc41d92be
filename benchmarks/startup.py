"""Start-up: CPU seconds (user + system) until a command that computes nothing has answered.

python benchmarks/startup.py [--runs 5] [--folder runs]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from harness import machine, median, table

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
    parser.add_argument("--folder", default="runs", help="the folder of runs that `mnemos runs` lists")
    options = parser.parse_args()
    cases = {"python": ("pass",), "import torch": ("import torch",)}
    for words in COMMANDS:
        cases[f"mnemos {' '.join(words)}"] = (MAIN, *words)
    count = len(list(Path(options.folder).glob("*/config.yaml")))  # an empty folder is answered without torch
    cases[f"mnemos runs ({count} in the folder)"] = (MAIN, "runs", "--folder", options.folder)
    rows = []
    for name, case in cases.items():
        cpu_seconds(*case)  # files into the cache
        found = sorted(cpu_seconds(*case) for _ in range(options.runs))
        rows.append([name, f"{median(found):.2f}", f"{found[0]:.2f}–{found[-1]:.2f}"])
    print(machine())
    print(table(["command", "CPU seconds", "range"], rows))


if __name__ == "__main__":
    main()
