"""Atomic writes of JSON, and syncing folders to disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..atomic_io import write_text


def write_json(path: str | os.PathLike, value: Any) -> None:
    write_text(path, json.dumps(value))


def sync_folder(path: str | os.PathLike, files: bool = False) -> None:
    """Sync a folder to disk; with `files`, also the contents of every file under it."""
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
