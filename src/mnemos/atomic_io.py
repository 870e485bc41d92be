"""Files that are written whole or not at all: what every folder that writes one uses."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Container, Generator, Iterable
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


def check_not_foreign(folder: str | os.PathLike, names: Iterable[str], writer: str) -> None:
    """Refuse a folder that holds one of the files that `writer` is about to write, and that it did not write itself."""
    for name in names:
        if os.path.lexists(os.path.join(folder, name)):
            raise ValueError(f"{os.path.join(folder, name)} was not written by {writer}: choose another output folder")


def part_of(name: str) -> str | None:
    """The name that a temporary file of `whole_file` was to get; None for any other file.

    >>> part_of(".a.json.0123456789abcdef.part"), part_of("a.part")
    ('a.json', None)
    """
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.part", name)
    return match[1] if match else None


def remove_parts(folder: str | os.PathLike, names: Container[str] | None = None) -> None:
    """Remove what `whole_file` left in a folder when its process was killed; names: only of these files.

    Call it where no other process may be writing.
    """
    folder = Path(folder)
    with contextlib.suppress(OSError):
        for file in [] if folder.is_symlink() else list(folder.iterdir()):
            name = part_of(file.name)
            if name is not None and (names is None or name in names) and file.is_file() and not file.is_symlink():
                file.unlink(missing_ok=True)
