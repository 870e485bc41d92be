"""Atomic file writes: a file is complete or absent."""

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
    """Open a temporary file for writing; it is synced and renamed to `path` when the block ends without an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(f"{folder}/a") as file:
    ...         _ = file.write(b"x")
    ...     os.listdir(folder)
    ['a']
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.part")
    file = open(temporary, "xb")  # noqa: SIM115 — not mkstemp, whose files only their owner can read
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


def sync_folder(folder: str | os.PathLike) -> None:
    """Write the entries of a folder to disk, so that a rename inside it survives a loss of power."""
    if os.name != "posix":  # other systems cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text in UTF-8, atomically."""
    with whole_file(path) as file:
        file.write(text.encode())


def check_not_foreign(folder: str | os.PathLike, names: Iterable[str], writer: str) -> None:
    """Raise a ValueError if a folder already holds one of the files `names`, which `writer` did not write and would overwrite."""
    for name in names:
        if os.path.lexists(os.path.join(folder, name)):
            raise ValueError(f"{os.path.join(folder, name)} was not written by {writer}: choose another output folder")


def part_of(name: str) -> str | None:
    """The final name of a temporary file of `whole_file`; None for any other file.

    >>> part_of(".a.json.0123456789abcdef.part"), part_of("a.part")
    ('a.json', None)
    """
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.part", name)
    return match[1] if match else None


def remove_parts(folder: str | os.PathLike, names: Container[str] | None = None) -> None:
    """Remove the temporary files that `whole_file` left in a folder when its process was killed.

    names: final names of the files to remove (None: all). Call it only if no other process writes to the folder.
    """
    folder = Path(folder)
    with contextlib.suppress(OSError):
        for file in [] if folder.is_symlink() else list(folder.iterdir()):
            name = part_of(file.name)
            if name is not None and (names is None or name in names) and file.is_file() and not file.is_symlink():
                file.unlink(missing_ok=True)
