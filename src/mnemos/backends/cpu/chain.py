"""Scan of chunks in C++ (chain.cpp) for networks that are chains of fast maps, rule "gd", with its own backward.

N tiles, G = batch x heads, L tokens and E window tokens of a tile, m = 2 matrices per map (W and S), or 1 without momentum.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import deterministic

from ...memory.spec import MemorySpec
from ...nn.derivatives import SCAN, first_order_only
from ..torch.chunking import ChunkRun
from ..torch.coefficients import Coefficients
from .border import check, fields, view
from .build import gemm, library
from .operators import Operator, differentiable, empty
from .structs import LOSSES, MAPS

Maps = list[Tensor]
Many = ctypes.c_int64 * MAPS


class Plan(NamedTuple):
    """Arguments of a kernel that are not tensors. inputs, outputs: dimensions of each map; maps that share an input are one."""

    inputs: list[int]
    outputs: list[int]
    geglu: list[bool]
    matrices: int
    keeps_start: bool
    l2: bool
    before: bool
    period: int
    save_every: int
    saving: bool


PLAN = (
    "int[] inputs, int[] outputs, bool[] geglu, int matrices, bool keeps_start, bool l2, bool before, int period, "
    "int save_every, bool saving"
)


def plan_of(
    spec: MemorySpec, chunks: ChunkRun, matrices: int, save_every: int, keeps_start: bool, tensors: list[Tensor | None]
) -> Plan:
    chain = spec.network.chain
    assert chain is not None and chunks.subchunks == 1
    inputs, outputs = map(list, zip(*_fused_shapes(spec)))
    return Plan(
        inputs=inputs,
        outputs=outputs,
        geglu=[name == "geglu" for name in chain.activations],
        matrices=matrices,
        keeps_start=keeps_start,
        l2=LOSSES[type(spec.loss)],
        before=spec.read == "before",
        period=chunks.period,
        save_every=save_every,
        saving=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors),
    )


def tiles_per_state(chunks: ChunkRun) -> int:
    """Tiles between two saved states. About 256 tokens were the fastest; the backward holds the tiles in between at once, so
    there are never more of them than saved states."""
    return max(1, min(256 // chunks.length, 32, math.isqrt(chunks.tiles)))


class Packed(NamedTuple):
    """Fast maps as one array (G, numbers): map after map W, then S if `matrices` is 2, each with its narrow axis first. Maps that share
    an input are one."""

    numbers: Tensor
    matrices: int


def _fused_shapes(spec: MemorySpec) -> list[tuple[int, int]]:
    """(d_in, d_out) of every map, of which those that share an input are one."""
    assert spec.chain is not None
    return [(spec.shapes[group[0]][0], sum(spec.shapes[i][1] for i in group)) for group in spec.chain.groups]


def pack(spec: MemorySpec, W: Maps, S: Maps) -> Packed:
    def fused(maps: Maps, group: tuple[int, ...]) -> Tensor:
        w = torch.cat([maps[i] for i in group], -1) if len(group) > 1 else maps[group[0]]
        return (w if w.shape[1] <= w.shape[2] else w.mT).flatten(1)

    assert spec.chain is not None
    kinds = (W, S) if S else (W,)
    parts = [fused(maps, group) for group in spec.chain.groups for maps in kinds]
    return Packed(torch.cat(parts, 1) if len(parts) > 1 else parts[0], len(kinds))


def unpack(spec: MemorySpec, state: Packed) -> tuple[Maps, Maps]:
    """Inverse of `pack`. Each map gets memory of its own, so that a state continues the same way whether it was saved or not."""
    assert spec.chain is not None
    shapes = _fused_shapes(spec)
    parts = state.numbers.split([a * b for a, b in shapes for _ in range(state.matrices)], 1)
    found: list[Maps] = [[], []]
    for number, (group, (a, b)) in enumerate(zip(spec.chain.groups, shapes)):
        for kind in range(state.matrices):
            x = parts[number * state.matrices + kind]
            w = x.unflatten(1, (a, b)) if a <= b else x.unflatten(1, (b, a)).mT
            split = w.chunk(len(group), -1) if len(group) > 1 else (w,)
            found[kind] += [part.clone(memory_format=torch.contiguous_format) for part in split]
    return found[0], found[1]


def packed_weights(spec: MemorySpec, state: Packed) -> Tensor:
    """The numbers of W alone."""
    if state.matrices == 1:
        return state.numbers
    parts = state.numbers.split([a * b for a, b in _fused_shapes(spec) for _ in range(2)], 1)
    return torch.cat(parts[::2], 1)


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
    """Run the tiles of one run of chunks. q: (N, G, L, D) or None, k: (N, G, E, D), v: (N, G, E, V).

    given: packed weights of the anchor, None if the run has its own. initial: packed W0, empty for decay towards 0.
    """
    C, beta, f, n_end, m_end = coefficients
    C, n_end, both = -C, -n_end, state.matrices == 2
    end = torch.stack([C[:, :, -1], n_end], -1) if both else C[:, :, -1].unsqueeze(-1)  # N G E m
    keep = torch.stack([beta[..., -1], m_end], -1) if both else beta[..., -1:]  # N G m
    tensors = [q, k, v, C, beta, f, end, keep, initial, state.numbers, given]
    plan = plan_of(spec, chunks, state.matrices, tiles_per_state(chunks), initial.numel() > 0, tensors)
    y, last, _, _ = _scan(*tensors, *plan)
    return (None if q is None else y), Packed(last, state.matrices)


class Sizes(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "maps",
                "tiles",
                "lanes",
                "tokens",
                "entries",
                "matrices",
                "keeps_start",
                "l2",
                "before",
                "fresh",
                "period",
                "save_every",
                "reads",
                "saving",
                "threads",
                "poison",
            )
        ),
        *((name, Many) for name in ("in", "out", "activation")),
    ]


class ScanKernel:
    """Operators of a scan kernel: tensors `names` (q, k, v, …), start, given, the plan and further numbers -> y, last, saved, states.

    beta (N, G, L+1) is among the tensors. structs: C structures of the further numbers, which have this schema.
    """

    def __init__(self, name: str, names: tuple[str, ...], structs: Callable = lambda: (), schema: str = ""):
        self.name, self.names, self.structs = name, names, structs
        self.gradients = [f"D{x}" for x in (*names, "start", "given")]
        arrays = fields(*names, "start", "given", *OUTPUTS, "Dy", "Dlast", *self.gradients)
        self.arrays = type("Arrays", (ctypes.Structure,), {"_fields_": [("gemm", ctypes.c_void_p), *arrays]})
        tensors = ", ".join(f"Tensor{'?' * (x == 'q')} {x}" for x in names)
        numbers = f"{PLAN}, {schema}" if schema else PLAN
        given = f"({tensors}, Tensor start, Tensor? given, {numbers})"
        scan = Operator(f"{name}_scan", f"{given} -> (Tensor, Tensor, Tensor, Tensor)", self.outputs, self.launch)
        given = f"({tensors}, Tensor? given, {', '.join(f'Tensor {x}' for x in BACKWARD_INPUTS[1:])}, {numbers})"
        results = ", ".join(["Tensor"] * len(self.gradients))
        self.scan_backward = Operator(
            f"{name}_scan_backward", f"{given} -> ({results})", self.backward_outputs, self.launch_backward
        )
        self.scan = differentiable(scan, self.keep, first_order_only(SCAN)(self.backward))

    def sizes(self, arrays: dict[str, Any], plan: Plan, more: tuple) -> tuple[ctypes.Structure, ...]:
        k, beta = arrays["k"], arrays["beta"]
        poison = torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory  # ty: ignore[missing-attribute]
        sizes = Sizes(
            len(plan.inputs),
            *map(int, k.shape[:2]),
            int(beta.shape[2]) - 1,
            int(k.shape[2]),
            plan.matrices,
            plan.keeps_start,
            plan.l2,
            plan.before,
            arrays["given"] is None,
            plan.period,
            plan.save_every,
            arrays["q"] is not None,
            plan.saving,
            torch.get_num_threads(),
            poison,
            *(Many(*numbers) for numbers in (plan.inputs, plan.outputs, plan.geglu)),
        )
        return sizes, *self.structs(*more)

    def split(self, inputs: tuple, others: tuple[str, ...]) -> tuple[dict[str, Any], Plan, tuple]:
        """Tensors by name (`names`, then `others`), the plan and the further numbers."""
        names = (*self.names, *others)
        numbers = inputs[len(names) :]
        return dict(zip(names, inputs)), Plan(*numbers[:PLANNED]), numbers[PLANNED:]

    def outputs(self, *inputs):
        arrays, plan, more = self.split(inputs, ("start", "given"))
        k, (N, G) = arrays["k"], arrays["k"].shape[:2]
        per_tile, per_state = self.saved_sizes(self.sizes(arrays, plan, more)) if plan.saving else (0, 0)
        saved, states = k.new_empty(N * G * per_tile), k.new_empty(-(-N // plan.save_every) * G * per_state)
        return k.new_empty(_shape_of_y(arrays)), empty(arrays["start"], k), saved, states

    def saved_sizes(self, structs: tuple[ctypes.Structure, ...]) -> tuple[int, int]:
        """How many numbers the kernel keeps for its backward: per tile, and per saved state."""
        per_tile, per_state = ctypes.c_int64(), ctypes.c_int64()
        size = getattr(library(self.name), f"mnemos_{self.name}_sizes")
        if size(*map(ctypes.byref, (*structs, per_tile, per_state))) != ctypes.sizeof(self.arrays):
            raise ValueError(f"kernel {self.name!r} refused its arguments: the sizes of a run do not fit each other")
        return per_tile.value, per_state.value

    def launch(self, made, *inputs) -> None:
        arrays, plan, more = self.split(inputs, ("start", "given"))
        call(self.name, self.arrays, self.sizes(arrays, plan, more), False, **arrays, **dict(zip(OUTPUTS, made)))

    def backward_outputs(self, *inputs):
        arrays = self.split(inputs, BACKWARD_INPUTS)[0]
        k = arrays["k"]
        summed = (k.new_zeros(arrays[name].shape) for name in self.names[3:])
        return (
            *(empty(arrays[name], k) for name in "qkv"),
            *summed,
            empty(arrays["Dlast"], k),
            empty(arrays["given"], k),
        )

    def launch_backward(self, made, *inputs) -> None:
        arrays, plan, more = self.split(inputs, BACKWARD_INPUTS)
        call(self.name, self.arrays, self.sizes(arrays, plan, more), True, **arrays, **dict(zip(self.gradients, made)))

    def keep(self, ctx, inputs, output) -> None:
        n, (_, last, saved, states) = len(self.names), output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(saved, states)
        ctx.numbers = inputs[n + 2 :]
        ctx.save_for_backward(*inputs[:n], inputs[n + 1], last, saved, states)

    def backward(self, ctx, Dy, Dlast, *_):
        saved = ctx.saved_tensors
        arrays = dict(zip((*self.names, *BACKWARD_INPUTS), saved))
        Dy = arrays["k"].new_zeros(_shape_of_y(arrays)) if Dy is None else Dy
        Dlast = torch.zeros_like(arrays["last"]) if Dlast is None else Dlast
        Dq, *made, Dgiven = self.scan_backward(*saved, Dy, Dlast, *ctx.numbers)
        Dq, Dgiven = None if arrays["q"] is None else Dq, None if arrays["given"] is None else Dgiven
        return Dq, *made, Dgiven, *(None for _ in ctx.numbers)


OUTPUTS = ("y", "last", "saved", "states")
BACKWARD_INPUTS = ("given", "last", "saved", "states", "Dy", "Dlast")
PLANNED = len(Plan._fields)


def _shape_of_y(arrays: dict) -> tuple[int, ...]:
    if arrays["q"] is None:
        return (0,)
    return *arrays["q"].shape[:3], arrays["v"].shape[3]


def call(name: str, kind: type[ctypes.Structure], what: tuple, backward: bool, **arrays: Any) -> None:
    """Run kernel `name` forth or back on `arrays`, which make a structure of this kind."""
    held = {key: None if x is None else x.contiguous() for key, x in arrays.items()}
    dtype = arrays["v"].dtype
    function = getattr(library(name), f"mnemos_{name}_{'float' if dtype == torch.float32 else 'double'}")
    pointers = map(ctypes.byref, (*what, kind(gemm=gemm(dtype), **{key: view(x) for key, x in held.items()})))
    check(function(*pointers, ctypes.c_int(backward)), name)


_scan = ScanKernel("chain", ("q", "k", "v", "C", "beta", "f", "end", "keep", "W0")).scan
