"""Products of decays in C++ (decay.cpp): `memory.rules.decay_products` for CPUs, in two passes instead of a dozen."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..memory.derivatives import SCAN, first_order_only
from .build import library


def _call(name: str, dtype: torch.dtype, *arguments) -> None:
    function = getattr(library("decay"), f"{name}_{'float' if dtype == torch.float32 else 'double'}")
    kinds = {Tensor: lambda x: ctypes.c_void_p(x.data_ptr()), float: ctypes.c_double, int: ctypes.c_int64}
    function(*(kinds[type(x)](x) for x in arguments))


class DecayProducts(torch.autograd.Function):
    """x (..., L), and the number below which a product counts as 0 -> P (..., L, L)."""

    @staticmethod
    def forward(ctx, x: Tensor, least: float) -> Tensor:
        x = x.contiguous()
        L = x.shape[-1]
        P = x.new_empty(*x.shape, L)
        _call("mnemos_decay", x.dtype, x, P, x.numel() // L, L, least, torch.get_num_threads())
        ctx.save_for_backward(x, P)
        return P

    @staticmethod
    @first_order_only(SCAN)
    def backward(ctx, DP: Tensor):
        x, P = ctx.saved_tensors
        L, Dx = x.shape[-1], torch.empty_like(x)
        threads = torch.get_num_threads()
        _call("mnemos_decay_backward", x.dtype, x, P, DP.contiguous(), Dx, x.numel() // L, L, threads)
        return Dx, None
