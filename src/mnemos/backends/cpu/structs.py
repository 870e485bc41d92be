"""The structures of token.cpp, field by field in the same order. An array is a view: its address, and how many bytes it has."""

from __future__ import annotations

import ctypes
from typing import Any

from ...memory.losses import L2, Dot, InnerLoss

MAPS = 16  # of a chain, at most
LOSSES: dict[type[InnerLoss], bool] = {L2: True, Dot: False}  # inner losses that the kernels know
Many = ctypes.c_int64 * (2 * MAPS)
KINDS = 7  # of matrices in `Arrays`
Matrices = ctypes.c_int64 * (2 * KINDS * 2 * MAPS)  # views


def views(*names: str) -> list[tuple[str, Any]]:
    """The fields of arrays with these names."""
    return [field for name in names for field in ((name, ctypes.c_void_p), (f"{name}_bytes", ctypes.c_int64))]


def addresses(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


class Sizes(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("groups", "lanes", "heads", "entries", "l2", "before", "starts", "threads", "poison")
        ),
        *((name, Many) for name in ("in", "out", "maps")),
    ]


class Mix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "H", "K", "V", "width", "qk_norm")),
        *((name, ctypes.c_double) for name in ("eps", "bound")),
    ]


class Arrays(ctypes.Structure):
    _fields_ = [
        *views("query", "keys", "values", "weight", "momentum", "retain"),
        ("matrices", Matrices),  # W, S, A, newW, newS, branch, W0, 2 * MAPS each
        *views("y", "said"),
    ]


class LayerSizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("dim", "momentum", "retain", "residual")),
        ("effective_max_lr", ctypes.c_double),
        ("start", ctypes.POINTER(ctypes.c_double)),
        ("start_bytes", ctypes.c_int64),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        *addresses("gemm"),
        *views("x", "tail", "qkv", "conv", "gates", "gates_offset", "retain"),
        *views("norm", "start_norm", "output_gate", "out", "y", "new_tail"),
    ]


class RingSizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "dim", "H", "G", "D", "window", "persistent", "threads", "poison")),
        *((name, ctypes.c_double) for name in ("theta", "eps")),
        ("width", ctypes.c_int64),
    ]


class Ring(ctypes.Structure):
    _fields_ = [
        *addresses("gemm"),
        *views("x", "qkv", "q_norm", "k_norm", "out", "position", "key", "value", "y"),
        *views("conv", "tail", "new_tail"),
    ]


class BlockSizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "dim", "hidden", "gates", "additive", "threads", "poison")),
        *((name, ctypes.c_double) for name in ("mixer_eps", "between_eps", "feed_eps", "gate_start")),
    ]


class Block(ctypes.Structure):
    _fields_ = [
        *addresses("gemm"),
        *views("x", "mixer_norm", "between", "gate", "gate_offset", "feed_norm", "gate_up", "down", "y"),
        *addresses("layer_sizes", "mix", "sizes", "layer", "arrays", "ring_sizes", "ring"),
    ]
