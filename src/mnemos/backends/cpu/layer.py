"""What a layer does around its scan in C++ (layer.cpp): `memory.layer`'s convolution, SiLU and norms, and `memory.norm.rms_norm`."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...nn.checkpoint import gradients
from ...nn.derivatives import first_order_only, transformed
from ...nn.norm import rms_norm
from .border import View, check, fields, view
from .build import Unavailable, library

Three = ctypes.c_int64 * 3
Numbers = ctypes.c_double * 3
Views = View * 3


def unsupported(*tensors: Tensor | None) -> str | None:
    """Why the kernels do not compute with these tensors, or None if they do."""
    if transformed() or torch.is_autocast_enabled("cpu"):
        return "torch.func and autocast need torch operations"
    given = [x for x in tensors if x is not None]
    dtype = given[0].dtype
    if dtype not in (torch.float32, torch.float64):
        return "the kernels compute in float32 and float64"
    if not all(x.device.type == "cpu" and x.dtype == dtype and type(x) in (Tensor, torch.nn.Parameter) for x in given):
        return "tensors must be plain tensors of one type in the CPU's memory"
    return _unavailable_reason()


@functools.cache
def _unavailable_reason() -> str | None:
    try:
        library("layer")
    except Unavailable as reason:
        return str(reason)
    return None


class _Mix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "time", "width", "heads")),
        ("dim", Three),
        ("alpha", Numbers),
        ("epsilon", Numbers),
        ("threads", ctypes.c_int64),
        *fields("x", "tail", "weight"),
        ("out", Views),
        ("Dout", Views),
        *fields("Dx", "Dtail", "Dweight"),
    ]


class _GatedNorm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("vectors", "dim", "period", "threads")),
        ("epsilon", ctypes.c_double),
        *fields("x", "scale", "gate", "y", "Dy", "Dx", "Dscale", "Dgate"),
    ]


def _run(name: str, dtype: torch.dtype, job: ctypes.Structure) -> None:
    function = getattr(library("layer"), f"mnemos_{name}_{'float' if dtype == torch.float32 else 'double'}")
    check(function(ctypes.byref(job)), name)


class Mix(torch.autograd.Function):
    """x (B, T, C), tail (B, width-1, C) and weight (width, C), or None and None -> q, k, v (B, T, H, ·) and the new tail or None.

    dims: of a head's q, k and v. norms: for each of the three (alpha, epsilon) of s / sqrt(alpha Σ s² + epsilon).
    """

    @staticmethod
    def forward(ctx, x, tail, weight, heads: int, dims: tuple[int, ...], norms: tuple[tuple[float, float], ...]):
        ctx.set_materialize_grads(False)
        x = x.contiguous()
        tail, weight = (None if y is None else y.contiguous() for y in (tail, weight))
        ctx.heads, ctx.dims, ctx.norms = heads, dims, norms
        ctx.save_for_backward(x, tail, weight)
        outputs = [x.new_empty(*x.shape[:2], heads, d) for d in dims]
        job = _mix(ctx, x, tail, weight)
        job.out = Views(*map(view, outputs))
        _run("mix", x.dtype, job)
        if tail is None:
            return *outputs, None
        T, context = x.shape[1], tail.shape[1]
        return *outputs, x[:, T - context :].clone() if context <= T else torch.cat([tail[:, T:], x], 1)

    @staticmethod
    @first_order_only("use backend='torch'")
    def backward(ctx, *grads):
        x, tail, weight = ctx.saved_tensors
        given = [None if D is None else D.contiguous() for D in grads[:3]]
        Dx, (Dtail, Dweight) = torch.empty_like(x), (None if y is None else torch.empty_like(y) for y in (tail, weight))
        job = _mix(ctx, x, tail, weight)
        job.Dout = Views(*map(view, given))
        job.Dx, job.Dtail, job.Dweight = view(Dx), view(Dtail), view(Dweight)
        _run("mix_backward", x.dtype, job)
        if grads[3] is not None and Dtail is not None:
            T, context = x.shape[1], Dtail.shape[1]
            kept = min(T, context)
            Dx[:, T - kept :] += grads[3][:, context - kept :]
            if context > T:
                Dtail[:, T:] += grads[3][:, : context - T]
        return Dx, Dtail, Dweight, None, None, None


def _mix(ctx, x: Tensor, tail: Tensor | None, weight: Tensor | None) -> _Mix:
    alpha, epsilon = zip(*ctx.norms)
    width = 0 if weight is None else weight.shape[0]
    job = _Mix(x.shape[0], x.shape[1], width, ctx.heads, Three(*ctx.dims), Numbers(*alpha), Numbers(*epsilon))
    job.threads = torch.get_num_threads()
    job.x, job.tail, job.weight = view(x), view(tail), view(weight)
    return job


class GatedNorm(torch.autograd.Function):
    """x (..., D), scale of x's last axes or None, gate like x or None -> rms_norm(x) · scale · silu(gate), (..., D). All contiguous:
    a copy made here would have no history, which second derivatives need."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor | None, gate: Tensor | None, epsilon: float) -> Tensor:
        assert all(y is None or y.is_contiguous() for y in (x, scale, gate))
        ctx.epsilon = epsilon
        ctx.save_for_backward(x, scale, gate)
        y = torch.empty_like(x)
        job = _gated_norm(x, scale, gate, epsilon)
        job.y = view(y)
        _run("gated_norm", x.dtype, job)
        return y

    @staticmethod
    def backward(ctx, Dy: Tensor):  # ty: ignore[incompatible-method-override]
        x, scale, gate = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants second derivatives, which torch knows

            def function(x, scale, gate):
                return (rms_norm(x, scale, ctx.epsilon, gate, backend="torch"),)

            return *gradients(function, (x, scale, gate), ctx.needs_input_grad[:3], (Dy,)), None
        Dy = Dy.contiguous()
        Dx, Dscale, Dgate = (None if y is None else torch.empty_like(y) for y in (x, scale, gate))
        job = _gated_norm(x, scale, gate, ctx.epsilon)
        job.Dy, job.Dx, job.Dscale, job.Dgate = view(Dy), view(Dx), view(Dscale), view(Dgate)
        _run("gated_norm_backward", x.dtype, job)
        return Dx, Dscale, Dgate, None


def _gated_norm(x: Tensor, scale: Tensor | None, gate: Tensor | None, epsilon: float) -> _GatedNorm:
    D = x.shape[-1]
    period = 1 if scale is None else scale.numel() // D
    return _GatedNorm(x.numel() // D, D, period, torch.get_num_threads(), epsilon, view(x), view(scale), view(gate))
