"""The cpu backend: C++ kernels for scans, for one token, and for what a layer computes around its scan.

Kernels are compiled by the machine's compiler at first use and kept (`cache`). Every array crosses into C++ as a view, which the
kernels check against their own sizes (`border`).
"""

from __future__ import annotations

from ...dispatch import kernel
from ..torch.scan import scan as _scan
from . import build, decode, layer, token
from .engine import CpuEngine, unsupported_scan

ENGINE = CpuEngine()
FEW_ROWS = 32

kernel("step", "cpu", decode.unsupported_step)(decode.step)
kernel("decode", "cpu", decode.unsupported_decode)(decode.decode)


def unavailable_reason() -> str | None:
    """Why there are no kernels on this machine, or None. The first call compiles them: some seconds, once per machine."""
    return build.unavailable_reason("chain", "decay")


@kernel("scan", "cpu", unsupported_scan, compiles=True)
def scan(*arguments):
    return _scan(*arguments, ENGINE)


def _unsupported_linear(x, weight, bias=None) -> str | None:
    """Few rows without gradients: the kernel reads the weight as one stream, at about twice the speed of a matrix product."""
    out, n = weight.shape
    if x.shape[-1] != n or not 0 < x.numel() <= FEW_ROWS * n:
        return f"more than {FEW_ROWS} vectors"
    parameters, shapes = ((weight,), ((out, n),)) if bias is None else ((weight, bias), ((out, n), (out,)))
    if not build.readable(parameters, shapes, x.dtype):
        return "parameters must be contiguous"
    return build.unsupported_call(x)


kernel("linear", "cpu", _unsupported_linear)(token.linear)


def _unsupported_few(x, weight=None, eps=1e-6, gate=None) -> str | None:
    """Few numbers without gradients: one call is faster than a chain of operations."""
    if gate is not None or not 0 < x.numel() <= build.SMALL_NUMEL:
        return "a gate, or more than few numbers"
    if weight is not None and not (weight.is_contiguous() and weight.shape == x.shape[x.dim() - weight.dim() :]):
        return "the weight is broadcast"
    return build.unsupported_call(x, weight)


@kernel("rms_norm", "cpu", _unsupported_few)
def norm_of_few(x, weight=None, eps=1e-6, gate=None):
    return token.norm(x, weight, 1.0 / x.shape[-1], eps)


def _unsupported_norm(x, weight=None, eps=1e-6, gate=None) -> str | None:
    if weight is not None and weight.shape != x.shape[x.dim() - weight.dim() :]:
        return "the weight is broadcast"
    return layer.unsupported(x, weight, gate)


@kernel("rms_norm", "cpu", _unsupported_norm, compiles=True)
def rms_norm(x, weight=None, eps=1e-6, gate=None):
    return layer.gated_norm(x.contiguous(), weight, gate, eps)  # else the backward pass would copy x again


@kernel("l2_normalize", "cpu", lambda x, eps=1e-6: _unsupported_few(x))
def l2_normalize(x, eps=1e-6):
    return token.norm(x, None, 1.0, eps)


@kernel("value_range", "cpu", lambda x: _unsupported_few(x))
def value_range(x):
    return token.ends(x)


def _unsupported_swiglu(x, gate_up, down) -> str | None:
    """Few rows without gradients."""
    dim, hidden = down.shape
    if x.shape[-1] != dim or not build.readable((gate_up, down), ((2 * hidden, dim), (dim, hidden)), x.dtype):
        return "weights must be contiguous and fit x"
    return _unsupported_few(x)


kernel("swiglu", "cpu", _unsupported_swiglu)(token.feed)


def _unsupported_gate(x, y, m, weight, offset, logit, additive) -> str | None:
    if not x.shape == y.shape == m.shape or x.shape[-1] % weight.shape[0]:
        return "x, y and m must have one shape"
    heads, dim = weight.shape[0], x.shape[-1]
    if not build.readable((weight, offset), ((heads, dim), (heads,)), x.dtype):
        return "weights must be contiguous and fit x"
    return _unsupported_few(x) or build.unsupported_call(x, y, m)


kernel("gated_sum", "cpu", _unsupported_gate)(token.join)


def _unsupported_heads(x, tail, weight, heads, dims, norms) -> str | None:
    if x.shape[-1] != heads * sum(dims):
        return "x has another number of channels"
    return layer.unsupported(x, tail, weight)


kernel("project_heads", "cpu", _unsupported_heads, compiles=True)(layer.mix)
