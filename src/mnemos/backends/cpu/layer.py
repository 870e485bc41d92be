"""What a layer does around its scan in C++ (layer.cpp): `memory.layer`'s convolution, SiLU and norms, and `memory.norm.rms_norm`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...nn.derivatives import first_order_only, gradients, transformed
from ...nn.norm import rms_norm
from .build import library, unavailable_reason
from .operators import PLAIN, Operator, View, check, differentiable, empty, fields, view

Three = ctypes.c_int64 * 3
Numbers = ctypes.c_double * 3
Views = View * 3


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


class _Mix(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "rows time width heads"),
        ("dim", Three),
        *fields(Numbers, "alpha epsilon"),
        ("threads", ctypes.c_int64),
        *fields(View, "x tail weight"),
        *fields(Views, "out Dout"),
        *fields(View, "Dx Dtail Dweight"),
    ]


class _GatedNorm(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "vectors dim period threads"),
        ("epsilon", ctypes.c_double),
        *fields(View, "x scale gate y Dy Dx Dscale Dgate"),
    ]


def _run(name: str, backward: bool, dtype: torch.dtype, job: ctypes.Structure) -> None:
    name += "_backward" * backward
    kind = "float" if dtype == torch.float32 else "double"
    check(getattr(library("layer"), f"mnemos_{name}_{kind}")(ctypes.byref(job)), name)


def _views(tensors) -> ctypes.Array:
    return Views(*map(view, tensors))


def _mix(given: tuple[Tensor | None, ...], numbers: tuple, out, made=(None, None, None)) -> None:
    """Run the kernel on x, tail and weight into `out`, q, k and v; or, with Dq, Dk and Dv behind them, its backward into `made`."""
    held = [None if x is None else x.contiguous() for x in given]
    x, _, weight, *Dout = held
    assert x is not None
    heads, dims, alphas, epsilons = numbers
    width, back = 0 if weight is None else weight.shape[0], bool(Dout)
    sizes = (*x.shape[:2], width, heads, Three(*dims), Numbers(*alphas), Numbers(*epsilons), torch.get_num_threads())
    _run("mix", back, x.dtype, _Mix(*sizes, *map(view, held[:3]), _views(out), _views(Dout), *map(view, made)))


_HEADS = "int heads, int[] dims, float[] alphas, float[] epsilons"
_mix_forward = Operator(
    "project_heads",
    f"(Tensor x, Tensor? tail, Tensor? weight, {_HEADS}) -> (Tensor, Tensor, Tensor)",
    lambda x, tail, weight, heads, dims, *norms: tuple(x.new_empty(*x.shape[:2], heads, d) for d in dims),
    lambda made, *inputs: _mix(inputs[:3], inputs[3:], made),
)
_mix_backward = Operator(
    "project_heads_backward",
    f"(Tensor x, Tensor? tail, Tensor? weight, Tensor? Dq, Tensor? Dk, Tensor? Dv, {_HEADS}) -> (Tensor, Tensor, Tensor)",
    lambda x, tail, weight, *_: (empty(x, x), empty(tail, x), empty(weight, x)),
    lambda made, *inputs: _mix(inputs[:6], inputs[6:], (), made),
)


def _keep_mix(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.numbers = inputs[3:]
    ctx.save_for_backward(*inputs[:3])


@first_order_only("use backend='torch'")
def _mix_gradients(ctx, *grads):
    x, tail, weight = ctx.saved_tensors
    Dx, Dtail, Dweight = _mix_backward(x, tail, weight, *grads, *ctx.numbers)
    return Dx, None if tail is None else Dtail, None if weight is None else Dweight, None, None, None, None


_mixed = differentiable(_mix_forward, _keep_mix, _mix_gradients)


def mix(x: Tensor, tail: Tensor | None, weight: Tensor | None, heads: int, dims, norms) -> tuple:
    """x (B, T, C), tail (B, width-1, C) and weight (width, C), or None and None -> q, k, v (B, T, H, ·) and the new tail or None.

    dims: of a head's q, k and v. norms: for each of the three (alpha, epsilon) of s / sqrt(alpha Σ s² + epsilon).
    """
    outputs = _mixed(x, tail, weight, heads, list(dims), [alpha for alpha, _ in norms], [eps for _, eps in norms])
    if tail is None:
        return *outputs, None
    T, context = x.shape[1], tail.shape[1]
    return *outputs, x[:, T - context :].clone() if context <= T else torch.cat([tail[:, T:], x], 1)


def _gated_norm(given: tuple[Tensor | None, ...], epsilon: float, made) -> None:
    """Run the kernel on x, scale and gate into `made`; or, with Dy behind them, its backward into gradients of the three."""
    held = [None if x is None else x.contiguous() for x in given]
    x, scale, _, *Dy = held
    assert x is not None
    D, outputs = x.shape[-1], [None, *Dy, *made] if Dy else [made]
    sizes = x.numel() // D, D, 1 if scale is None else scale.numel() // D, torch.get_num_threads(), epsilon
    _run("gated_norm", bool(Dy), x.dtype, _GatedNorm(*sizes, *map(view, held[:3]), *map(view, outputs)))


_norm_forward = Operator(
    "rms_norm",
    "(Tensor x, Tensor? scale, Tensor? gate, float epsilon) -> Tensor",
    lambda x, *_: empty(x, x),
    lambda y, *inputs: _gated_norm(inputs[:3], inputs[3], y),
)
_norm_backward = Operator(
    "rms_norm_backward",
    "(Tensor x, Tensor? scale, Tensor? gate, Tensor Dy, float epsilon) -> (Tensor, Tensor, Tensor)",
    lambda x, scale, gate, *_: (empty(x, x), empty(scale, x), empty(gate, x)),
    lambda made, *inputs: _gated_norm(inputs[:4], inputs[4], made),
)


def _keep_norm(ctx, inputs, output):
    ctx.epsilon = inputs[3]
    ctx.save_for_backward(*inputs[:3])


def _norm_gradients(ctx, Dy: Tensor):
    given = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # for second derivatives, which torch knows

        def function(x, scale, gate):
            return (rms_norm(x, scale, ctx.epsilon, gate, backend="torch"),)

        return *gradients(function, given, ctx.needs_input_grad[:3], (Dy,)), None
    return *(None if y is None else D for y, D in zip(given, _norm_backward(*given, Dy, ctx.epsilon))), None


gated_norm = differentiable(_norm_forward, _keep_norm, _norm_gradients)
"""x (..., D), scale of x's last axes or None, gate like x or None, epsilon -> rms_norm(x) · scale · silu(gate), (..., D)."""
