"""Records of runs: configs and metrics, as a table or a plot. Imports no torch, so that `mnemos runs` is fast."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import TrainConfig
from .ownership import MANIFEST
from .telemetry import read_metrics


@dataclass
class Run:
    """A run's folder and its recorded metrics."""

    path: Path
    config: TrainConfig
    train: list[dict[str, Any]]
    validate: list[dict[str, Any]]
    best: dict[str, Any] | None

    @property
    def name(self) -> str:
        return self.path.name

    def summary(self) -> dict[str, Any]:
        """One line of the table."""
        last = self.train[-1] if self.train else {}
        checked = self.validate[-1] if self.validate else {}
        memory = checked.get("memory")
        return {
            "name": self.name,
            "model": self.config.title,
            "step": last.get("step", 0),
            "loss": last.get("loss"),
            "val_loss": checked.get("val_loss"),
            "bits_per_byte": checked.get("bits_per_byte"),
            "best": (self.best or {}).get("val_loss"),
            "learning_gain": memory.get("gain") if isinstance(memory, dict) else None,
            "tokens_per_second": last.get("tokens_per_second"),
            "bad_steps": last.get("bad_steps"),
        }


def open_run(path: str | os.PathLike) -> Run:
    """Read a run's folder."""
    path = Path(path)
    if not (path / "config.yaml").exists():
        raise ValueError(f"{path} is not a run: it has no config.yaml")
    return Run(
        path,
        TrainConfig.load_recorded(path / "config.yaml"),
        read_metrics(path, "train"),
        read_metrics(path, "validate"),
        read_best(path),
    )


def list_runs(folder: str | os.PathLike = "runs", on_problem: Callable[[str], None] = lambda why: None) -> list[Run]:
    """All runs of a folder, the newest last. Unreadable runs are skipped; `on_problem` is called with the reason."""
    found = []
    for path in sorted(Path(folder).glob("*/config.yaml"), key=lambda p: p.stat().st_mtime):
        try:
            found.append(open_run(path.parent))
        except ValueError as wrong:
            on_problem(str(wrong))
    return found


def read_best(run: Path) -> dict[str, Any] | None:
    """Step and validation loss of a run's best checkpoint; None if there is none."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        best = json.loads((run / "best.json").read_text())
        step, loss = best["step"], best["val_loss"]
        is_number = type(step) is int and type(loss) in (int, float)
        if is_number and (run / "checkpoints" / f"step-{step:06d}" / MANIFEST).exists():
            return best
    return None


def plot(runs: list[Run], path: str | os.PathLike) -> None:
    """Plot several runs: training loss (thin) and validation loss (dots) over tokens, and the gain from learning at test time."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a plot needs the extra plots: pip install 'mnemos[plots]'") from None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    losses, shares = figure.subplots(1, 2, width_ratios=(3, 2))
    for i, run in enumerate(runs):
        color = f"C{i % 10}"
        points = {r["step"]: r for r in run.train if r.get("loss") is not None}
        losses.plot(
            [r["tokens"] for r in points.values()], [r["loss"] for r in points.values()], color=color, alpha=0.35, lw=1
        )
        checked = {r["step"]: r for r in run.validate if r.get("val_loss") is not None}
        losses.plot(
            [r["tokens"] for r in checked.values()],
            [r["val_loss"] for r in checked.values()],
            "o-",
            ms=3,
            color=color,
            label=run.name,
        )
        known = [r for r in checked.values() if (r.get("memory") or {}).get("gain") is not None]
        shares.plot([r["tokens"] for r in known], [100 * r["memory"]["gain"] for r in known], "o-", ms=3, color=color)
    losses.set(xlabel="tokens", ylabel="loss (nats per token)", title="training (thin) and validation")
    shares.set(xlabel="tokens", ylabel="% of perplexity", title="gain from learning at test time")
    for axis in (losses, shares):
        axis.grid(alpha=0.3)
    if runs:
        losses.legend(fontsize=8)
    figure.savefig(path, dpi=140)
