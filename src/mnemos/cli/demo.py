"""`mnemos demo`: five minutes that show what a memory is for."""

from __future__ import annotations

from pathlib import Path


def demo(output: Path = Path("runs/demo"), seconds: float = 170.0, seed: int = 0) -> None:
    """Train a small memory model and a sliding-window Transformer of its size, and compare what they recall.

    Everything is trained and measured on this machine, in under five minutes on two cores; nothing is downloaded.

    Args:
        output: folder of the report page, the numbers and the saved state.
        seconds: of training, for both models together; measuring takes about a minute more.
        seed: of the weights, the facts and the text's places.
    """
    import dataclasses

    from ..demo import DemoPlan, run
    from ..demo.training import Curriculum

    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r} must be > 0")
    if seed < 0:
        raise ValueError(f"seed={seed} must be 0 or more")
    run(output, DemoPlan(seconds=seconds, curriculum=dataclasses.replace(Curriculum(), seed=seed)))
