"""Retention: how a memory forgets, and what its weights are made of.

A linear retention moves the weights by 1 - `retain` of their distance towards 0 or towards the initial weights W0, at every token.
A transformed one keeps an accumulator A,
    A_t = retain_t A_{t-1} - lr_t G_t          W = weights(A_t) at every commit,
so that W is not linear in the gradients: between commits (`commit_every` tokens, by default a chunk) the weights stay as they are.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from .registry import Registry
from .rules import Roles, Rule

MAX_Q = 8.0
SPREAD = 2.0  # standard deviation of initial logits: uniform weights would make all hidden units alike


class Retention:
    """Base of all retentions. Subclass `TransformedRetention`, set `name`, and pass the class to `register_retention`.

    is_linear: whether weights decay by `retain`, W_t = retain_t W_{t-1} + S_t.
    keeps_start: whether they decay towards W0 instead of 0; the state then holds W0 (`MemoryState.start`).
    """

    name: ClassVar[str]
    is_linear: ClassVar[bool] = True
    keeps_start: ClassVar[bool] = False
    description: str = ""  # for tables of presets


class TransformedRetention(Retention):
    """A retention whose weights are a function of the accumulator of gradients; goes with rule "gd" without momentum.

    >>> from mnemos.memory import MemorySpec, register_retention
    >>> @register_retention
    ... class Clipped(TransformedRetention):
    ...     name = "doc_clipped"
    ...     def weights(self, A):
    ...         return A.clamp(-1, 1)
    >>> MemorySpec(key_dim=4, value_dim=4, retention="doc_clipped").commits
    True
    """

    is_linear = False

    def weights(self, A: Tensor) -> Tensor:
        """The weights of one fast map: accumulators (..., d_in, d_out) -> (..., d_in, d_out)."""
        raise NotImplementedError

    def initial(self, W0: Tensor) -> Tensor:
        """The accumulator before the first token, from the learned W0 (heads, d_in, d_out)."""
        return W0

    def lr_scale(self, shapes: tuple[tuple[int, int], ...]) -> float:
        """The stable learning rate relative to that of a linear retention. shapes: (d_in, d_out) of every fast map."""
        return 1.0


class RetainedDescent(Rule):
    """Gradient descent under a transformed retention. S of the state is the accumulator A."""

    name = "gd"
    commits = True
    momentum_gate = False

    def __init__(self, retention: TransformedRetention):
        self.retention = retention

    def roles(self, gates, spec) -> Roles:
        kept = torch.ones_like(gates.lr) if gates.retain is None else gates.retain
        return Roles(strength=gates.lr, momentum=kept, retain=None, rate=torch.ones_like(gates.lr))

    def commit(self, W: Tensor, S: Tensor, rate: Tensor, spec) -> Tensor:
        return torch.where(rate > 0, self.retention.weights(S), W)  # the rate is 0 if a row has no token here

    def lr_scale(self, spec) -> float:
        return self.retention.lr_scale(spec.shapes)

    def initial_weights(self, W0: Tensor) -> Tensor:
        return self.retention.weights(self.retention.initial(W0))

    def initial_accumulator(self, W0: Tensor) -> Tensor:
        return self.retention.initial(W0)


RETENTIONS: Registry[Retention] = Registry("retention")
register_retention = RETENTIONS.register


@register_retention
class Zero(Retention):
    """W_t = retain_t W_{t-1} + S_t: forgetting towards 0, as Titans and Atlas print it."""

    name = "zero"
    description = "L2 (decay towards 0)"


@register_retention
class Start(Retention):
    """W_t = W0 + retain_t (W_{t-1} - W0) + S_t: forgetting towards the initial weights.

    At 0 no map of a network has a gradient, so that a network that forgets towards 0 stops learning on a long stream; at W0 it learns
    as it did before the first token. With features "exp" the first map, a list of pairs, begins at 0 and decays towards 0.
    """

    name = "start"
    keeps_start = True
    description = "L2 (decay towards W0)"


def decayed(W: Tensor, start: Tensor | None, retain: Tensor) -> Tensor:
    """The weights W that `retain` leaves, or x W for weights W: retain W + (1 - retain) start. start: W0, x W0, or None for 0.

    >>> decayed(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0]), torch.tensor(0.5))
    tensor([2., 2.])
    """
    return retain * W if start is None else torch.lerp(start, W, retain)


@register_retention
class Lq(TransformedRetention):
    """Moneta's (eqs. 24 and 25): W = A / ‖A‖_q^(q-2), for each matrix by itself; q = 2 leaves A as it is. Derived for 1 < q <= 2; Moneta's 4 is empirical.

    floor: the smallest norm that A is divided by. For q > 3 the weights grow while the accumulator shrinks (‖W‖_q = ‖A‖_q^(3-q)), and
    with them the steps: on long streams that diverges (docs/log.md). floor=1 normalises large accumulators only.
    The learned W0 is divided by its norm, so that W = A = W0 / ‖W0‖_q before the first token.

    >>> A = 2 * torch.ones(1, 2, 2)
    >>> Lq(q=4).weights(A)[0, 0]  # the 4-norm of A is 2^1.5
    tensor([0.2500, 0.2500])
    """

    name = "lq"

    def __init__(self, q: float = 4.0, floor: float = 1e-6):
        if not 2 <= q <= MAX_Q:
            raise ValueError(f"retention='lq' needs q from 2 to {MAX_Q:g}, not {q}")
        if not floor > 0:
            raise ValueError(f"retention='lq' needs floor > 0, not {floor}")
        self.q, self.floor = q, floor
        self.description = f"L{q:g} norm" + (f" from {floor:g}" if floor > 1e-3 else "")

    def weights(self, A: Tensor) -> Tensor:
        return A / self._norm(A, self.floor) ** (self.q - 2)

    def initial(self, W0: Tensor) -> Tensor:
        return W0 / self._norm(W0, 1e-6)

    def _norm(self, A: Tensor, floor: float) -> Tensor:
        return torch.linalg.vector_norm(A, self.q, dim=(-2, -1), keepdim=True).clamp(min=floor)


@register_retention
class KL(TransformedRetention):
    """Memora's (eqs. 21 and 27): W = scale · softmax(A) over the inputs of each output, A = log W up to a constant: forgetting is a KL divergence, and retain moves
    the weights towards uniform. All weights are positive and sum to `scale`. The learned W0 holds the logits, brought to one spread.

    >>> KL(scale=3).weights(torch.zeros(1, 6, 2))[0, 0].tolist()
    [0.5, 0.5]
    """

    name = "kl"
    description = "KL (softmax of logits)"

    def __init__(self, scale: float = 4.0):
        if not scale > 0:
            raise ValueError(f"retention='kl' needs scale > 0, not {scale}")
        self.scale = scale

    def weights(self, A: Tensor) -> Tensor:
        return self.scale * A.softmax(-2)

    def initial(self, W0: Tensor) -> Tensor:
        return SPREAD * W0 / W0.square().mean((-2, -1), keepdim=True).clamp(min=1e-12).sqrt()

    def lr_scale(self, shapes: tuple[tuple[int, int], ...]) -> float:
        """A step of logits moves a weight in proportion to it: scale / d_in on average."""
        return math.prod(d_in for d_in, _ in shapes) ** (1 / len(shapes)) / self.scale
