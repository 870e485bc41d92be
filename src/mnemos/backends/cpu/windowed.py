"""Scan of the windowed family in C++ (windowed.cpp), for networks that are chains of single fast maps, with its own backward.

N tiles, G = batch x heads, L tokens and E window tokens of a tile.
"""

from __future__ import annotations

from torch import Tensor

from ...memory.spec import MemorySpec
from ..torch.chunking import ChunkRun
from ..torch.coefficients import Coefficients
from .chain import Packed, ScanKernel, plan_of, tiles_per_state
from .structs import WindowRule, schedule


def run(
    spec: MemorySpec,
    chunks: ChunkRun,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    coefficients: Coefficients,
    state: Packed,
    given: Tensor | None,
    initial: Tensor,
) -> tuple[Tensor | None, Packed]:
    """Run the tiles of one run of chunks. The arguments are those of `chain.run`."""
    C, beta, _, weight, _ = coefficients
    tensors = [q, k, v, C, beta, weight, initial, state.numbers, given]
    plan = plan_of(spec, chunks, 1, tiles_per_state(chunks), initial.numel() > 0, tensors)
    y, last, _, _ = _scan(*tensors, *plan, spec.window, spec.has_nuclear_step, schedule(spec))
    return (None if q is None else y), Packed(last, 1)


def _rule(window: int, nuclear: bool, numbers: list[float]) -> tuple[WindowRule]:
    return (WindowRule.of(window, nuclear, numbers),)


_scan = ScanKernel(
    "windowed",
    ("q", "k", "v", "C", "beta", "weight", "W0"),
    _rule,
    "int window, bool nuclear, float[] numbers",
).scan
