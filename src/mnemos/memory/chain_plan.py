"""What a run of the fast engines is: everything about it that is not a tensor, and how the maps of a chain are laid out for it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .ahead import GROUP
from .joints import JOINTS
from .mode import Mode
from .spec import MemorySpec
from .tile import Maps
from .tiles import Piece


class Plan(NamedTuple):
    """Everything about a run that is not a tensor."""

    joints: tuple
    widens: tuple[bool, ...]
    l2: bool
    before: bool
    momentum: bool
    fresh: bool
    period: int
    subchunks: int
    stride: int
    save_every: int
    low: torch.dtype | None
    reads: bool
    grad: bool

    @property
    def ahead(self) -> bool:
        """Map 0 widens: what it does to keys and queries does not depend on the state and is made for all tiles at once."""
        return self.widens[0]


def plan_of(spec: MemorySpec, piece: Piece, reads: bool, momentum: bool, mode: Mode) -> Plan:
    chain = spec.network.chain
    assert chain is not None
    fused = [(spec.shapes[g[0]][0], sum(spec.shapes[i][1] for i in g)) for g in chain.groups]
    return Plan(
        joints=tuple(JOINTS[name] for name in chain.joints),
        widens=tuple(d_in <= d_out for d_in, d_out in fused),
        l2=spec.objective == "l2",
        before=spec.read == "before",
        momentum=momentum,
        fresh=piece.fresh,
        period=piece.period,
        subchunks=piece.subchunks,
        stride=piece.stride,
        save_every=_save_every_native(spec, piece) if mode.native else _save_every(spec, piece),
        low=mode.low,
        reads=reads,
        grad=torch.is_grad_enabled(),
    )


def _save_every(spec: MemorySpec, piece: Piece) -> int:
    """Tiles between two saved states. More are less memory, and more states made again: 2 where a state outweighs what
    a tile keeps, 4 where it does so 16 times."""
    state = sum(i * o for i, o in spec.shapes) * (2 if spec.momentum else 1)
    entries = piece.length + piece.subchunks * (spec.window - 1)
    kept = (piece.length + entries) * sum(o for _, o in spec.shapes)
    every = 1
    while every < GROUP and every**4 * kept < state and 2 * every <= piece.tiles**0.5:
        every *= 2
    return every


def _save_every_native(spec: MemorySpec, piece: Piece) -> int:
    """In the kernel a state made again costs little, and about 256 tokens between two saved ones are the fastest; but the
    tiles in between are kept at once in the backward, so no more of them than there are saved states."""
    return max(1, min(256 // piece.length, 32, math.isqrt(piece.tiles)))


def pack(maps: Maps, groups: tuple[tuple[int, ...], ...], widens: tuple[bool, ...]) -> Maps:
    """Maps that share an input become one; all get their narrow axis first."""
    fused = [torch.cat([maps[i] for i in g], -1) if len(g) > 1 else maps[g[0]] for g in groups] if maps else []
    return [w if up else w.mT.contiguous() for w, up in zip(fused, widens)]


def unpack(maps: Maps, groups: tuple[tuple[int, ...], ...], widens: tuple[bool, ...]) -> Maps:
    """Inverse of `pack`. Each map gets memory of its own, so that a state goes on the same way whether it was saved or not."""
    fused = [w if up else w.mT for w, up in zip(maps, widens)]
    parts = [part for x, g in zip(fused, groups) for part in (x.chunk(len(g), -1) if len(g) > 1 else (x,))]
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def blocks(plan: Plan, E: int) -> list[slice]:
    """The entries of each sub-chunk of a tile."""
    size = E // plan.subchunks
    return [slice(j * size, (j + 1) * size) for j in range(plan.subchunks)]


def rows_of(flat: list[Tensor], width: int) -> list[list[Tensor]]:
    return [flat[i : i + width] for i in range(0, len(flat), width)]
