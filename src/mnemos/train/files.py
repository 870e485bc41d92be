"""Small files written whole or not at all, and folders that appear only when they are complete."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from pathlib import Path
from typing import Any


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write under a temporary name, sync, rename."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_json(path: str | os.PathLike, value: Any) -> None:
    write_text(path, json.dumps(value))


def sync_folder(path: str | os.PathLike, files: bool = False) -> None:
    """Make a folder's entries last; with `files`, also what every file under it holds."""
    if files:
        for file in sorted(Path(path).rglob("*")):
            _sync(file)
    _sync(Path(path))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
