"""What a layer computes around its scan in C++ (convolution, SiLU and norms of heads, and `rms_norm`: layer.cpp), and for the scan the
products of decays (decay.cpp). A kernel takes one structure: numbers, then views of inputs, outputs, gradients of outputs and of inputs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...nn.derivatives import SCAN, first_order_only, gradients, transformed
from ...nn.norm import rms_norm
from .build import library, unavailable_reason
from .operators import PLAIN, Operator, View, check, differentiable, empty, fields, view

Three = ctypes.c_int64 * 3
Numbers = ctypes.c_double * 3


def unsupported(*tensors: Tensor | None) -> str | None:
    """Why the kernels do not compute with these tensors, or None if they do."""
    if transformed() or torch.is_autocast_enabled("cpu"):
        return "torch.func and autocast need torch operations"
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return "without gradients the compiler's own kernels are faster than calls of an operator"
    given = [x for x in tensors if x is not None]
    dtype = given[0].dtype
    if dtype not in (torch.float32, torch.float64):
        return "the kernels compute in float32 and float64"
    if not all(x.device.type == "cpu" and x.dtype == dtype and type(x) in PLAIN for x in given):
        return "tensors must be plain tensors of one type in the CPU's memory"
    return unavailable_reason("layer")


class LayerKernel:
    """A kernel with gradients; `call(*tensors, *numbers)` computes it.

    symbol: of its functions in C++. tensors: its inputs by name, with a "?" behind one that may be None. numbers: their schema.
    structure: the fields of C++ before the views, and `values` of tensors and numbers what they hold.
    outputs: of tensors and numbers, the tensors to fill, `made` of them; reads_output: whether the backward reads them.
    second: the same in torch, for second derivatives; or the advice of an error for those who want them.
    """

    def __init__(
        self,
        name: str,
        symbol: str,
        tensors: str,
        numbers: str,
        structure: list,
        values,
        outputs,
        made: int,
        second,
        reads_output=False,
    ):
        self.symbol, self.values, self.second, self.reads_output = symbol, values, second, reads_output
        self.names, self.made = tensors.split(), made
        views = [(f"view{i}", View) for i in range(2 * (len(self.names) + made))]
        self.structure = type(name, (ctypes.Structure,), {"_fields_": [*structure, *views]})
        inputs = ", ".join(f"Tensor{'?' * x.endswith('?')} {x.rstrip('?')}" for x in self.names)
        forward = Operator(name, f"({inputs}, {numbers}) -> {_results(made)}", outputs, self.launch)
        more = ", ".join([f"Tensor y{i}" for i in range(made * reads_output)] + [f"Tensor? D{i}" for i in range(made)])
        schema = f"({inputs}, {more}, {numbers}) -> {_results(len(self.names))}"
        self.derivative = Operator(f"{name}_backward", schema, self.backward_outputs, self.launch_backward)
        backward = first_order_only(second)(self.backward) if isinstance(second, str) else self.backward
        self.call = differentiable(forward, self.keep, backward)

    def launch(self, made, *inputs) -> None:
        self.run("", inputs, _several(made), [None] * (self.made + len(self.names)))

    def backward_outputs(self, *inputs):
        made = tuple(empty(x, inputs[0]) for x in inputs[: len(self.names)])
        return made if len(made) > 1 else made[0]

    def launch_backward(self, made, *inputs) -> None:
        n, read = len(self.names), self.made * self.reads_output
        outputs, numbers = inputs[n : n + read] or [None] * self.made, n + read + self.made
        self.run("_backward", (*inputs[:n], *inputs[numbers:]), outputs, (*inputs[n + read : numbers], *_several(made)))

    def run(self, direction: str, inputs: tuple, outputs, derivatives) -> None:
        given = *inputs[: len(self.names)], *outputs, *derivatives
        held = [None if x is None else x.contiguous() for x in given]
        job = self.structure(*self.values(*inputs), *map(view, held))
        kind = "float" if inputs[0].dtype == torch.float32 else "double"
        source, name = self.symbol.split(".")
        check(getattr(library(source), f"mnemos_{name}{direction}_{kind}")(ctypes.byref(job)), name)

    def keep(self, ctx, inputs, output) -> None:
        n = len(self.names)
        ctx.set_materialize_grads(False)
        ctx.numbers = inputs[n:]
        ctx.save_for_backward(*inputs[:n], *(_several(output) if self.reads_output else ()))

    def backward(self, ctx, *grads):
        saved, none = ctx.saved_tensors, (None for _ in ctx.numbers)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # for second derivatives, which torch knows
            wanted = ctx.needs_input_grad[: len(self.names)]
            return *gradients(lambda *tensors: self.second(*tensors, *ctx.numbers), saved, wanted, grads), *none
        made = _several(self.derivative(*saved, *grads, *ctx.numbers))
        return *(None if x is None else D for x, D in zip(saved, made)), *none


def _results(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _several(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _mix_values(x, tail, weight, heads: int, dims, alphas, epsilons) -> tuple:
    width = 0 if weight is None else weight.shape[0]
    return *x.shape[:2], width, heads, Three(*dims), Numbers(*alphas), Numbers(*epsilons), torch.get_num_threads()


_mix = LayerKernel(
    "project_heads",
    "layer.mix",
    "x tail? weight?",
    "int heads, int[] dims, float[] alphas, float[] epsilons",
    [
        *fields(ctypes.c_int64, "rows time width heads"),
        ("dim", Three),
        *fields(Numbers, "alpha epsilon"),
        ("threads", ctypes.c_int64),
    ],
    _mix_values,
    lambda x, tail, weight, heads, dims, *norms: tuple(x.new_empty(*x.shape[:2], heads, d) for d in dims),
    made=3,
    second="use backend='torch'",
).call


def mix(x: Tensor, tail: Tensor | None, weight: Tensor | None, heads: int, dims, norms) -> tuple:
    """x (B, T, C), tail (B, width-1, C) and weight (width, C), or None and None -> q, k, v (B, T, H, ·) and the new tail or None.

    dims: of a head's q, k and v. norms: for each of the three (alpha, epsilon) of s / sqrt(alpha Σ s² + epsilon).
    """
    outputs = _mix(x, tail, weight, heads, list(dims), [alpha for alpha, _ in norms], [eps for _, eps in norms])
    if tail is None:
        return *outputs, None
    T, context = x.shape[1], tail.shape[1]
    return *outputs, x[:, T - context :].clone() if context <= T else torch.cat([tail[:, T:], x], 1)


def _norm_values(x, scale, gate, epsilon: float) -> tuple:
    D = x.shape[-1]
    return x.numel() // D, D, 1 if scale is None else scale.numel() // D, torch.get_num_threads(), epsilon


gated_norm = LayerKernel(
    "rms_norm",
    "layer.gated_norm",
    "x scale? gate?",
    "float epsilon",
    [*fields(ctypes.c_int64, "vectors dim period threads"), ("epsilon", ctypes.c_double)],
    _norm_values,
    lambda x, *_: empty(x, x),
    made=1,
    second=lambda x, scale, gate, epsilon: (rms_norm(x, scale, epsilon, gate, backend="torch"),),
).call
"""x (..., D), scale of x's last axes or None, gate like x or None, epsilon -> rms_norm(x) · scale · silu(gate), (..., D)."""

decay_products = LayerKernel(
    "decay_products",
    "decay.decay",
    "x",
    "float least",
    [*fields(ctypes.c_int64, "count length threads"), ("least", ctypes.c_double)],
    lambda x, least: (x.numel() // x.shape[-1], x.shape[-1], torch.get_num_threads(), least),
    lambda x, least: x.new_empty(*x.shape, x.shape[-1]),
    made=1,
    second=SCAN,
    reads_output=True,
).call
"""`coefficients.decay_products`: x (..., L), and the number below which a product counts as 0 -> P (..., L, L)."""
