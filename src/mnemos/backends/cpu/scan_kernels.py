"""Operators of the kernels of a scan: runs of tiles of the three rules (chain.cpp, muon.cpp, windowed.cpp).

N tiles, G = batch x heads, L tokens and E window tokens of a tile, m = 2 matrices per map (W and S), or 1 without momentum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...memory.newton_schulz import FLOOR, STAGE, WIDE
from ...nn.derivatives import SCAN, first_order_only
from .build import gemm, library, poison
from .operators import Operator, View, check, differentiable, empty, fields, view
from .structs import MAPS, WindowRule

Many = ctypes.c_int64 * MAPS


class Plan(NamedTuple):
    """Arguments of a scan kernel that are not tensors. inputs, outputs: dimensions of each map; maps that share an input are one."""

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
OUTPUTS = ("y", "last", "saved", "states")
BACKWARD_INPUTS = ("given", "last", "saved", "states", "Dy", "Dlast")


class Sizes(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "maps tiles lanes tokens entries matrices keeps_start l2 before fresh period"),
        *fields(ctypes.c_int64, "save_every reads saving threads poison"),
        *fields(Many, "in out activation"),
    ]


class ScanKernel:
    """Operators of a scan kernel: tensors `names` (q, k, v, …), start, given, the plan and further numbers -> y, last, saved, states.

    beta (N, G, L+1) is among the tensors. structs: C structures of the further numbers, which have this schema.
    """

    def __init__(self, name: str, names: str, structs: Callable = lambda: (), schema: str = ""):
        self.name, self.names, self.structs = name, names.split(), structs
        self.gradients = [f"D{x}" for x in (*self.names, "start", "given")]
        arrays = " ".join((*self.names, "start", "given", *OUTPUTS, "Dy", "Dlast", *self.gradients))
        kind = {"_fields_": [("gemm", ctypes.c_void_p), *fields(View, arrays)]}
        self.arrays = type("Arrays", (ctypes.Structure,), kind)
        tensors = ", ".join(f"Tensor{'?' * (x == 'q')} {x}" for x in self.names)
        numbers = f"{PLAN}, {schema}" if schema else PLAN
        given = f"({tensors}, Tensor start, Tensor? given, {numbers})"
        scan = Operator(f"{name}_scan", f"{given} -> (Tensor, Tensor, Tensor, Tensor)", self.outputs, self.launch)
        given = f"({tensors}, Tensor? given, {', '.join(f'Tensor {x}' for x in BACKWARD_INPUTS[1:])}, {numbers})"
        schema = f"{given} -> ({', '.join(['Tensor'] * len(self.gradients))})"
        self.scan_backward = Operator(f"{name}_scan_backward", schema, self.backward_outputs, self.launch_backward)
        self.scan = differentiable(scan, self.keep, first_order_only(SCAN)(self.backward))

    def sizes(self, arrays: dict[str, Any], plan: Plan, more: tuple) -> tuple[ctypes.Structure, ...]:
        N, G, E = map(int, arrays["k"].shape[:3])
        kept = plan.matrices, plan.keeps_start, plan.l2, plan.before, arrays["given"] is None, plan.period
        saved = plan.save_every, arrays["q"] is not None, plan.saving, torch.get_num_threads(), poison()
        maps = (Many(*numbers) for numbers in (plan.inputs, plan.outputs, plan.geglu))
        L = int(arrays["beta"].shape[2]) - 1
        return Sizes(len(plan.inputs), N, G, L, E, *kept, *saved, *maps), *self.structs(*more)

    def split(self, inputs: tuple, *others: str) -> tuple[dict[str, Any], Plan, tuple]:
        """Tensors by name (`names`, then `others`), the plan and the further numbers."""
        names = (*self.names, *others)
        numbers = inputs[len(names) :]
        planned = len(Plan._fields)
        return dict(zip(names, inputs)), Plan(*numbers[:planned]), numbers[planned:]

    def outputs(self, *inputs):
        arrays, plan, more = self.split(inputs, "start", "given")
        k, (N, G) = arrays["k"], arrays["k"].shape[:2]
        per_tile, per_state = self.saved_sizes(self.sizes(arrays, plan, more)) if plan.saving else (0, 0)
        saved, states = k.new_empty(N * G * per_tile), k.new_empty(-(-N // plan.save_every) * G * per_state)
        return k.new_empty(_shape_of_y(arrays)), empty(arrays["start"], k), saved, states

    def saved_sizes(self, structs: tuple[ctypes.Structure, ...]) -> tuple[int, int]:
        """How many numbers the kernel keeps for its backward: per tile, and per saved state."""
        per_tile, per_state = ctypes.c_int64(), ctypes.c_int64()
        size = getattr(library(self.name), f"mnemos_{self.name}_sizes")
        if size(*map(ctypes.byref, (*structs, per_tile, per_state))) != ctypes.sizeof(self.arrays):
            raise ValueError(f"kernel {self.name!r} rejects its arguments: the sizes of a run contradict each other")
        return per_tile.value, per_state.value

    def launch(self, made, *inputs) -> None:
        arrays, plan, more = self.split(inputs, "start", "given")
        call(self.name, self.arrays, self.sizes(arrays, plan, more), False, **arrays, **dict(zip(OUTPUTS, made)))

    def backward_outputs(self, *inputs):
        arrays = self.split(inputs, *BACKWARD_INPUTS)[0]
        k = arrays["k"]
        summed = (k.new_zeros(arrays[name].shape) for name in self.names[3:])
        q_k_v, start_and_given = ([empty(arrays[name], k) for name in names] for names in ("qkv", ("Dlast", "given")))
        return *q_k_v, *summed, *start_and_given

    def launch_backward(self, made, *inputs) -> None:
        arrays, plan, more = self.split(inputs, *BACKWARD_INPUTS)
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


def _shape_of_y(arrays: dict) -> tuple[int, ...]:
    return (0,) if arrays["q"] is None else (*arrays["q"].shape[:3], arrays["v"].shape[3])


def call(name: str, kind: type[ctypes.Structure], what: tuple, backward: bool, **arrays: Any) -> None:
    """Run kernel `name` forth or back on `arrays`, which make a structure of this kind."""
    held = {key: None if x is None else x.contiguous() for key, x in arrays.items()}
    dtype = arrays["v"].dtype
    function = getattr(library(name), f"mnemos_{name}_{'float' if dtype == torch.float32 else 'double'}")
    pointers = map(ctypes.byref, (*what, kind(gemm=gemm(dtype), **{key: view(x) for key, x in held.items()})))
    check(function(*pointers, ctypes.c_int(backward)), name)


class CommitRule(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "commit steps stage"),
        ("parts", Many),
        *fields(ctypes.c_double, "wide a b c floor"),
    ]


def _commit_rule(commit: bool, parts: list[int], steps: int, polynomial: list[float]) -> tuple[CommitRule]:
    """parts: matrices side by side in each fused map."""
    return (CommitRule(commit, steps, STAGE, Many(*parts), WIDE, *polynomial, FLOOR),)


SCANS: dict[str, Callable[..., Any]] = {
    kernel.name: kernel.scan
    for kernel in (
        ScanKernel("chain", "q k v C beta f end keep W0"),
        ScanKernel(
            "muon", "q k v beta n m lr", _commit_rule, "bool commit, int[] parts, int steps, float[] polynomial"
        ),
        ScanKernel(
            "windowed",
            "q k v C beta weight W0",
            lambda *numbers: (WindowRule.of(*numbers),),
            "int window, bool nuclear, float[] numbers",
        ),
    )
}
