"""Memory networks: small nets whose linear maps are fast weights.

A structure is written once, against `fast(i, x)`, which applies the i-th fast map to `x (..., d_in)`. The engine
interprets the same code at the anchor (recording inputs and gradients), in dual form (reads) and with materialised
weights (the reference, `step`). A structure that is a plain chain also names its `chain`, which unlocks the
hand-written backward; a structure without one is differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from .registry import Registry

if TYPE_CHECKING:
    from .spec import MemorySpec

FastLinear = Callable[[int, Tensor], Tensor]


class Chain(NamedTuple):
    """A net that is a chain: groups of maps that share one input, and the activation that follows each group but the last."""

    groups: tuple[tuple[int, ...], ...]
    activations: tuple[str, ...]


class Structure:
    """Base of all memory networks. Subclass it, set `name`, and pass the class to `register_structure`.

    `residual` asks the engine to add the unlifted key (or query) to the output where key_dim == value_dim.

    >>> from mnemos.memory import MemorySpec, Structure, register_structure
    >>> @register_structure
    ... class Tanh(Structure):
    ...     name = "doc_tanh"
    ...     def shapes(self):
    ...         return [(self.dim_in, 8), (8, self.dim_out)]
    ...     def forward(self, x, fast):
    ...         return fast(1, fast(0, x).tanh())
    >>> MemorySpec(key_dim=4, value_dim=4, structure="doc_tanh").shapes
    ((4, 8), (8, 4))
    """

    name: ClassVar[str]
    residual: bool = False
    is_matrix: ClassVar[bool] = False  # a single fast map and nothing else
    is_mlp: ClassVar[bool] = False  # fast maps one after the other, with activations between them
    is_gated: ClassVar[bool] = False  # has a product of two fast maps
    draws_w0: ClassVar[bool] = False  # has initial weights of its own, `draw_w0`

    def __init__(self, spec: MemorySpec):
        self.dim_in = spec.lifted_dim
        self.dim_out = spec.value_dim
        self.hidden = spec.hidden_dim
        self.depth = spec.depth

    @property
    def chain(self) -> Chain | None:
        return None

    def shapes(self) -> list[tuple[int, int]]:
        """(d_in, d_out) of every fast map, in the order data flows."""
        raise NotImplementedError

    def forward(self, x: Tensor, fast: FastLinear) -> Tensor:
        """x (..., dim_in) -> (..., dim_out), by `fast(i, x)` and ordinary functions of the last axis."""
        raise NotImplementedError

    def draw_w0(self, heads: int) -> list[Tensor]:
        """Initial weights of a layer, (heads, d_in, d_out) per fast map, if `draws_w0`."""
        raise NotImplementedError


STRUCTURES: Registry[Structure] = Registry("structure")
register_structure = STRUCTURES.register


@register_structure
class LinearMap(Structure):
    """M(x) = x W."""

    name = "linear"
    is_matrix = True
    is_mlp = True

    @property
    def chain(self) -> Chain:
        return Chain(((0,),), ())

    def shapes(self) -> list[tuple[int, int]]:
        return [(self.dim_in, self.dim_out)]

    def forward(self, x: Tensor, fast: FastLinear) -> Tensor:
        return fast(0, x)


@register_structure
class MLP(Structure):
    """M(x) = x + GELU(... GELU(x W1) ...) Wn: `depth` maps, hidden width round(expansion * value_dim)."""

    name = "mlp"
    is_mlp = True
    residual = True

    @property
    def chain(self) -> Chain:
        return Chain(tuple((i,) for i in range(self.depth)), ("gelu",) * (self.depth - 1))

    def shapes(self) -> list[tuple[int, int]]:
        widths = [self.dim_in] + [self.hidden] * (self.depth - 1) + [self.dim_out]
        return list(zip(widths, widths[1:]))

    def forward(self, x: Tensor, fast: FastLinear) -> Tensor:
        for i in range(self.depth - 1):
            x = F.gelu(fast(i, x))
        return fast(self.depth - 1, x)


@register_structure
class GatedMLP(Structure):
    """M(x) = x + (GELU(x W_gate) * x W_value) W_out (Atlas++)."""

    name = "gated_mlp"
    is_gated = True
    residual = True

    @property
    def chain(self) -> Chain:
        return Chain(((0, 1), (2,)), ("geglu",))

    def shapes(self) -> list[tuple[int, int]]:
        return [(self.dim_in, self.hidden), (self.dim_in, self.hidden), (self.hidden, self.dim_out)]

    def forward(self, x: Tensor, fast: FastLinear) -> Tensor:
        return fast(2, F.gelu(fast(0, x)) * fast(1, x))
