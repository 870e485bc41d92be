"""Update rules: what gradients do to the fast weights. The families are those of docs/theory.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor

from .newton_schulz import NS_COEFFICIENTS, newton_schulz

if TYPE_CHECKING:
    from .spec import MemorySpec


class Rule:
    """Base of all update rules. Subclass `CommittedRule`, set `name`, and pass the class to `register_rule`.

    commits: False for gradient descent, S_t = momentum_t S_{t-1} - lr_t G_t, W_t = retain_t W_{t-1} + S_t, whose weights are linear in
    the gradients of a chunk. True for rules that accumulate S and move W at commits alone, by a function of S.
    """

    name: ClassVar[str]
    commits: ClassVar[bool] = False

    def step(self, S: Tensor, spec: MemorySpec) -> Tensor:
        """The direction of a commit, for the accumulators S (..., d_in, d_out) of one fast map; committed rules only."""
        raise NotImplementedError

    def reference_step(self, S: Tensor, spec: MemorySpec) -> Tensor:
        """The same for `reference_scan`: written to be obviously right, if `step` is not."""
        return self.step(S, spec)


class CommittedRule(Rule):
    """S_t = momentum_t S_{t-1} - G_t; at a commit W ← retained W + lr_t step(S_t), and between commits W only decays."""

    commits = True


RULES: dict[str, type[Rule]] = {}
Kind = TypeVar("Kind", bound=Rule)


def register_rule(cls: type[Kind]) -> type[Kind]:
    """Make an update rule available under its `name`; usable as a decorator."""
    RULES[cls.name] = cls
    return cls


@register_rule
class GradientDescent(Rule):
    """Gradient descent with momentum and decay."""

    name = "gd"


@register_rule
class Muon(CommittedRule):
    """A commit adds the orthogonalised accumulator of each matrix by itself (Newton–Schulz)."""

    name = "muon"

    def step(self, S: Tensor, spec: MemorySpec) -> Tensor:
        return newton_schulz(S, spec.ns_steps, NS_COEFFICIENTS[spec.ns_coefficients])

    def reference_step(self, S: Tensor, spec: MemorySpec) -> Tensor:
        return _textbook_newton_schulz(S, spec)


def _textbook_newton_schulz(S: Tensor, spec: MemorySpec) -> Tensor:
    """Textbook Newton–Schulz on each (d_in, d_out) matrix by itself."""
    schedule = NS_COEFFICIENTS[spec.ns_coefficients]
    norm = S.square().sum((-2, -1), keepdim=True)
    alive = norm >= 1e-14
    X = S / torch.where(alive, norm, torch.ones_like(norm)).sqrt()
    if S.shape[-2] > S.shape[-1]:
        X = X.mT
    for i in range(spec.ns_steps):
        a, b, c = schedule[min(i, len(schedule) - 1)]
        XX = X @ X.mT
        X = a * X + (b * XX + c * XX @ XX) @ X
    if S.shape[-2] > S.shape[-1]:
        X = X.mT
    return torch.where(alive, X, torch.zeros_like(X))
