"""Products of decays in C++ (decay.cpp): `memory.rules.decay_products` for CPUs, in two passes instead of a dozen."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...nn.derivatives import SCAN, first_order_only
from .border import View, check, view
from .build import library
from .operators import Operator, differentiable


def _call(x: Tensor, P: Tensor, DP: Tensor | None, Dx: Tensor | None, least: float) -> None:
    L, kind = x.shape[-1], "float" if x.dtype == torch.float32 else "double"
    views = (View * 4)(*map(view, (x, P, DP, Dx)))
    sizes = ctypes.c_int64(x.numel() // L), ctypes.c_int64(L), ctypes.c_double(least)
    threads, back = ctypes.c_int64(torch.get_num_threads()), ctypes.c_int(DP is not None)
    check(getattr(library("decay"), f"mnemos_decay_{kind}")(views, *sizes, threads, back), "decay")


_forward = Operator(
    "decay_products",
    "(Tensor x, float least) -> Tensor",
    lambda x, least: x.new_empty(*x.shape, x.shape[-1]),
    lambda P, x, least: _call(x.contiguous(), P, None, None, least),
)
_backward = Operator(
    "decay_products_backward",
    "(Tensor x, Tensor P, Tensor DP) -> Tensor",
    lambda x, P, DP: x.new_empty(x.shape),
    lambda Dx, x, P, DP: _call(x.contiguous(), P.contiguous(), DP.contiguous(), Dx, 0.0),
)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)


@first_order_only(SCAN)
def _gradients(ctx, DP: Tensor):
    return _backward(*ctx.saved_tensors, DP), None


decay_products = differentiable(_forward, _keep, _gradients)
"""x (..., L), and the number below which a product counts as 0 -> P (..., L, L)."""
