"""The demo from Python: train a small memory model and one without a memory, compare, and use what came of it.

python examples/demo.py        # under five minutes on two cores; the same as `mnemos demo`
"""

from __future__ import annotations

from mnemos.demo import run


def main(folder: str = "runs/demo") -> None:
    report = run(folder)
    memory, window = report.recall["memory"][-1], report.recall["window only"][-1]
    print(f"{memory.distance:,} tokens after the facts: {memory.recall:.0%} with a memory, {window.recall:.0%} without")


if __name__ == "__main__":
    main()
