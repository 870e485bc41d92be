"""The ablations: the component that each switches off, and the models that have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..choices import nearest
from ..models import MnemosConfig

FULL = "full"


@dataclass(frozen=True)
class Ablation:
    """One ablation. has: whether a model has the component. change: overrides of `presets.config` that switch it off."""

    name: str
    about: str
    has: Callable[[MnemosConfig], bool]
    change: Callable[[MnemosConfig], dict[str, Any]]


def _memory(name: str, *plain: Any) -> Callable[[MnemosConfig], bool]:
    """Whether a model has a memory whose field `name` is not in `plain`."""
    return lambda config: config.has_memory and getattr(config.memory_config, name) not in plain


def _window_1(config: MnemosConfig) -> dict[str, Any]:
    """A window of 1 has no lag, so the gates that weigh lags are switched off as well."""
    parts = [part for part in config.memory_config.gate_parts if part == "token"]
    return {"memory_window": 1, "memory_gate": "*".join(parts) or "none"}


ABLATIONS: dict[str, Ablation] = {
    row.name: row
    for row in (
        Ablation(
            "no-polynomial",
            "no feature map: keys and queries in full width",
            _memory("features", "identity"),
            lambda config: {"memory_features": "identity", "memory_key_dim": None},
        ),
        Ablation(
            "gd",
            "gradient descent in place of Muon",
            _memory("rule", "gd"),
            lambda config: {"memory_rule": "gd"},
        ),
        Ablation(
            "shallow",
            "a matrix in place of a deep memory",
            _memory("structure", "linear"),
            lambda config: {"memory_structure": "linear"},
        ),
        Ablation("window-1", "each write uses only its own token", _memory("window", 1), _window_1),
        Ablation(
            "no-memory",
            "sliding-window attention in place of every memory",
            lambda config: config.has_memory,
            lambda config: {"memory_layers": []},
        ),
        Ablation(
            "no-gates",
            "equal weights for all tokens of a window",
            _memory("gate", "none"),
            lambda config: {"memory_gate": "none"},
        ),
        Ablation(
            "no-momentum",
            "no accumulated surprise",
            _memory("momentum", False),
            lambda config: {"memory_momentum": False},
        ),
        Ablation(
            "no-forgetting",
            "no decay of the memory",
            _memory("retain", False),
            lambda config: {"memory_retain": False},
        ),
    )
}


def applicable(config: MnemosConfig) -> list[str]:
    """The ablations that change this model, in the table's order.

    >>> from mnemos.models import presets
    >>> applicable(presets.config("titans-mag"))
    ['shallow', 'no-memory', 'no-momentum', 'no-forgetting']
    """
    return [row.name for row in ABLATIONS.values() if row.has(config)]


def overrides(name: str, config: MnemosConfig) -> dict[str, Any]:
    """Overrides of `presets.config` that switch a component of this model off; none for "full"."""
    if name == FULL:
        return {}
    if name not in ABLATIONS:
        close = nearest(name, ABLATIONS)
        hint = f"did you mean {close}? Choose" if close else "choose"
        raise ValueError(f"ablation {name!r} is unknown; {hint} from {', '.join(ABLATIONS)}")
    row = ABLATIONS[name]
    if not row.has(config):
        raise ValueError(
            f"ablation {name!r} ({row.about}) changes nothing in this model; there are {', '.join(applicable(config))}"
        )
    kept = {"memory_retention": config.memory_config.retention}  # its default depends on other choices
    return kept | row.change(config)
