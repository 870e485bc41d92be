"""Any `nn.Module` as the network of a memory: its parameters are the fast weights.

A parameter of P numbers is a fast map (1, P) of the constant input 1, so that every engine, rule, retention and state takes it as it is. The
price is memory and time: every token has its own copy of all parameters, where fast linear maps never build one.
N tokens, D lifted key dim, V value dim, P numbers of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from .networks import FastLinear, Structure, register_structure

if TYPE_CHECKING:
    from .spec import MemorySpec

Build = TypeVar("Build", bound=Callable[[int, int], nn.Module])


class ModuleStructure(Structure):
    """The network `build(dim_in, dim_out)`, a module (N, D) -> (N, V) that treats its rows alike, in evaluation mode."""

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
