"""Progress display of a run: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any


class Display:
    """Shows the latest metrics: a live panel, or occasional lines if `live` is False or there is no terminal."""

    def __init__(self, name: str, total: int, live: bool):
        from rich.console import Console

        self.console = Console()
        self.name, self.total = name, total
        self.numbers: dict[str, Any] = {}
        self.began, self.first_step = time.perf_counter(), 0
        self.live: Any = None
        if live and self.console.is_terminal:
            from rich.live import Live

            self.live = Live(console=self.console, refresh_per_second=4, transient=False)
            self.live.start()

    def start(self, step: int) -> None:
        self.began, self.first_step = time.perf_counter(), step

    def update(self, step: int, numbers: dict[str, Any]) -> None:
        self.numbers |= numbers
        self.numbers["step"] = step
        if self.live is not None:
            self.live.update(self._panel())
        elif "loss" in numbers or "val_loss" in numbers:
            self.console.print(self.line(), highlight=False, soft_wrap=True)

    def say(self, sentence: str) -> None:
        """Print one sentence."""
        self.console.print(sentence, highlight=False, soft_wrap=True, markup=False)

    def time_left(self, step: int) -> float:
        """Estimated seconds left, at the average speed so far."""
        done = step - self.first_step
        return (time.perf_counter() - self.began) / max(1, done) * (self.total - step)

    def line(self) -> str:
        n = self.numbers
        parts = [f"step {n['step']}/{self.total}"]
        for key, form in (
            ("loss", "loss {:.4f}"),
            ("perplexity", "ppl {:.2f}"),
            ("val_loss", "val {:.4f}"),
            ("bits_per_byte", "bpb {:.3f}"),
            ("lr", "lr {:.2e}"),
            ("grad_norm", "grad {:.2f}"),
            ("gate_mean", "gate {:.2f}"),
            ("tokens_per_second", "{:.0f} tok/s"),
        ):
            if isinstance(n.get(key), int | float):
                parts.append(form.format(n[key]))
        parts.append(f"left {clock(self.time_left(n['step']))}")
        return " · ".join(parts)

    def _panel(self):
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        n, step = self.numbers, self.numbers["step"]
        grid = Table.grid(padding=(0, 3))
        for _ in range(4):
            grid.add_column(justify="left", no_wrap=True)
        cells = [
            Text.assemble((label, "dim"), " ", form.format(n[key]))  # no markup, as in `say`
            for label, key, form in (
                ("loss", "loss", "{:.4f}"),
                ("perplexity", "perplexity", "{:.2f}"),
                ("lr", "lr", "{:.2e}"),
                ("grad norm", "grad_norm", "{:.2f}"),
                ("val loss", "val_loss", "{:.4f}"),
                ("bits/byte", "bits_per_byte", "{:.3f}"),
                ("best", "best", "{:.4f}"),
                ("learning gain", "learning_gain", "{:+.1%}"),
                ("tokens/s", "tokens_per_second", "{:,.0f}"),
                ("MFU", "mfu", "{:.1%}"),
                ("data wait", "data_wait", "{:.1%}"),
                ("peak MB", "peak_memory_mb", "{:,.0f}"),
                ("gate", "gate_mean", "{:.2f}"),
                ("bad steps", "bad_steps", "{}"),
            )
            if isinstance(n.get(key), int | float)
        ]
        for i in range(0, len(cells), 4):
            grid.add_row(*cells[i : i + 4])
        rows = Table.grid(expand=True)  # a bar alone does not end its line
        rows.add_row(ProgressBar(total=self.total, completed=step, width=None))
        rows.add_row(grid)
        title = f"{self.name}  step {step:,} of {self.total:,}  left {clock(self.time_left(step))}"
        return Panel(rows, title=title, title_align="left")

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


class NoDisplay:
    """Shows nothing: for all processes except the first, and for a Trainer used from Python."""

    def start(self, step: int) -> None: ...

    def update(self, step: int, numbers: dict[str, Any]) -> None: ...

    def say(self, sentence: str) -> None: ...

    def time_left(self, step: int) -> float:
        return 0.0

    def close(self) -> None: ...


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    >>> clock(3725)
    '1:02:05'
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
