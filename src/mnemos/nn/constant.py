"""Constant tensors that follow the parameters of a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .derivatives import transformed


class Constant:
    """Numbers that a module adds to a parameter, as a float32 or wider tensor on the device of the parameter.

    It is no buffer: transformers' from_pretrained overwrites non-persistent buffers with uninitialised memory, and `to_empty` loses them.

    >>> Constant([1.0, 2.0]).plus(torch.zeros(2))
    tensor([1., 2.])
    """

    def __init__(self, values: Sequence[float]):
        self.values = self.placed = torch.tensor(values, dtype=torch.float64, device="cpu")

    def plus(self, offset: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers (n,) + offset (..., n), in the wider of the offset's type and `dtype`."""
        if offset.dtype != dtype:
            dtype = torch.promote_types(offset.dtype, dtype)
            offset = offset.to(dtype)
        placed = self.placed
        if placed.dtype != dtype or placed.device != offset.device:
            placed = self.values.to(device=offset.device, dtype=dtype)
            if type(placed) is Tensor and not torch.compiler.is_compiling() and not transformed():
                self.placed = placed
        return offset + placed
