"""Which choices of a `MemorySpec` go together. Every refusal is one ValueError that lists the valid choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .retention import RETENTIONS
from .rules import RULES, GradientDescent, Muon

if TYPE_CHECKING:
    from .spec import MemorySpec

MIN_NORM, MAX_NORM = 1e-18, 1e18  # of max_grad_norm and value_bound


def check_combinations(spec: MemorySpec) -> None:
    """Raise a ValueError for choices that are valid alone, but not together."""
    if spec.commit_every is not None:
        if not spec.commits and spec.commit_every != 1:  # gradient descent changes the weights at every token
            raise ValueError(f"commit_every > 1 goes with {_committed()} only")
        if type(spec.commit_every) is not int or spec.commit_every < 1 or spec.chunk_size % spec.commit_every:
            raise ValueError(f"commit_every={spec.commit_every!r:.40} must divide chunk_size={spec.chunk_size}")
    _check_retention(spec)
    _check_muon(spec)
    if spec.anchor == "token" and (not spec.network.is_matrix or spec.commits or not spec.loss.solvable):
        raise ValueError(
            "anchor='token' goes with structure='linear' and rule='gd' "
            f"(any objective, features, window, momentum, read), not structure={spec.structure!r}, rule={spec.rule!r}"
        )
    if spec.decay_first and spec.anchor != "token":
        raise ValueError("decay_first=True needs anchor='token' (structure='linear', rule='gd')")
    _check_kernel(spec)
    _check_gradient(spec)


def choose(config, **allowed: tuple) -> None:
    """Raise a ValueError for a field of `config` whose value is not among those allowed."""
    for name, values in allowed.items():
        if getattr(config, name) not in values:
            chosen = f"{name}={getattr(config, name)!r:.60}"
            raise ValueError(f"{chosen} is unknown; choose one of {', '.join(map(repr, values))}")


def require(config, names: str, fits: Callable[[Any], bool], what: str) -> None:
    """Raise a ValueError for the first of `names` whose value in `config` does not fit; what: "must be …"."""
    for name in names.split():
        value = getattr(config, name)
        if not fits(value):
            raise ValueError(f"{name}={value!r:.60} must {what}")


def is_whole(value, least: int = 1, most: float = math.inf) -> bool:
    """Whether the value is a whole number in least..most."""
    return type(value) is int and least <= value <= most


def is_norm(value) -> bool:
    """Whether the value is a positive number whose square and its inverse float32 holds."""
    return type(value) in (int, float) and MIN_NORM <= value <= MAX_NORM


def _check_gradient(spec: MemorySpec) -> None:
    """Combinations of max_grad_norm and pairs_per_token."""
    bound = spec.max_grad_norm
    if bound is not None:
        require(spec, "max_grad_norm", is_norm, f"be None or a number in {MIN_NORM:g}..{MAX_NORM:g}")
        if spec.anchor != "chunk" or spec.is_kv_cache:
            raise ValueError(
                "max_grad_norm goes with anchor='chunk' (chunk_size=1 takes every gradient at the weights of the token before) and any "
                f"features but 'exp', not anchor={spec.anchor!r}, features={spec.features!r}"
            )
    if spec.pairs_per_token > 1 and spec.is_kv_cache:
        raise ValueError(f"features={spec.features!r} keep one pair per token and head: use more heads")


def _check_retention(spec: MemorySpec) -> None:
    """Combinations of a transformed retention."""
    if spec.retains.is_linear:
        return
    if spec.rule != GradientDescent.name or spec.anchor != "chunk" or spec.is_kv_cache or not spec.momentum:
        raise ValueError(
            f"retention={spec.retention!r} goes with rule='gd', anchor='chunk', momentum=True (its accumulator) and any features "
            f"but 'exp', not rule={spec.rule!r}, anchor={spec.anchor!r}, momentum={spec.momentum}, features={spec.features!r}"
        )
    if spec.nesterov or spec.lr_position != "outside":
        raise ValueError(f"nesterov and lr_position go with rule='muon', not retention={spec.retention!r}")


def _check_muon(spec: MemorySpec) -> None:
    """Combinations of nesterov, lr_position and step_size."""
    if spec.nesterov and not (spec.commits and spec.momentum):
        raise ValueError(
            f"nesterov=True goes with rule='muon' and momentum=True, not rule={spec.rule!r}, momentum={spec.momentum}"
        )
    if spec.has_nuclear_step and not isinstance(spec.update_rule, Muon):
        raise ValueError(f"muon_scale='nuclear' goes with rule='muon' only, not rule={spec.rule!r}")
    if spec.lr_position == "inside" and not spec.commits:
        raise ValueError(f"lr_position='inside' goes with rule='muon' only, not rule={spec.rule!r}")
    if spec.lr_position == "inside" and not (spec.momentum or spec.commit > 1 or spec.has_nuclear_step):
        raise ValueError(
            "lr_position='inside' needs momentum=True or commit_every > 1: a step that holds one gradient does not depend on lr"
        )
    require(spec, "step_size", lambda x: type(x) in (int, float) and 0 < x < math.inf, "be a number > 0")
    if spec.step_size != 1 and spec.lr_position == "outside":
        raise ValueError(
            f"step_size={spec.step_size!r:.40} goes with lr_position='inside' only: outside, lr is the size of a step"
        )


def _check_kernel(spec: MemorySpec) -> None:
    """Combinations of features="exp"."""
    if spec.normalize and not (spec.is_kv_cache and spec.network.is_matrix and not spec.loss.uses_output):
        raise ValueError(
            "normalize=True goes with features='exp', structure='linear' and objective='dot', not "
            f"features={spec.features!r}, structure={spec.structure!r}, objective={spec.objective!r}"
        )
    if not spec.is_kv_cache:
        return
    if not spec.network.is_mlp or spec.commits or spec.anchor != "chunk":
        why = "; a product of two maps that start at 0 never leaves it" if spec.network.is_gated else ""
        why = "; chunk_size=1 is the same" if spec.anchor == "token" else why
        raise ValueError(
            "features='exp' goes with structure='linear' or 'mlp', rule='gd' and anchor='chunk' (any objective, window, "
            f"momentum, read), not structure={spec.structure!r}, rule={spec.rule!r}, anchor={spec.anchor!r}{why}"
        )


def _committed() -> str:
    rules = [f"rule={name!r}" for name, rule in RULES.items() if rule.commits]
    return " or ".join([*rules, *(f"retention={name!r}" for name, kind in RETENTIONS.items() if not kind.is_linear)])
