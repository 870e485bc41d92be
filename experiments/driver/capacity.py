"""Kind "capacity": n random pairs are written into a fresh memory and read back. Nothing is trained."""

from __future__ import annotations

from typing import Any

from mnemos.eval.capacity import bare_capacity, linear_spec, structure_point
from mnemos.memory import MemorySpec


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """With `features`: the largest n that comes back exactly, beside the bound. With `structure`: error and recall of n pairs."""
    if "features" in cell:
        return {**bare_capacity(linear_spec(cell["features"], cell["degree"], dim=cell["dim"]), cell["seeds"])}
    spec = MemorySpec(
        key_dim=cell["dim"],
        value_dim=cell["dim"],
        structure=cell["structure"],
        rule=cell["rule"],
        window=cell["window"],
        chunk_size=cell["chunk"],
        momentum=cell["rule"] == "muon",
    )
    point = structure_point(spec, cell["n"], cell["passes"], cell["seeds"])
    return {"relative_error": point["error"], "recall": point["recall"], "best_lr": point["lr"]}
