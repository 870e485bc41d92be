"""Files that are written whole or not at all, the cache folder, and extras that may be missing."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

from ..atomic_io import whole_file


def write_json(path: str | os.PathLike, content: Any) -> None:
    """JSON in a file, whole or not at all."""
    with whole_file(path) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())


def read_json(path: str | os.PathLike) -> Any:
    """What `write_json` wrote; None where there is none, or none that can be read."""
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def cache_folder(chosen: str | None) -> Path:
    """The folder of shards and trained tokenizers, made if need be."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(chosen or os.environ.get("MNEMOS_CACHE") or os.path.join(home, "mnemos")).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise ValueError(f"cache_dir {folder} cannot be made: {wrong.strerror}; choose another") from None
    return folder


def require(module: str, extra: str) -> Any:
    """Import a module of an extra; where it is absent, one sentence.

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
