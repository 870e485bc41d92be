"""Results files, written atomically."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ..atomic_io import write_text
from ..parsing import parse_json


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Write strict JSON: a number that is not finite becomes null.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(f"{folder}/x.json", {"loss": math.inf})
    ...     read_json(f"{folder}/x.json")
    {'loss': None}
    """
    write_text(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """The content of a results file; raises a ValueError for any other file."""
    try:
        return parse_json(Path(path).read_bytes(), "it")
    except ValueError as broken:
        raise ValueError(f"{path} is not a results file: {broken}") from None


def finite(x: Any) -> Any:
    """The value with null for every number that JSON cannot express."""
    if isinstance(x, dict):
        return {str(key): finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x
