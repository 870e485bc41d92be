"""How tensors cross into C++ (border.h): as views, which the kernels check against their own sizes before they touch memory."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

NO_MEMORY, DONE, NOT_FINITE = 0, 1, 2  # outcomes of a kernel; any other: it refused its arguments


class View(ctypes.Structure):
    """An array: its address, and how many bytes it has."""

    _fields_ = [("at", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


def fields(*names: str) -> list[tuple[str, Any]]:
    """The fields of a structure that holds views of these names, filled by `view`."""
    return [(name, View) for name in names]


def view(x: Tensor | None) -> tuple[int, int]:
    """Address and bytes of a contiguous tensor; nothing for none."""
    if x is None or x.numel() == 0:
        return 0, 0
    try:
        return x.data_ptr(), x.nbytes
    except RuntimeError:  # a stand-in for many tensors
        raise NotImplementedError(
            "kernels take one gradient at a time: use is_grads_batched=False, vectorize=False or backend='torch'"
        ) from None


def check(outcome: int, kernel: str) -> bool:
    """True where the kernel is done, False where it met a gate that is not finite and wrote nothing; else an error in words."""
    if outcome == DONE:
        return True
    if outcome == NOT_FINITE:
        return False
    if outcome == NO_MEMORY:
        raise MemoryError(
            f"there is no memory for the buffers of kernel {kernel!r}: use shorter sequences or backend='torch'"
        )
    raise ValueError(
        f"kernel {kernel!r} refused its arguments: a tensor does not have the size that the layer expects or a position is out of range; "
        "continue from a state that this layer returned, or from mem.initial_state(batch)"
    )
