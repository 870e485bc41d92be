"""What a cell does, by its kind: train and measure, or measure alone. Every kind is a function from a cell to its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mnemos.memory.validation import NotFiniteError

from . import capacity, needle, recall, scale, stability, story, stream, text

KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "recall": recall.run,
    "text": text.run,
    "needle": needle.run,
    "story": story.run,
    "stream": stream.run,
    "capacity": capacity.run,
    "stability": stability.run,
    "scale": scale.run,
}


def run_cell(cell: dict[str, Any], text_folder: Path = Path("data")) -> dict[str, Any]:
    """The numbers of a cell, rounded to six digits: more would be noise, and the files are kept. text_folder: where a corpus other than
    "embedded" is. A model that diverged in training cannot be measured: the result is {"diverged": 1}."""
    if cell["kind"] not in KINDS:
        raise ValueError(f"kind={cell['kind']!r} is unknown; choose one of {', '.join(KINDS)}")
    if cell.get("corpus", "embedded") != "embedded":
        cell = cell | {"corpus": str(text_folder / cell["corpus"])}
    try:
        found = KINDS[cell["kind"]]({name: value for name, value in cell.items() if name != "kind"})
    except NotFiniteError:
        return {"diverged": 1}
    return {name: _rounded(value) for name, value in found.items()}


def _rounded(x: Any) -> Any:
    if isinstance(x, float) and math.isfinite(x):
        return float(f"{x:.6g}")
    return x
