"""Converts panics of the tokenizers library to errors: they are not an `Exception`, and print a backtrace of their own."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Generator

PANIC = "PanicException"  # of pyo3_runtime, which cannot be imported


class PanicError(ValueError):
    """The error raised for a panic."""


@contextlib.contextmanager
def panics_refused(sentence: str, quiet: bool = False) -> Generator[None]:
    """Convert a panic inside the block to a `PanicError`: `sentence`, then the panic's message.

    quiet: hide the backtrace on stderr; any other output to stderr follows when the block ends.
    """
    with _held_back() if quiet else contextlib.nullcontext():
        try:
            yield
        except BaseException as broken:
            if type(broken).__name__ != PANIC:
                raise
            raise PanicError(f"{sentence}: {str(broken).splitlines()[0] if str(broken) else PANIC}") from None


@contextlib.contextmanager
def _held_back() -> Generator[None]:
    """Buffer output to file descriptor 2 until the block ends; drop it if the block fails."""
    try:
        sys.stderr.flush()
        before = os.dup(2)
    except (OSError, AttributeError, ValueError):  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            if sys.exc_info()[0] is None:
                file.seek(0)
                with contextlib.suppress(OSError):
                    os.write(2, file.read())
