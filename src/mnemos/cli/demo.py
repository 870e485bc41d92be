"""`mnemos demo`: a demonstration of memory in minutes."""

from __future__ import annotations

from pathlib import Path


def demo(output: Path = Path("runs/demo"), seconds: float | None = None, seed: int = 0, open: bool = False) -> None:
    """Train a small memory model, a sliding-window and a full-attention Transformer of the same size, and compare their recall.

    Everything is trained and measured on this machine; nothing is downloaded. Training ends when the memory model has learned the task.

    Args:
        output: folder of the page, the results and the saved state.
        seconds: an upper limit of each training, for slow machines; by default none.
        seed: seed of the weights, the facts and the excerpts of text.
        open: open the page in a browser at the end, if there is a screen.
    """
    import dataclasses

    from transformers.utils import logging

    from ..demo import DemoPlan, run
    from ..demo.training import Curriculum

    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds={seconds!r} must be > 0")
    if seed < 0:
        raise ValueError(f"seed={seed} must be 0 or more")
    logging.disable_progress_bar()
    report = run(output, DemoPlan(seconds=seconds, curriculum=dataclasses.replace(Curriculum(), seed=seed)))
    if open and _has_screen():
        import webbrowser

        webbrowser.open(report.page.resolve().as_uri())


def _has_screen() -> bool:
    """Whether a browser can open a window here."""
    import os
    import sys

    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
