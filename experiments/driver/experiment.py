"""An experiment as a folder: its config.yaml, the cells that it asks for, and the results that are kept beside it.

question: what it is about
kind: what a cell does, one of `kinds.KINDS`
fixed: {steps: 600}                  # the same in every cell; presets: 1, those that the kept results had (`models.FIRST`)
models: {deltanet: {preset: deltanet, memory_heads: 1}}
runs:                                # each is a product of lists: a cell for every combination
  - {model: [deltanet], lr: [0.001, 0.01], seed: [0, 1, 2]}
quick: {fixed: {steps: 100}, runs: [...]}
tables, plots, claims                # see `tables`, `plots` and `verdicts`
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mnemos.atomic_io import write_text
from mnemos.choices import unknown
from mnemos.deprecation import old_names
from mnemos.eval.files import finite, read_json
from mnemos.memory import NeuralMemoryConfig
from mnemos.models import presets
from mnemos.parsing import parse_yaml

from .models import FIRST, first_memory

Cell = dict[str, Any]
DEFAULTS = (
    2  # to be raised when models begin to compute something else by the same settings: kept results are then run again
)
REVISED = {"muon": 2, "deep": 2}  # the same for models of one kind: see `_kinds`
ADDED_FIELDS = {"attention_conv_width": 0}  # later than the first kept results; the value that all models had before
NEEDED = ("question", "kind", "runs", "quick")
FIELDS = {"question", "kind", "fixed", "models", "runs", "quick", "tables", "plots", "claims", "finding", "headline"}


@dataclass(frozen=True)
class Experiment:
    """A folder's config, and where its results are."""

    name: str
    folder: Path
    config: dict[str, Any]

    @classmethod
    def load(cls, folder: str | Path) -> Experiment:
        folder = Path(folder)
        path = folder / "config.yaml"
        try:
            config = parse_yaml(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as broken:
            raise ValueError(f"{path} cannot be read: {broken}") from None
        lacking = [name for name in NEEDED if not isinstance(config, dict) or name not in config]
        if lacking:
            raise ValueError(f"{path} lacks {', '.join(lacking)}")
        extra = sorted(set(config) - FIELDS)
        if extra:
            raise ValueError(f"{path} has unknown fields {', '.join(extra)}; there are {', '.join(sorted(FIELDS))}")
        return cls(folder.name, folder, config)

    def cells(self, quick: bool = False) -> list[Cell]:
        """Every combination of every run, once: what varies, by name."""
        source = self.config["quick"] if quick else self.config
        found = []
        for run in source["runs"]:
            lists = {name: values if isinstance(values, list) else [values] for name, values in run.items()}
            if lists.get("model") == ["all"]:
                lists["model"] = list(self.config["models"])
            found += [dict(zip(lists, values)) for values in itertools.product(*lists.values())]
        return list({json.dumps(cell, sort_keys=True): cell for cell in found}.values())

    def whole(self, cell: Cell, quick: bool = False) -> Cell:
        """A cell with all that its result depends on: what is fixed, and what its model's name stands for."""
        fixed = self.config.get("fixed", {}) | (self.config["quick"].get("fixed", {}) if quick else {})
        known = self.config.get("models", {})
        if "model" in cell and cell["model"] not in known:
            raise ValueError(f"experiment {self.name} has no model {cell['model']!r}; there are {', '.join(known)}")
        chosen = {"kind": self.config["kind"]} | fixed | cell
        return chosen | ({"model": known[cell["model"]]} if "model" in cell else {})

    def digest(self, cell: Cell, quick: bool = False) -> str:
        """Changes whenever anything does that a result depends on."""
        whole = self.whole(cell, quick)
        preset = whole["model"]["preset"] if "model" in whole else whole.get("preset")
        if preset in presets.PRESETS:
            row = presets.PRESETS[preset]
            fields, chosen = first_fields(row.model, whole.get("model"))
            whole |= {"model": chosen} if chosen is not None else {}
            memory = row.memory
            if whole.pop("presets", None) == FIRST:
                memory = first_row(preset)
            elif memory is not None and presets.config(preset).memory_config.retention == "start":
                memory = memory | {"retention": "start"}
            whole |= {"defaults": DEFAULTS, "row": [row.block, first_names(memory), fields]}
            revised = {kind: REVISED[kind] for kind in _kinds(row.memory, whole.get("model", {})) if kind in REVISED}
            whole |= {"revised": revised} if revised else {}
        text = json.dumps(whole, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def results_path(self) -> Path:
        return self.folder / "results.json"

    def results(self, path: Path | None = None) -> list[dict[str, Any]]:
        """Rows: what varies, what was measured, and the cell's digest."""
        path = path or self.results_path
        return read_json(path)["cells"] if path.exists() else []

    def write(self, rows: list[dict[str, Any]], path: Path, machine: str) -> None:
        """Strict JSON, a line per cell, so that what changes can be read."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(finite(row), allow_nan=False) for row in rows)
        head = json.dumps({"experiment": self.name, "machine": machine})
        write_text(path, f'{head[:-1]}, "cells": [\n{lines}\n]}}\n')


def first_row(preset: str) -> dict[str, Any] | None:
    """The memory of a preset as it was when results were first kept.

    >>> first_row("atlas")["chunk_size"], "commit_every" in first_row("atlas")
    (128, False)
    """
    memory, first = presets.PRESETS[preset].memory, first_memory(preset)
    if memory is None or first.keys() <= {"retention"}:
        return memory
    return {name: value for name, value in (memory | first).items() if value is not None}


def first_names(memory: dict[str, Any] | None) -> dict[str, Any] | None:
    """Fields of a memory under the names they had when results were first kept: digests do not change with a name.

    >>> first_names({"residual": True, "depth": 2})
    {'skip': True, 'depth': 2}
    """
    first = {new: old for old, new in old_names(NeuralMemoryConfig).items()}
    added = {
        "retention": "zero",
        "gating": "linear",
        "muon_scale": "unit",
        "pairs_per_token": 1,
        "max_grad_norm": None,
    }  # fields that came later, at the values they stand for
    kept = {name: value for name, value in (memory or {}).items() if (name, value) not in added.items()}
    return None if memory is None else {first.get(name, name): value for name, value in kept.items()}


def first_fields(
    row: dict[str, Any] | None, model: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Fields of a preset's row and of a cell's model, without those that came later and have the value that they stand for.

    >>> first_fields({"attention_conv_width": 4}, {"preset": "swa", "attention_conv_width": 0})
    (None, {'preset': 'swa'})
    """
    both = (row or {}) | (model or {})
    later = {name for name, value in ADDED_FIELDS.items() if both.get(name, value) == value}
    kept, chosen = (
        None if fields is None else {name: value for name, value in fields.items() if name not in later}
        for fields in (row, model)
    )
    return kept or None, chosen


def _kinds(memory: dict[str, Any] | None, model: dict[str, Any]) -> set[str]:
    """What a model's results may have to be run again for: its rule, and "deep" where its memory is a network with a learned start."""
    if memory is None:
        return set()
    chosen = memory | {name.removeprefix("memory_"): value for name, value in model.items()}
    deep = chosen.get("structure", "mlp") != "linear" and chosen.get("features") != "exp"
    return {chosen.get("rule", "gd")} | ({"deep"} if deep else set())


def find(name: str | None = None, root: str | Path = "experiments") -> list[Experiment]:
    """The experiment of this name, or all of them, in the order of their names."""
    root = Path(root)
    folders = sorted(path.parent for path in root.glob("*/config.yaml"))
    if not folders:
        raise ValueError(f"there are no experiments in {root}: run this in a clone of the repository, or give --root")
    if name is None:
        return [Experiment.load(folder) for folder in folders]
    chosen = [folder for folder in folders if folder.name == name]
    if not chosen:
        raise unknown("experiment", name, [folder.name for folder in folders])
    return [Experiment.load(chosen[0])]
