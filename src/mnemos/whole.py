"""Files that are written whole or not at all: what every folder that writes one uses."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Generator[BinaryIO, None, None]:
    """A file to write into that gets its name only when the block ends well: synced, then renamed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(f"{folder}/a") as file:
    ...         _ = file.write(b"x")
    ...     os.listdir(folder)
    ['a']
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.part")
    file = open(temporary, "xb")  # noqa: SIM115 — not mkstemp, which gives the file to its owner alone
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_text(path: str | os.PathLike, text: str) -> None:
    """A text in UTF-8."""
    with whole_file(path) as file:
        file.write(text.encode())
