"""The structures of token.cpp, field by field in the same order."""

from __future__ import annotations

import ctypes

from ..memory.mode import MAPS

Many = ctypes.c_int64 * (2 * MAPS)
Pointers = ctypes.c_void_p * (6 * 2 * MAPS)


class Sizes(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("groups", "lanes", "heads", "entries", "l2", "before", "threads", "poison")
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
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "weight", "momentum", "retain")),
        ("matrices", Pointers),  # W, S, A, newW, newS, start, 2 * MAPS each
        ("y", ctypes.c_void_p),
        ("said", ctypes.c_void_p),
    ]


class LayerSizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("dim", "momentum", "retain", "residual")),
        ("lr_ceiling", ctypes.c_double),
        ("start", ctypes.POINTER(ctypes.c_double)),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "gemm",
            "x",
            "tail",
            "qkv",
            "conv",
            "gates",
            "gates_offset",
            "retain",
            "norm",
            "start_norm",
            "output_gate",
            "out",
            "y",
            "new_tail",
        )
    ]


class RingSizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "dim", "H", "G", "D", "window", "persistent", "threads", "poison")),
        *((name, ctypes.c_double) for name in ("theta", "eps")),
    ]


class Ring(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("gemm", "x", "qkv", "q_norm", "k_norm", "out", "position", "key", "value", "y")
    ]


class BlockSizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "dim", "hidden", "gates", "additive", "threads", "poison")),
        *((name, ctypes.c_double) for name in ("mixer_eps", "between_eps", "feed_eps", "gate_start")),
    ]


class Block(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "gemm",
            "x",
            "mixer_norm",
            "between",
            "gate",
            "gate_offset",
            "feed_norm",
            "gate_up",
            "down",
            "y",
            "layer_sizes",
            "mix",
            "sizes",
            "layer",
            "arrays",
            "ring_sizes",
            "ring",
        )
    ]
