"""Modules that a saved model needs: those that register parts of its memory outside the package. They are named, never imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..memory.features import FEATURES
from ..memory.losses import LOSSES
from ..memory.networks import STRUCTURES
from ..memory.rules import RULES

PARTS: dict[str, Mapping[str, type]] = {
    "structure": STRUCTURES,
    "objective": LOSSES,
    "rule": RULES,
    "features": FEATURES,
}
MAX_MODULES = 16
MAX_MODULE_CHARACTERS = 100
PACKAGE = __name__.partition(".")[0]


def required_modules(memory: Mapping[str, Any] | None) -> list[str]:
    """The modules outside the package whose parts a memory uses. A script or notebook is left out: it cannot be imported.

    >>> required_modules({"structure": "mlp", "rule": "muon"})
    []
    """
    chosen = [(known, (memory or {}).get(part)) for part, known in PARTS.items()]
    used = [known[name] for known, name in chosen if isinstance(name, str) and name in known]
    names = {cls.__module__ for cls in used if cls.__module__.partition(".")[0] != PACKAGE}
    return sorted(name for name in names if name != "__main__" and _is_module(name))


def check_required(names: Any, memory: Mapping[str, Any]) -> None:
    """Raise an error if `names` is not a list of modules, or if a part of the memory is not registered and needs one of them.

    >>> check_required(["my_parts"], {"structure": "residuals"})
    Traceback (most recent call last):
    ValueError: structure='residuals' is not registered; the model's config names its module: if you trust it, use --import my_parts, or in Python: import my_parts
    """
    if not isinstance(names, list) or len(names) > MAX_MODULES or not all(_is_module(name) for name in names):
        raise ValueError(
            f"requires_modules={names!r:.60} must be a list of at most {MAX_MODULES} names of Python modules, "
            f"each of at most {MAX_MODULE_CHARACTERS} characters"
        )
    for part, known in PARTS.items():
        value = memory.get(part)
        if names and isinstance(value, str) and value not in known:
            flags = " ".join(f"--import {name}" for name in names)
            raise ValueError(
                f"{part}={value!r:.40} is not registered; the model's config names its module: if you trust it, "
                f"use {flags}, or in Python: import {', '.join(names)}"
            )


def _is_module(name: Any) -> bool:
    """Whether this is a dotted identifier of a length that a module has."""
    is_short = isinstance(name, str) and len(name) <= MAX_MODULE_CHARACTERS
    return is_short and all(part.isidentifier() for part in name.split("."))
