"""Gates that join attention and memory, and their registry. A new one is a class with `forward` under `@register_gate`.

Shapes: B batch, T time, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dispatch import is_unmodified, operation
from ..memory.gating import logit
from ..nn.block import GatedSum
from ..nn.linear import Linear, linear
from ..nn.norm import RMSNorm
from .mixer import check_registration

if TYPE_CHECKING:
    from .config import MnemosConfig


class Gate(nn.Module):
    """Base of all gates. Subclass it, set `name` (a value of `MnemosConfig.gate_mode`), and pass the class to `register_gate`.

    >>> from mnemos.models import MnemosConfig, register_gate
    >>> @register_gate
    ... class Maximum(Gate):
    ...     name, description = "doc_maximum", "the larger of both, channel by channel"
    ...     def forward(self, y, m, x):
    ...         return torch.maximum(y, m)
    >>> gate = make_gate(MnemosConfig(gate_mode="doc_maximum"))
    >>> gate(torch.zeros(1, 2, 128), torch.ones(1, 2, 128), torch.zeros(1, 2, 128)).mean()
    tensor(1.)
    """

    name: ClassVar[str]
    description: ClassVar[str] = ""

    def __init__(self, config: MnemosConfig):
        super().__init__()

    def forward(self, y: Tensor, m: Tensor, x: Tensor) -> Tensor:
        """Attention y and memory m of the same inputs x, each (B, T, D) -> (B, T, D)."""
        raise NotImplementedError

    def gated_sum(self) -> GatedSum | None:
        """The gate as a kernel may compute it; None: it is computed by `forward`.

        A class that overrides this must return None for its subclasses, which may compute something else.
        """
        return None


GATES: dict[str, type[Gate]] = {}
Kind = TypeVar("Kind", bound=Gate)


def register_gate(cls: type[Kind]) -> type[Kind]:
    """Make a gate available under its `name`; usable as a decorator."""
    check_registration("gate", cls, Gate, GATES)
    GATES[cls.name] = cls
    return cls


def make_gate(config: MnemosConfig) -> Gate:
    """The gate of a config's `gate_mode`.

    >>> from mnemos.models import MnemosConfig
    >>> make_gate(MnemosConfig(gate_mode="sigmoid"))
    SigmoidGate()
    """
    return GATES[config.gate_mode](config)


@register_gate
class ProductGate(Gate):
    """silu(norm(y) norm(m)), as in Titans."""

    name = "product"
    description = "silu(norm(y) norm(m))"

    def __init__(self, config: MnemosConfig):
        super().__init__(config)
        self.norms = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))

    def forward(self, y: Tensor, m: Tensor, x: Tensor) -> Tensor:
        return F.silu(self.norms[0](y) * self.norms[1](m))


@register_gate
class SigmoidGate(Gate):
    """y sigmoid(m): can only attenuate attention."""

    name = "sigmoid"
    description = "y sigmoid(m)"

    def forward(self, y: Tensor, m: Tensor, x: Tensor) -> Tensor:
        return y * m.sigmoid()


class TokenGate(Gate):
    """Base of gates with one value g in [0, 1] per token and head: g = sigmoid(linear(x) + offset + initial_logit).

    `initial_logit` is a constant, the logit of `config.gate_init`. `linear` and `offset` are learned and 0 at first.
    A subclass may override `opening` and `weights`.
    additive: whether attention keeps the weight 1, y + g m; else the weights sum to 1, g y + (1 - g) m.
    """

    additive: ClassVar[bool] = False

    def __init__(self, config: MnemosConfig):
        super().__init__(config)
        self.initial_logit, self.heads = logit(config.gate_init), _gate_heads(config)
        self.linear = Linear(config.hidden_size, self.heads, bias=False)
        self.offset = nn.Parameter(torch.empty(self.heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the learned part to 0: every gate is then `gate_init`."""
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.offset)

    def forward(self, y: Tensor, m: Tensor, x: Tensor) -> Tensor:
        known = self.gated_sum() is not None and is_unmodified(self.linear)
        if known and self.linear.weight.shape == (self.heads, x.shape[-1]):
            return gated_sum(x, y, m, self.linear.weight, self.offset, self.initial_logit, self.additive)
        g = self.opening(self.linear(x)).repeat_interleave(y.shape[-1] // self.heads, dim=-1)  # B T D
        attention, memory = self.weights(g)
        return attention * y + memory * m

    def opening(self, mapped: Tensor) -> Tensor:
        """The output of `linear`, (B, T, heads) -> the gates g, (B, T, heads) in [0, 1]."""
        if mapped.shape[-1] != self.heads:
            raise ValueError(f"the gate's linear map has {mapped.shape[-1]} outputs, but {self.heads} are expected")
        return _opening(mapped, self.offset, self.initial_logit)

    @classmethod
    def weights(cls, g: Tensor) -> tuple[Tensor, Tensor]:
        """Gates g -> the weights of attention and of memory, each of the shape of g.

        >>> [weight.item() for weight in GATES["additive"].weights(torch.tensor(0.25))]
        [1.0, 0.25]
        """
        return (torch.ones_like(g), g) if cls.additive else (g, 1 - g)


@register_gate
class ConvexGate(TokenGate):
    """g y + (1 - g) m."""

    name = "convex"
    description = "g y + (1 - g) m, with g per token and head"
    additive = False

    def gated_sum(self) -> GatedSum | None:
        return _gated_sum(self) if type(self) is ConvexGate else None


@register_gate
class AdditiveGate(TokenGate):
    """y + g m."""

    name = "additive"
    description = "y + g m, with g per token and head"
    additive = True

    def gated_sum(self) -> GatedSum | None:
        return _gated_sum(self) if type(self) is AdditiveGate else None


@operation
def gated_sum(x: Tensor, y: Tensor, m: Tensor, weight: Tensor, offset: Tensor, logit: float, additive: bool) -> Tensor:
    """g y + (1 - g) m, or y + g m if additive, with g = sigmoid(x weightᵀ + offset + logit).

    x, y, m (B, T, D), weight (heads, D), offset (heads,) -> (B, T, D).
    """
    g = _opening(linear(x, weight), offset, logit)  # B T heads
    g = g.repeat_interleave(y.shape[-1] // g.shape[-1], dim=-1)  # B T D
    return y + g * m if additive else g * y + (1 - g) * m


def _opening(mapped: Tensor, offset: Tensor, logit: float) -> Tensor:
    return (mapped + (offset + logit).to(mapped.dtype)).sigmoid()


def _gated_sum(gate: TokenGate) -> GatedSum:
    linear, offset = (
        gate._modules["linear"],
        gate._parameters["offset"],
    )  # faster than attributes, at every decoded token
    assert offset is not None
    return GatedSum(gate, linear, offset, gate.initial_logit, gate.additive, gate.heads)


def _gate_heads(config: MnemosConfig) -> int:
    """The number of attention heads if it divides the hidden size; else one gate per channel."""
    heads = config.num_attention_heads
    return heads if config.hidden_size % heads == 0 else config.hidden_size
