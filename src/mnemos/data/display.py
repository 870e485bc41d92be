"""Progress bars in a terminal, and one plain line elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator

from .build import TokenizeProgress

PATIENCE = 5.0  # seconds of tokenising before the plain line


@contextlib.contextmanager
def building(total: int, show: bool | None) -> Generator[Callable[[TokenizeProgress], None], None, None]:
    """A bar over the bytes of all files, with the number of tokens so far; it appears at the first progress.

    show: None for a bar if stderr is a terminal, and otherwise one line if tokenising takes more than `PATIENCE` seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("tokenising"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[made]}"))
    draws = console.is_terminal if show is None else show
    announces, began = show is None and not draws, time.monotonic()
    bar = Bar(*columns, TimeRemainingColumn(), console=console, disable=not draws)
    task = bar.add_task("", total=max(1, total), made="")
    tokens = text = 0

    def on_progress(progress: TokenizeProgress) -> None:
        nonlocal tokens, text, announces
        if announces and time.monotonic() - began > PATIENCE:
            announces = False
            print(f"tokenising {total / 1e6:,.0f} MB of files, once for this data", file=sys.stderr, flush=True)
        if not bar.live.is_started:
            bar.start()
        tokens, text = tokens + progress.tokens, text + progress.text_bytes
        bar.update(task, advance=progress.file_bytes, made=f"{text / 1e6:,.0f} MB, {tokens / 1e6:,.1f} M tokens")

    try:
        yield on_progress
    finally:
        bar.stop()


@contextlib.contextmanager
def training_tokenizer(show: bool | None) -> Generator[Callable[[int], None], None, None]:
    """A status line with the number of characters read for training the tokenizer."""
    from rich.console import Console
    from rich.status import Status

    console = Console(stderr=True)
    seen = 0
    if not (console.is_terminal if show is None else show):
        yield lambda n: None
        return
    with Status("training the tokenizer", console=console) as status:

        def on_chars(n: int) -> None:
            nonlocal seen
            seen += n
            status.update(f"training the tokenizer on {seen / 1e6:,.1f} M characters")

        yield on_chars
