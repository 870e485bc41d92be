"""Scan of the windowed family in C++ (windowed.cpp), for networks that are chains of single fast maps, with its own backward.

N tiles, G = batch x heads, L tokens and E window tokens of a tile.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from ...memory.newton_schulz import FLOOR, NS_COEFFICIENTS, polynomials
from ...memory.spec import MemorySpec
from ..torch.chunking import ChunkRun
from ..torch.coefficients import Coefficients
from .chain import Packed, ScanKernel, plan_of, tiles_per_state

MAX_STEPS = 64


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
    schedule = polynomials(NS_COEFFICIENTS[spec.ns_coefficients], spec.ns_steps)
    numbers = [x for polynomial in schedule for x in polynomial]
    y, last, _, _ = _scan(*tensors, *plan, spec.window, spec.has_nuclear_step, numbers)
    return (None if q is None else y), Packed(last, 1)


class Rule(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("window", "steps", "nuclear")),
        ("floor", ctypes.c_double),
        *((name, ctypes.c_double * MAX_STEPS) for name in "abc"),
    ]


def _rule(window: int, nuclear: bool, numbers: list[float]) -> tuple[Rule]:
    """numbers: a, b and c of every iteration."""
    schedule = ((ctypes.c_double * MAX_STEPS)(*numbers[i::3]) for i in range(3))
    return (Rule(window, len(numbers) // 3, nuclear, FLOOR, *schedule),)


_scan = ScanKernel(
    "windowed",
    ("q", "k", "v", "C", "beta", "weight", "W0"),
    _rule,
    "int window, bool nuclear, float[] numbers",
).scan
