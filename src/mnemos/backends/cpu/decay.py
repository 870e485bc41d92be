"""Products of decays in C++ (decay.cpp): `memory.rules.decay_products` for CPUs, in two passes instead of a dozen."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...nn.derivatives import SCAN, first_order_only
from .border import View, check, view
from .build import library


def _call(x: Tensor, P: Tensor, DP: Tensor | None, Dx: Tensor | None, least: float) -> None:
    L, kind = x.shape[-1], "float" if x.dtype == torch.float32 else "double"
    views = (View * 4)(*map(view, (x, P, DP, Dx)))
    sizes = ctypes.c_int64(x.numel() // L), ctypes.c_int64(L), ctypes.c_double(least)
    threads, back = ctypes.c_int64(torch.get_num_threads()), ctypes.c_int(DP is not None)
    check(getattr(library("decay"), f"mnemos_decay_{kind}")(views, *sizes, threads, back), "decay")


class DecayProducts(torch.autograd.Function):
    """x (..., L), and the number below which a product counts as 0 -> P (..., L, L)."""

    @staticmethod
    def forward(ctx, x: Tensor, least: float) -> Tensor:
        x = x.contiguous()
        P = x.new_empty(*x.shape, x.shape[-1])
        _call(x, P, None, None, least)
        ctx.save_for_backward(x, P)
        return P

    @staticmethod
    @first_order_only(SCAN)
    def backward(ctx, DP: Tensor):
        x, P = ctx.saved_tensors
        Dx = torch.empty_like(x)
        _call(x, P, DP.contiguous(), Dx, 0.0)
        return Dx, None
