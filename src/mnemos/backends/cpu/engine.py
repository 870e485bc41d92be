"""The engine of the cpu backend: runs of chunks by the C++ kernels, for networks that are chains of fast maps."""

from __future__ import annotations

import torch
from torch import Tensor

from ...memory.newton_schulz import NS_COEFFICIENTS
from ...memory.rules import GradientDescent, Muon, Rule
from ...memory.spec import MemorySpec
from ...nn.derivatives import transformed
from ..torch.coefficients import UNDERFLOW
from ..torch.engine import Engine
from . import chain, muon, windowed
from .build import unavailable_reason
from .decay import decay_products
from .operators import PLAIN, constant
from .structs import LOSSES, MAPS

RULES: dict[type[Rule], str] = {GradientDescent: "chain", Muon: "muon"}  # the kernel of each rule


class CpuEngine(Engine):
    joins_chunks = False  # the kernel runs small chunks without overhead

    def decay_products(self, x: Tensor) -> Tensor:
        return decay_products(x, UNDERFLOW[x.dtype])

    def open(self, spec: MemorySpec, W: list[Tensor], S: list[Tensor]) -> chain.Packed:
        return chain.pack(spec, W, S)

    def close(self, spec: MemorySpec, state: chain.Packed) -> tuple[list[Tensor], list[Tensor]]:
        return chain.unpack(spec, state)

    def run(self, spec: MemorySpec, chunks, q, k, v, coefficients, rate, retain, state, anchor, start):
        given = None if chunks.fresh else chain.packed_weights(spec, anchor)
        initial = k.new_empty(0) if start is None else start.numbers
        if spec.windowed:
            return windowed.run(spec, chunks, q, k, v, coefficients, state, given, initial)
        if isinstance(spec.update_rule, Muon):
            assert start is None
            return muon.run(spec, chunks, q, k, v, coefficients, rate, state, given)
        return chain.run(spec, chunks, q, k, v, coefficients, state, given, initial)


@constant
def _threads() -> int:
    return torch.get_num_threads()


def unsupported(k: Tensor, spec: MemorySpec) -> str | None:
    """Why the kernels do not compute this memory, or keys k, or None if they do."""
    if transformed():
        return "torch.func needs torch operations"
    if not k.is_cpu or type(k) not in PLAIN:
        return "tensors must be plain tensors in the CPU's memory"
    return unsupported_spec(spec)


def unsupported_spec(spec: MemorySpec) -> str | None:
    """Why the kernels do not compute this memory, or None if they do."""
    if spec.anchor != "chunk" or spec.is_kv_cache:
        return "anchor='token' and features='exp' have no kernel"
    if spec.max_grad_norm is not None or spec.pairs_per_token > 1:
        return "max_grad_norm and pairs_per_token > 1 have no kernel"
    if type(spec.update_rule) not in RULES or type(spec.loss) not in LOSSES:
        return "the kernels have rules 'gd' and 'muon', objectives 'l2' and 'dot'"
    if isinstance(spec.update_rule, Muon) and not spec.windowed:
        if spec.nesterov or spec.has_nuclear_step or len(NS_COEFFICIENTS[spec.ns_coefficients]) > 1:
            return "the kernel of commit intervals orthogonalises S itself, with one polynomial for all iterations"
        if spec.retains.keeps_start:
            return "the kernel of commit intervals decays towards 0, not towards W0"
    if spec.chain is None or len(spec.chain.groups) > MAPS:
        return f"the network must be a chain of at most {MAPS} fast maps"
    return None


def unsupported_scan(k: Tensor, spec: MemorySpec, backend: str = "auto") -> str | None:
    reason = unsupported(k, spec)
    if reason is not None:
        return reason
    if spec.windowed and spec.chain is not None and any(len(group) > 1 for group in spec.chain.groups):
        return "the kernel of commits after every token has no gated networks"
    if k.dtype != torch.float64 and torch.is_autocast_enabled(k.device.type):
        return "autocast: the kernels compute in float32 and float64"
    if backend == "auto" and _threads() > 2 * k.shape[0] * k.shape[2]:
        return "fewer than one row and head for two threads: torch uses them better"
    return unavailable_reason("windowed" if spec.windowed else RULES[type(spec.update_rule)], "decay")
