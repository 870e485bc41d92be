"""JSON files written atomically, the cache folder, and imports of optional extras."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

from ..atomic_io import whole_file


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Write JSON to a file, atomically."""
    with whole_file(path) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())


def read_json(path: str | os.PathLike) -> Any:
    """The content of a JSON file; None if it is missing or unreadable."""
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def cache_folder(chosen: str | None) -> Path:
    """The folder of shards and trained tokenizers; created if missing."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(chosen or os.environ.get("MNEMOS_CACHE") or os.path.join(home, "mnemos")).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise ValueError(f"cache_dir {folder} cannot be created: {wrong.strerror}; choose another") from None
    return folder


def require(module: str, extra: str) -> Any:
    """Import a module of an optional extra; raises a ValueError with the install command if it is missing.

    >>> require("nosuchmodule", "data")
    Traceback (most recent call last):
    ValueError: this needs nosuchmodule: pip install 'mnemos[data]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != module.split(".")[0]:
            raise
        raise ValueError(f"this needs {module.split('.')[0]}: pip install 'mnemos[{extra}]'") from None
