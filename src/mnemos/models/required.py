"""Modules that a saved model needs: those outside the package that register its parts. They are named, never imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..memory.config import GATINGS
from ..memory.features import FEATURES
from ..memory.losses import LOSSES
from ..memory.networks import STRUCTURES
from ..memory.registry import name_of
from ..memory.retention import RETENTIONS
from ..memory.rules import RULES
from .gate import GATES
from .mixer import BLOCKS

PARTS: dict[str, Mapping[str, type]] = {
    "structure": STRUCTURES,
    "objective": LOSSES,
    "rule": RULES,
    "retention": RETENTIONS,
    "features": FEATURES,
    "gating": GATINGS,
}
MAX_MODULES = 16
MAX_MODULE_CHARACTERS = 100
PACKAGE = __name__.partition(".")[0]


def required_modules(memory: Mapping[str, Any] | None, layers: Any = (), gate_mode: Any = None) -> list[str]:
    """The modules outside the package that register blocks, the gate or parts of the memory of a model.

    Scripts and notebooks are left out: they cannot be imported by name.

    >>> required_modules({"structure": "mlp", "rule": "muon"}, ["mag", "swa"], "convex")
    []
    """
    chosen = _chosen(memory or {}, layers, gate_mode)
    modules = {known[name].__module__ for _, known, name in chosen if name in known}
    outside = (name for name in modules if name.partition(".")[0] not in (PACKAGE, "__main__"))
    return sorted(name for name in outside if _is_module(name))


def check_required(names: Any, memory: Mapping[str, Any], layers: Any = (), gate_mode: Any = None) -> None:
    """Raise an error if `names` is not a list of modules, or if a part of the model is not registered and needs one of them.

    >>> check_required(["my_parts"], {"structure": "residuals"})
    Traceback (most recent call last):
    ValueError: structure='residuals' is not registered; the model's config names its module: if you trust it, use --import my_parts, or in Python: import my_parts
    """
    if not isinstance(names, list) or len(names) > MAX_MODULES or not all(_is_module(name) for name in names):
        raise ValueError(
            f"requires_modules={names!r:.60} must be a list of at most {MAX_MODULES} names of Python modules, "
            f"each of at most {MAX_MODULE_CHARACTERS} characters"
        )
    for part, known, name in _chosen(memory, layers, gate_mode) if names else ():
        if name not in known:
            flags = " ".join(f"--import {module}" for module in names)
            raise ValueError(
                f"{part}={name!r:.40} is not registered; the model's config names its module: if you trust it, "
                f"use {flags}, or in Python: import {', '.join(names)}"
            )


def _chosen(memory: Mapping[str, Any], layers: Any, gate_mode: Any) -> list[tuple[str, Mapping[str, type], str]]:
    """Config field, registry and name of each registered part; values that are not names are left to the config's own checks."""
    blocks = layers if isinstance(layers, list | tuple) else [layers]
    chosen = [(part, known, name_of(memory.get(part))) for part, known in PARTS.items()]
    chosen += [("gate_mode", GATES, gate_mode), *(("layers", BLOCKS, block) for block in blocks)]
    return [(part, known, name) for part, known, name in chosen if isinstance(name, str)]


def _is_module(name: Any) -> bool:
    """Whether this is a dotted identifier of a length that a module has."""
    is_short = isinstance(name, str) and len(name) <= MAX_MODULE_CHARACTERS
    return is_short and all(part.isidentifier() for part in name.split("."))
