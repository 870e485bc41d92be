"""Memory networks: small nets whose linear maps are fast weights.

A structure is written once, against `fast(i, x)`, which applies the i-th fast map to `x (..., d_in)`. The engine
interprets the same code at the anchor (recording inputs and gradients), in dual form (reads) and with materialised
weights (the reference, `step`). A structure that is a plain chain also names its `chain`, which unlocks the
hand-written backward; a structure without one is differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Registry

if TYPE_CHECKING:
    from .spec import MemorySpec

FastLinear = Callable[[int, Tensor], Tensor]
Build = TypeVar("Build", bound=Callable[[int, int], nn.Module])


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


class ModuleStructure(Structure):
    """Any `nn.Module` as a network, whose parameters are the fast weights: `build(dim_in, dim_out)`, a module (N, dim_in) -> (N, dim_out)
    that treats its rows alike, in evaluation mode.

    A parameter of P numbers is a fast map (1, P) of the constant input 1, so that every engine, rule, retention and state takes it as it is.
    The price is memory and time: every token has its own copy of all parameters, where fast linear maps never build one.
    """

    build: ClassVar[Callable[[int, int], nn.Module]]
    draws_w0 = True

    def __init__(self, spec: MemorySpec):
        super().__init__(spec)
        with torch.random.fork_rng(devices=[]):  # a spec must not change the numbers that others draw
            self.module = self._built()
        self.sizes = {name: p.shape for name, p in self.module.named_parameters()}
        if not self.sizes:
            raise ValueError(f"structure {self.name!r} is a module without parameters: there is nothing to write into")

    def _built(self) -> nn.Module:
        return self.build(self.dim_in, self.dim_out).eval().requires_grad_(False)

    def shapes(self) -> list[tuple[int, int]]:
        return [(1, size.numel()) for size in self.sizes.values()]

    def draw_w0(self, heads: int) -> list[Tensor]:
        """The module's own initial parameters, drawn anew for every head."""
        drawn = [[p.flatten().unsqueeze(0) for p in self._built().parameters()] for _ in range(heads)]
        return [torch.stack(parameter) for parameter in zip(*drawn)]

    def forward(self, x: Tensor, fast: FastLinear) -> Tensor:
        one, before = x.new_ones(*x.shape[:-1], 1), x.shape[:-1]
        weights = [fast(i, one).reshape(-1, *size) for i, size in enumerate(self.sizes.values())]
        fixed = {name: b.to(x if b.is_floating_point() else x.device) for name, b in self.module.named_buffers()}

        def one_token(x: Tensor, *weights: Tensor) -> Tensor:
            parameters = dict(zip(self.sizes, weights))
            return torch.func.functional_call(self.module, parameters | fixed, (x.unsqueeze(0),)).squeeze(0)

        y = torch.func.vmap(one_token)(x.reshape(-1, x.shape[-1]), *weights)
        if y.shape[1:] != (self.dim_out,):
            raise ValueError(
                f"structure {self.name!r} maps (tokens, {self.dim_in}) to (tokens, {', '.join(map(str, y.shape[1:]))}), "
                f"but (tokens, {self.dim_out}) is expected"
            )
        return y.reshape(*before, self.dim_out)


def register_module(name: str) -> Callable[[Build], Build]:
    """Decorator: make the modules that `build(dim_in, dim_out)` returns available as structure `name`.

    >>> from mnemos.memory import NeuralMemory
    >>> @register_module("doc_normed")
    ... def build(dim_in, dim_out):
    ...     return nn.Sequential(nn.LayerNorm(dim_in), nn.Linear(dim_in, 8), nn.Tanh(), nn.Linear(8, dim_out))
    >>> y, state = NeuralMemory(dim=16, heads=2, structure="doc_normed", chunk_size=4, max_lr=0.02)(torch.randn(1, 9, 16))
    >>> [tuple(w.shape) for w in state.weights][:3]
    [(1, 2, 1, 8), (1, 2, 1, 8), (1, 2, 1, 64)]
    """

    def register(build: Build) -> Build:
        body = {"name": name, "build": staticmethod(build), "__module__": build.__module__, "__doc__": build.__doc__}
        register_structure(type(name, (ModuleStructure,), body))
        return build

    return register
