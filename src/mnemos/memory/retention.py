"""Retention: how a memory forgets, and what its weights are made of.

A linear retention moves the weights by 1 - `retain` of their distance towards 0 or towards the initial weights W0, at every token.
A transformed one keeps an accumulator A,
    A_t = retain_t A_{t-1} - lr_t G_t          W = weights(A_t) at every commit,
so that W is not linear in the gradients: between commits (`commit_every` tokens, by default a chunk) the weights stay as they are.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .registry import Registry
from .rules import Roles, Rule


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
