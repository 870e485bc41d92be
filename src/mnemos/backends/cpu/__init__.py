"""The cpu backend: C++ kernels for scans, for one token, and for what a layer computes around its scan.

Kernels are compiled by the machine's compiler at first use and kept (`cache`). Every array crosses into C++ as a view, which the
kernels check against their own sizes (`border`).
"""

from __future__ import annotations

import torch

from ...dispatch import kernel
from ..torch.scan import scan as _scan
from . import chain, decode, layer, step, token
from .engine import CpuEngine, unsupported_scan

kernel("step", "cpu", step.unsupported_step)(step.step)
kernel("decode", "cpu", decode.unsupported_decode)(decode.decode)


def unavailable_reason() -> str | None:
    """Why there are no kernels on this machine, or None. The first call compiles them: some seconds, once per machine."""
    return chain.unavailable_reason(torch.float32)


@kernel("scan", "cpu", unsupported_scan)
def scan(*arguments):
    return _scan(*arguments, CpuEngine())


def _unsupported_linear(x, weight, bias=None) -> str | None:
    """A single row without gradients: the kernel reads the weight as one stream, at about twice the speed of a matrix product."""
    out, n = weight.shape
    if not x.numel() == x.shape[-1] == n:
        return "more than one row"
    parameters, shapes = ((weight,), ((out, n),)) if bias is None else ((weight, bias), ((out, n), (out,)))
    if not decode._readable(parameters, shapes, x.dtype):
        return "parameters must be contiguous"
    return decode.unsupported_call(x)


kernel("linear", "cpu", _unsupported_linear)(token.linear)


def _few(x, weight=None) -> bool:
    """Few numbers without gradients, for which one call is faster than a chain of operations."""
    if not 0 < x.numel() <= decode.SMALL_NUMEL:
        return False
    if weight is not None and not (weight.is_contiguous() and weight.shape == x.shape[x.dim() - weight.dim() :]):
        return False
    return decode.unsupported_call(x, weight) is None


def _unsupported_norm(x, weight=None, eps=1e-6, gate=None) -> str | None:
    if gate is None and _few(x, weight):
        return None
    if weight is not None and weight.shape != x.shape[x.dim() - weight.dim() :]:
        return "the weight is broadcast"
    return layer.unsupported(x, weight, gate)


@kernel("rms_norm", "cpu", _unsupported_norm)
def rms_norm(x, weight=None, eps=1e-6, gate=None):
    if gate is None and _few(x, weight):
        return token.norm(x, weight, 1.0 / x.shape[-1], eps)
    given = (None if y is None else y.contiguous() for y in (x, weight, gate))
    return layer.GatedNorm.apply(*given, eps)


@kernel("l2_normalize", "cpu", lambda x, eps=1e-6: None if _few(x) else "more than few numbers")
def l2_normalize(x, eps=1e-6):
    return token.norm(x, None, 1.0, eps)


def _unsupported_heads(x, tail, weight, heads, dims, norms) -> str | None:
    if x.shape[-1] != heads * sum(dims):
        return "x has another number of channels"
    return layer.unsupported(x, tail, weight)


@kernel("project_heads", "cpu", _unsupported_heads)
def project_heads(x, tail, weight, heads, dims, norms):
    return layer.Mix.apply(x, tail, weight, heads, dims, norms)
