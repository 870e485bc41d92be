"""The engine of the cpu backend: runs of chunks by the C++ kernels, for networks that are chains of fast maps."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...memory.newton_schulz import NS_COEFFICIENTS, polynomials
from ...memory.rules import GradientDescent, Muon, Rule
from ...memory.spec import MemorySpec
from ...nn.derivatives import transformed
from ..torch.chunking import ChunkRun
from ..torch.coefficients import UNDERFLOW
from ..torch.engine import Engine, RunInputs
from .build import unavailable_reason
from .layer import decay_products
from .operators import PLAIN, constant
from .scan_kernels import SCANS, Plan
from .structs import LOSSES, MAPS, schedule

KERNELS: dict[type[Rule], str] = {GradientDescent: "chain", Muon: "muon"}  # of each rule; "windowed" is of a family
TOKENS_PER_STATE = 64  # between two saved states of muon, at least
LARGE_STATE_NUMEL = 1 << 20  # of a head's weights, from which on twice as many: memory is scarcer than time there
Maps = list[Tensor]


class Packed(NamedTuple):
    """Fast maps as one array (G, numbers): map after map W, then S if `matrices` is 2, each with its narrow axis first. Maps that share
    an input are one."""

    numbers: Tensor
    matrices: int


class CpuEngine(Engine):
    joins_chunks = False  # the kernel runs small chunks without overhead

    def decay_products(self, x: Tensor) -> Tensor:
        return decay_products(x, UNDERFLOW[x.dtype])

    def open(self, spec: MemorySpec, W: Maps, S: Maps) -> Packed:
        def fused(maps: Maps, group: tuple[int, ...]) -> Tensor:
            w = torch.cat([maps[i] for i in group], -1) if len(group) > 1 else maps[group[0]]
            return (w if w.shape[1] <= w.shape[2] else w.mT).flatten(1)

        assert spec.chain is not None
        kinds = (W, S) if S else (W,)
        parts = [fused(maps, group) for group in spec.chain.groups for maps in kinds]
        return Packed(torch.cat(parts, 1) if len(parts) > 1 else parts[0], len(kinds))

    def close(self, spec: MemorySpec, state: Packed) -> tuple[Maps, Maps]:
        """Inverse of `open`. Each map gets memory of its own, so that a state continues the same way whether it was saved or not."""
        assert spec.chain is not None
        parts, found = iter(_parts(spec, state)), ([], [])
        for group, (a, b) in zip(spec.chain.groups, _fused_shapes(spec)):
            for kind in found[: state.matrices]:
                x = next(parts)
                w = x.unflatten(1, (a, b)) if a <= b else x.unflatten(1, (b, a)).mT
                split = w.chunk(len(group), -1) if len(group) > 1 else (w,)
                kind += [part.clone(memory_format=torch.contiguous_format) for part in split]
        return found

    def run(self, spec: MemorySpec, given: RunInputs, state: Packed, anchor: Packed, start: Packed | None):
        assert spec.chain is not None and given.chunks.subchunks == 1
        chunks, (C, beta, f, n, m) = given.chunks, given.coefficients
        initial = given.k.new_empty(0) if start is None else start.numbers
        name, save_every, numbers, matrices = (
            KERNELS[type(spec.update_rule)],
            tiles_per_state(chunks),
            (),
            state.matrices,
        )
        if spec.windowed:
            name, tensors = "windowed", [C, beta, n, initial]
            numbers = spec.window, spec.has_nuclear_step, schedule(spec)
        elif spec.commits:
            assert start is None and given.rate is not None
            if matrices == 1:  # without momentum S begins at 0 in every run
                W, _ = self.close(spec, state)
                state = self.open(spec, W, [torch.zeros_like(w) for w in W])
            large = sum(d_in * d_out for d_in, d_out in spec.shapes) >= LARGE_STATE_NUMEL
            save_every = max(1, min(TOKENS_PER_STATE * (1 + large) // chunks.stride, int(chunks.tiles**0.5)))
            polynomial, *others = polynomials(NS_COEFFICIENTS[spec.ns_coefficients], spec.ns_steps)
            assert all(other == polynomial for other in others)  # `unsupported_spec` keeps other schedules from here
            tensors = [beta, -n, m, given.rate[..., -1]]
            numbers = chunks.commit, [len(group) for group in spec.chain.groups], len(others) + 1, list(polynomial)
        else:
            C, n, both = -C, -n, matrices == 2
            end = torch.stack([C[:, :, -1], n], -1) if both else C[:, :, -1].unsqueeze(-1)  # N G E m
            keep = torch.stack([beta[..., -1], m], -1) if both else beta[..., -1:]  # N G m
            tensors = [C, beta, f, end, keep, initial]
        weights = None if chunks.fresh else packed_weights(spec, anchor)
        arrays = [given.q, given.k, given.v, *tensors, state.numbers, weights]
        inputs, outputs = map(list, zip(*_fused_shapes(spec)))
        plan = Plan(
            inputs=inputs,
            outputs=outputs,
            geglu=[activation == "geglu" for activation in spec.chain.activations],
            matrices=state.matrices,
            keeps_start=initial.numel() > 0,
            l2=LOSSES[type(spec.loss)],
            before=spec.read == "before",
            period=chunks.period,
            save_every=save_every,
            saving=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays),
        )
        y, last, _, _ = SCANS[name](*arrays, *plan, *numbers)
        state = Packed(last, state.matrices)
        if state.matrices > matrices:
            state = Packed(packed_weights(spec, state), 1)
        return (None if given.q is None else y), state


def tiles_per_state(chunks: ChunkRun) -> int:
    """Tiles between two saved states. About 256 tokens were the fastest; the backward holds the tiles in between at once, so
    there are never more of them than saved states."""
    return max(1, min(256 // chunks.length, 32, math.isqrt(chunks.tiles)))


def _fused_shapes(spec: MemorySpec) -> list[tuple[int, int]]:
    """(d_in, d_out) of every map, of which those that share an input are one."""
    assert spec.chain is not None
    return [(spec.shapes[group[0]][0], sum(spec.shapes[i][1] for i in group)) for group in spec.chain.groups]


def _parts(spec: MemorySpec, state: Packed) -> tuple[Tensor, ...]:
    sizes = [a * b for a, b in _fused_shapes(spec) for _ in range(state.matrices)]
    return state.numbers.split(sizes, 1)


def packed_weights(spec: MemorySpec, state: Packed) -> Tensor:
    """The numbers of W alone."""
    return state.numbers if state.matrices == 1 else torch.cat(_parts(spec, state)[::2], 1)


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
    if type(spec.update_rule) not in KERNELS or type(spec.loss) not in LOSSES:
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
        return "batch rows times heads are fewer than half the threads: torch uses the threads better"
    return unavailable_reason("windowed" if spec.windowed else KERNELS[type(spec.update_rule)], "decay")
