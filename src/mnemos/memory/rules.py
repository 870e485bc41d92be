"""Gates, and update rules: how gradients change the fast weights. The families are those of docs/theory.md."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .newton_schulz import (
    NS_COEFFICIENTS,
    Polynomial,
    low_rank_growth,
    low_rank_newton_schulz,
    newton_schulz,
    polynomials,
)
from .registry import Registry

if TYPE_CHECKING:
    from .spec import MemorySpec

TIMED = ("lr", "momentum", "retain", "gate", "lag", "threshold")  # gates with a time axis


@dataclass
class Gates:
    """Per-token, per-head numbers that steer the memory; None means momentum 0, retain 1, gate 1.

    lr, momentum, retain, gate: (B, T, H). decay: (H,), weight decay^j of the token j steps back in the window.
    lag: (B, T, H, window), lag[..., j] weights token t-j. All lie in [0, 1], but lr and threshold, which are any numbers >= 0.
    threshold: (B, T, H), the parameter of inner losses that take one per token (Huber); None is the loss's own.
    """

    lr: Tensor
    momentum: Tensor | None = None
    retain: Tensor | None = None
    gate: Tensor | None = None
    decay: Tensor | None = None
    lag: Tensor | None = None
    threshold: Tensor | None = None

    def map(self, function) -> Gates:
        """Apply `function` to every gate that has a time axis; `decay` has none and stays."""
        timed = {name: getattr(self, name) for name in TIMED}
        mapped: dict[str, Any] = {name: None if x is None else function(x) for name, x in timed.items()}
        return Gates(**mapped, decay=self.decay)

    def masked(self, write_mask: Tensor, window: int) -> Gates:
        """Gates under which tokens where write_mask (B, T) is False write nothing: the gradient at their position is 0 for the whole
        window, and theirs has weight 0 in the windows of later tokens. momentum, retain and lr are the same.

        >>> Gates(lr=torch.ones(1, 3, 1)).masked(torch.tensor([[True, False, True]]), window=1).gate.flatten()
        tensor([1., 0., 1.])
        """
        writes = write_mask.to(self.lr.dtype).unsqueeze(-1).expand_as(self.lr)  # B T H
        gate, lag = writes if self.gate is None else self.gate * writes, self.lag
        if window > 1:
            lag = writes.unsqueeze(-1).expand(*writes.shape, window) if lag is None else lag * writes.unsqueeze(-1)
        return dataclasses.replace(self, gate=gate, lag=lag)

    def lag_weights(self, window: int, dtype: torch.dtype) -> Tensor | None:
        """decay^j * lag_j, the weight of the token j steps back: (B, T, H, window), or None if all are 1."""
        lag = None if self.lag is None else self.lag.to(dtype)
        if self.decay is None or window == 1:
            return lag
        powers = torch.arange(window, device=self.decay.device)
        decay = self.decay.to(dtype).unsqueeze(-1) ** powers  # H c
        return decay.expand(*self.lr.shape, window) if lag is None else lag * decay


@dataclass
class Roles:
    """What the gates of a call do under a rule, per token and head:

    S_t = momentum_t S_{t-1} - strength_t G_t; W decays by retain_t; a commit moves W by rate_t.
    None means strength 1, momentum 0, retain 1. lag: (B, T, H, window), weight of the token j steps back, or None for 1.
    """

    strength: Tensor | None
    momentum: Tensor | None
    retain: Tensor | None
    rate: Tensor | None = None
    lag: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Roles:
        """Apply `function` to every tensor."""
        return Roles(**{name: None if x is None else function(x) for name, x in vars(self).items()})

    def replace(self, **changes: Tensor | None) -> Roles:
        return dataclasses.replace(self, **changes)


class Rule:
    """Base of all update rules. Subclass `CommittedRule`, set `name`, and pass the class to `register_rule`.

    commits: False for gradient descent, S_t = momentum_t S_{t-1} - lr_t G_t, W_t = retain_t W_{t-1} + S_t, whose weights are linear in
    the gradients of a chunk. True for rules that accumulate S and change W at commits alone, by a function of S.
    momentum_gate: whether the decay of S is a gate of its own. unit_step: whether a step has the same size for any gradient.
    """

    name: ClassVar[str]
    commits: ClassVar[bool] = False
    momentum_gate: ClassVar[bool] = True
    unit_step: ClassVar[bool] = False
    description: ClassVar[str] = ""  # for tables of presets

    def roles(self, gates: Gates, spec: MemorySpec) -> Roles:
        """What gates (B, T, H) do under this rule."""
        return Roles(gates.lr, gates.momentum, gates.retain)

    def max_lr(self, spec: MemorySpec) -> float | None:
        """The largest stable lr; None for that of gradient descent times `lr_scale`."""
        return None

    def lr_scale(self, spec: MemorySpec) -> float:
        """The largest stable lr relative to that of gradient descent with decay."""
        return 1.0

    def commit(self, W: Tensor, S: Tensor, rate: Tensor, spec: MemorySpec) -> Tensor:
        """The weights after a commit, from the decayed weights W and S (..., d_in, d_out); rate: (..., 1, 1). Committed rules only."""
        raise NotImplementedError

    def is_windowed(self, spec: MemorySpec) -> bool:
        """Whether a step depends on the gradients of the window alone, and `window_step` computes it from their Gram matrices."""
        return False

    def window_step(self, gram_in: Tensor, gram_out: Tensor, weight: Tensor, spec: MemorySpec) -> Tensor:
        """M (..., c, c) of a step Aᵀ M B, for S = -Aᵀ diag(weight) B with inputs A (c, d_in) and errors B (c, d_out) of the window.

        gram_in, gram_out: A Aᵀ and B Bᵀ, (..., c, c); weight: (..., c).
        """
        raise NotImplementedError

    def initial_weights(self, W0: Tensor) -> Tensor:
        """Weights of a fast map before the first token, from W0 (heads, d_in, d_out)."""
        return W0

    def initial_accumulator(self, W0: Tensor) -> Tensor:
        """S of a fast map before the first token."""
        return torch.zeros_like(W0, memory_format=torch.contiguous_format)


def norm_factor(squared: Tensor, bound: float) -> Tensor:
    """min(1, bound / norm) for squared norms: the factor that shortens a gradient to the norm `bound`.

    >>> norm_factor(torch.tensor([0.0, 1.0, 16.0]), 2.0)
    tensor([1.0000, 1.0000, 0.5000])
    """
    far = squared > float(bound) ** 2  # the square of a large whole number is none that torch takes
    return torch.where(far, bound * torch.where(far, squared, 1.0).rsqrt(), 1.0)  # the root has no gradient at 0


class CommittedRule(Rule):
    """S_t = momentum_t S_{t-1} - G_t; at a commit W ← retained W + lr_t step(S_t), and between commits W only decays."""

    commits = True
    unit_step = True

    def roles(self, gates: Gates, spec: MemorySpec) -> Roles:
        if spec.lr_position == "outside":
            return Roles(None, gates.momentum, gates.retain, rate=gates.lr)
        return Roles(gates.lr, gates.momentum, gates.retain, rate=torch.full_like(gates.lr, spec.step_size))

    def max_lr(self, spec: MemorySpec) -> float | None:
        return 1.0

    def step(self, S: Tensor, spec: MemorySpec) -> Tensor:
        """The direction of a commit, for the accumulators S (..., d_in, d_out) of one fast map."""
        raise NotImplementedError

    def commit(self, W: Tensor, S: Tensor, rate: Tensor, spec: MemorySpec) -> Tensor:
        return W + rate * self.step(S, spec)


RULES: Registry[Rule] = Registry("rule")
register_rule = RULES.register


@register_rule
class GradientDescent(Rule):
    """Gradient descent with momentum and decay."""

    name = "gd"
    description = "gradient descent"


@register_rule
class Muon(CommittedRule):
    """A commit adds the orthogonalised accumulator of each matrix by itself (Newton–Schulz)."""

    name = "muon"
    description = "Muon"

    def max_lr(self, spec: MemorySpec) -> float | None:
        """Steps of unit size after every token: the rate at which float32 and float64 stay together on a long stream of noise.

        Newton–Schulz lifts the smallest directions of a gradient, rounding errors included; measured borders lie at 0.5 to 0.9 / sqrt(b c)
        for chunks of b = 16 and 64 and windows of c = 4 to 16 (docs/log.md).
        """
        if spec.has_nuclear_step:
            return None
        return 0.4 / math.sqrt(spec.chunk_size * spec.window) if spec.commit == 1 else 1.0

    def step(self, S: Tensor, spec: MemorySpec) -> Tensor:
        step = newton_schulz(S, spec.ns_steps, NS_COEFFICIENTS[spec.ns_coefficients])
        return (S * step).sum((-2, -1), keepdim=True) * step if spec.has_nuclear_step else step

    def is_windowed(self, spec: MemorySpec) -> bool:
        """A window longer than a map is wide has dependent rows: there the low-rank form is less exact, and no cheaper."""
        narrowest = min(min(shape) for shape in spec.shapes)
        exact = spec.window * spec.pairs_per_token <= narrowest and low_rank_growth(_schedule(spec)) <= MAX_GROWTH
        return exact and spec.commit == 1 and not spec.momentum

    def window_step(self, gram_in: Tensor, gram_out: Tensor, weight: Tensor, spec: MemorySpec) -> Tensor:
        M = low_rank_newton_schulz(gram_in, gram_out, -weight, _schedule(spec))
        if not spec.has_nuclear_step:
            return M
        inner = -(weight.unsqueeze(-1) * (gram_in @ M) * gram_out).sum((-2, -1), keepdim=True)  # <S, Aᵀ M B>
        return inner * M


MAX_GROWTH = 2000.0  # of rounding errors in a low-rank step: then float32 keeps four digits


def _schedule(spec: MemorySpec) -> tuple[Polynomial, ...]:
    return polynomials(NS_COEFFICIENTS[spec.ns_coefficients], spec.ns_steps)
