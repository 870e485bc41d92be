"""`mnemos demo`: a demonstration of memory in five minutes."""

from __future__ import annotations

from pathlib import Path


def demo(output: Path = Path("runs/demo"), seconds: float = 170.0, seed: int = 0) -> None:
    """Train a small memory model and a sliding-window Transformer of the same size, and compare their recall.

    Everything is trained and measured on this machine, in under five minutes on two cores; nothing is downloaded.

    Args:
        output: folder of the page, the results and the saved state.
        seconds: training time of both models together; measuring takes about one more minute.
        seed: seed of the weights, the facts and the excerpts of text.
    """
    import dataclasses

    from ..demo import DemoPlan, run
    from ..demo.training import Curriculum

    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r} must be > 0")
    if seed < 0:
        raise ValueError(f"seed={seed} must be 0 or more")
    run(output, DemoPlan(seconds=seconds, curriculum=dataclasses.replace(Curriculum(), seed=seed)))
