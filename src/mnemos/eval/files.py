"""Results as files: written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from pathlib import Path
from typing import Any


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write under a temporary name, sync, rename."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}.part")
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


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Strict JSON: a number that is not finite becomes null.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(f"{folder}/x.json", {"loss": math.inf})
    ...     read_json(f"{folder}/x.json")
    {'loss': None}
    """
    write_text(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """What `write_json` wrote; a sentence if it is something else."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as broken:
        raise ValueError(f"{path} is not a results file: {broken}") from None


def finite(x: Any) -> Any:
    """The same with null for every number that JSON has no word for."""
    if isinstance(x, dict):
        return {str(key): finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x
