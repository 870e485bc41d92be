"""Scan of commit intervals of rule "muon" in C++ (muon.cpp), for networks that are chains of fast maps, with its own backward.

N tiles, G = batch x heads, L tokens and E window tokens of a tile.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...memory.newton_schulz import FLOOR, NS_COEFFICIENTS, STAGE, WIDE, polynomials
from ...memory.spec import MemorySpec
from ..torch.chunking import ChunkRun
from ..torch.coefficients import Coefficients
from .chain import Many, Packed, ScanKernel, pack, packed_weights, plan_of, unpack

TOKENS_PER_STATE = 64  # between two saved states, at least
LARGE_STATE_NUMEL = 1 << 20  # of a head's weights, from which on twice as many: memory is scarcer than time there


def run(
    spec: MemorySpec,
    chunks: ChunkRun,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    coefficients: Coefficients,
    lr: Tensor,
    state: Packed,
    given: Tensor | None,
) -> tuple[Tensor | None, Packed]:
    """Run the tiles of one run of chunks. lr: (N, G, L); the other arguments are those of `chain.run`."""
    assert spec.chain is not None
    has_momentum = state.matrices == 2
    if not has_momentum:  # S begins at 0 in every run
        W, _ = unpack(spec, state)
        state = pack(spec, W, [torch.zeros_like(w) for w in W])
    apart = TOKENS_PER_STATE * (2 if sum(i * o for i, o in spec.shapes) >= LARGE_STATE_NUMEL else 1)
    save_every = max(1, min(apart // chunks.stride, int(chunks.tiles**0.5)))
    _, beta, _, n, m = coefficients
    tensors = [q, k, v, beta, -n, m, lr[..., -1], state.numbers, given]
    plan = plan_of(spec, chunks, 2, save_every, False, tensors)
    polynomial, *others = polynomials(NS_COEFFICIENTS[spec.ns_coefficients], spec.ns_steps)
    assert all(other == polynomial for other in others)  # `engine.unsupported` keeps other schedules from here
    parts = [len(group) for group in spec.chain.groups]
    y, last, _, _ = _scan(*tensors, *plan, chunks.commit, parts, len(others) + 1, list(polynomial))
    state = Packed(last, 2)
    return (None if q is None else y), state if has_momentum else Packed(packed_weights(spec, state), 1)


class Rule(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("commit", "steps", "stage")),
        ("parts", Many),
        *((name, ctypes.c_double) for name in ("wide", "a", "b", "c", "floor")),
    ]


def _rule(commit: bool, parts: list[int], steps: int, polynomial: list[float]) -> tuple[Rule]:
    """parts: matrices side by side in each fused map."""
    return (Rule(commit, steps, STAGE, Many(*parts), WIDE, *polynomial, FLOOR),)


_scan = ScanKernel(
    "muon",
    ("q", "k", "v", "beta", "n", "m", "lr"),
    _rule,
    "bool commit, int[] parts, int steps, float[] polynomial",
).scan
