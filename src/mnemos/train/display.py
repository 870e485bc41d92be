"""Progress display of a run: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from typing import Any

SPARK_CELLS = 48
SAMPLE_LINES = 5
SPARKS = "▁▂▃▄▅▆▇█"


class Display:
    """Shows the latest metrics: a live panel, or occasional lines if `live` is False or there is no terminal.

    The panel, or a line, appears before the first step, with the reason for the wait. Time left is known from the second step on: the first one
    compiles, and would make it far too long.
    """

    def __init__(self, name: str, total: int, live: bool):
        from rich.console import Console

        self.console = Console()
        self.name, self.total = name, total
        self.numbers: dict[str, Any] = {"step": 0}
        self.losses: list[float] = []
        self.sampled: tuple[int, str] | None = None
        self.waiting: str | None = None
        self.began = time.perf_counter()
        self.first: tuple[int, float] | None = None  # the first step that is done, and its time
        self.live: Any = None
        if live and self.console.is_terminal:
            from rich.live import Live

            self.live = Live(
                console=self.console, refresh_per_second=4, transient=False, get_renderable=lambda: self._panel()
            )

    def start(self, step: int, waiting: str = "") -> None:
        """Show the panel, or a line, before the first step. waiting: the reason for a long first step."""
        self.began, self.first, self.waiting = time.perf_counter(), None, waiting or "waiting for the first step"
        self.numbers["step"] = step
        if self.live is not None:
            self.live.start()
        else:
            self.say(self.waiting)

    def stepped(self, step: int) -> None:
        """A step is done. The first one ends the wait."""
        self.numbers["step"] = step
        if self.first is None:
            self.first, self.waiting = (step, time.perf_counter()), None
            if self.live is None:
                self.say(f"the first step is done after {clock(self.first[1] - self.began)}")

    def update(self, step: int, numbers: dict[str, Any]) -> None:
        """New numbers of a step."""
        self.numbers |= numbers
        self.numbers["step"] = step
        if isinstance(numbers.get("loss"), int | float) and math.isfinite(numbers["loss"]):
            self.losses.append(numbers["loss"])
        if self.live is not None:
            self.live.refresh()
        elif "loss" in numbers or "val_loss" in numbers:
            self.console.print(self.line(), highlight=False, soft_wrap=True)

    def say(self, sentence: str) -> None:
        """Print one sentence."""
        self.console.print(sentence, highlight=False, soft_wrap=True, markup=False)

    def sample(self, step: int, text: str) -> None:
        """Show a sample as text: in the panel, or indented in lines. Control characters are left out."""
        self.sampled = step, visible(text)
        if self.live is not None:
            self.live.refresh()
            return
        self.say(f"sample at step {step}:\n{textwrap.indent(self.sampled[1], '    ')}")

    def time_left(self, step: int) -> float:
        """Estimated seconds left, at the average speed since the first step; NaN until the second."""
        if self.first is None or step <= self.first[0]:
            return math.nan
        done = step - self.first[0]
        return (time.perf_counter() - self.first[1]) / done * (self.total - step)

    def _left(self, step: int) -> str:
        seconds = self.time_left(step)
        return "left unknown" if math.isnan(seconds) else f"left {clock(seconds)}"

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
        parts.append(self._left(n["step"]))
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
        if self.waiting is not None:
            rows.add_row(Text(f"{self.waiting} ({clock(time.perf_counter() - self.began)})", style="yellow"))
        if cells:
            rows.add_row(grid)
        if len(self.losses) > 1:
            ends = f" {self.losses[0]:.3f} → {self.losses[-1]:.3f}"
            rows.add_row(Text.assemble(("loss ", "dim"), (sparkline(self.losses), "cyan"), ends))
        if self.sampled is not None:
            lines = [part for line in self.sampled[1].splitlines() for part in textwrap.wrap(line, 100) or [""]]
            rows.add_row(Text(f"sample at step {self.sampled[0]:,}", style="dim"))
            rows.add_row(Text("\n".join(lines[:SAMPLE_LINES] + ["…"] * (len(lines) > SAMPLE_LINES))))
        title = Text(f"{self.name}  step {step:,} of {self.total:,}  {self._left(step)}")
        return Panel(rows, title=title, title_align="left")

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


class NoDisplay:
    """Shows nothing: for all processes except the first, and for a Trainer used from Python."""

    def start(self, step: int, waiting: str = "") -> None: ...

    def stepped(self, step: int) -> None: ...

    def sample(self, step: int, text: str) -> None: ...

    def update(self, step: int, numbers: dict[str, Any]) -> None: ...

    def say(self, sentence: str) -> None: ...

    def time_left(self, step: int) -> float:
        return math.nan

    def close(self) -> None: ...


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    >>> clock(3725)
    '1:02:05'
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], cells: int = SPARK_CELLS) -> str:
    """Finite numbers as blocks of eight heights, from the smallest to the largest; more than `cells` are averaged in groups.

    >>> sparkline([0.0, 0.5, 1.0]), sparkline([2.0, 2.0]), len(sparkline(range(1000)))
    ('▁▅█', '▁▁', 48)
    """
    if len(values) > cells:
        edges = [round(i * len(values) / cells) for i in range(cells + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    low, high = min(values), max(values)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round(top * (v - low) / (high - low))] if high > low else SPARKS[0] for v in values)


def visible(text: str) -> str:
    """A text without control characters, which could move the cursor or change colours; lines stay.

    >>> visible("so\\x1b[31m it\\tgoes\\n")
    'so[31m it goes\\n'
    """
    return "".join(c if c.isprintable() or c == "\n" else " " if c in "\t\r" else "" for c in text)


def slow_first_step(compiles: bool, has_memory: bool, device: str) -> str:
    """The reason for a long first step; empty if there is none.

    >>> slow_first_step(compiles=False, has_memory=False, device="cpu")
    ''
    """
    if compiles:
        return "compiling: torch.compile compiles the blocks in the first step, which takes a minute or more"
    kernels = {"cpu": "C++", "cuda": "Triton"}.get(device)
    if has_memory and kernels is not None:
        return f"the first step compiles {kernels} kernels, if this machine has none yet"
    return ""
