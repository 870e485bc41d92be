"""The structures of token.cpp, field by field in the same order. An array is a view: its address, and how many bytes it has."""

from __future__ import annotations

import ctypes
from typing import Any

from ...memory.losses import L2, Dot, InnerLoss
from ...memory.newton_schulz import FLOOR, NS_COEFFICIENTS, polynomials
from ...memory.spec import MemorySpec
from .operators import fields

MAPS = 16  # of a chain, at most
MAX_STEPS = 64  # iterations of Newton–Schulz
LONGEST_WINDOW = 1 << 14  # of a rule with such steps, at one token
LOSSES: dict[type[InnerLoss], bool] = {L2: True, Dot: False}  # inner losses that the kernels know
Many = ctypes.c_int64 * (2 * MAPS)
KINDS = 7  # of matrices in `Arrays`
Matrices = ctypes.c_int64 * (2 * KINDS * 2 * MAPS)  # views


def views(names: str) -> list[tuple[str, Any]]:
    """The fields of arrays with these names: an address, and a number of bytes that is set without a structure of its own."""
    return [field for name in names.split() for field in ((name, ctypes.c_void_p), (f"{name}_bytes", ctypes.c_int64))]


class WindowRule(ctypes.Structure):
    """A rule of the windowed family; without steps it is gradient descent. a, b, c: of every iteration."""

    _fields_ = [
        *fields(ctypes.c_int64, "window steps nuclear"),
        ("floor", ctypes.c_double),
        *fields(ctypes.c_double * MAX_STEPS, "a b c"),
    ]

    @classmethod
    def of(cls, window: int, nuclear: bool, numbers: list[float]) -> WindowRule:
        """numbers: a, b and c of every iteration."""
        schedule = ((ctypes.c_double * MAX_STEPS)(*numbers[i::3]) for i in range(3))
        return cls(window, len(numbers) // 3, nuclear, FLOOR, *schedule)


def schedule(spec: MemorySpec) -> list[float]:
    """a, b and c of every Newton–Schulz iteration of a windowed rule; nothing for gradient descent."""
    if not spec.windowed:
        return []
    return [x for polynomial in polynomials(NS_COEFFICIENTS[spec.ns_coefficients], spec.ns_steps) for x in polynomial]


class Sizes(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "groups lanes heads entries l2 before starts threads poison"),
        *fields(Many, "in out maps"),
        ("rule", WindowRule),
    ]


class Mix(ctypes.Structure):
    _fields_ = [*fields(ctypes.c_int64, "B H K V width qk_norm"), *fields(ctypes.c_double, "eps bound")]


class Arrays(ctypes.Structure):
    _fields_ = [
        ("gemm", ctypes.c_void_p),
        *views("query keys values weight momentum retain rate"),
        ("matrices", Matrices),  # W, S, A, newW, newS, branch, W0, 2 * MAPS each
        *views("y said"),
    ]


class LayerSizes(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "dim momentum retain residual"),
        ("effective_max_lr", ctypes.c_double),
        ("start", ctypes.POINTER(ctypes.c_double)),
        *fields(ctypes.c_int64, "start_bytes degree hidden lags decay inside"),
        *fields(ctypes.c_double, "lag_start token_start decay_start step_size"),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("gemm", ctypes.c_void_p),
        *views("x tail qkv conv gates gates_offset retain norm start_norm output_gate out y new_tail"),
        *views("log_coefficients token token_offset decay"),
        *views("window_key window_value window_gate new_window_key new_window_value new_window_gate"),
    ]


class RingSizes(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "B dim H G D window persistent threads poison"),
        *fields(ctypes.c_double, "theta eps"),
        ("width", ctypes.c_int64),
    ]


class Ring(ctypes.Structure):
    _fields_ = [
        ("gemm", ctypes.c_void_p),
        *views("x qkv q_norm k_norm out position key value y conv tail new_tail"),
    ]


class BlockSizes(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "B dim hidden gates additive threads poison"),
        *fields(ctypes.c_double, "mixer_eps between_eps feed_eps gate_start"),
        *fields(ctypes.c_int64, "time offset chunk"),  # of the piece
    ]


class Block(ctypes.Structure):
    _fields_ = [
        ("gemm", ctypes.c_void_p),
        *views("x mixer_norm between gate gate_offset feed_norm gate_up down y"),
        *fields(ctypes.c_void_p, "layer_sizes mix sizes layer arrays ring_sizes ring anchors"),
    ]
