"""Checks of memory states: those of files are complete, of the right types, shapes and memory, and finite; those of calls fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kv_memory import Pairs
from .spec import MemorySpec

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
if TYPE_CHECKING:
    from .state import MemoryState

MAX_POSITION = 2**53  # tokens; positions stay exact in float64 and never overflow


def check_state(
    path, spec: MemorySpec, tensors: dict[str, Tensor], heads: int | None = None, conv: tuple[int, int] | None = None
) -> None:
    """Raise a ValueError unless these are the tensors of one state of `spec`, named as `MemoryState.save` names them.

    heads: of the layer, if known; then conv, its (width - 1, channels), must fit too (None: no convolution).
    """
    first = tensors.get("weights.0" if spec.shapes else "window_key")
    if first is None or first.dim() != 4 or (spec.shapes and 0 in first.shape):
        raise ValueError(f"{path} holds no fast weights")
    batch, found_heads = first.shape[0], first.shape[1 if spec.shapes else 2]
    if 0 in (batch, found_heads):
        raise ValueError(f"{path} holds no batch rows")
    check_position(path, tensors.get("position"))
    if heads is not None and found_heads != heads:
        raise ValueError(f"{path} holds a memory of {found_heads} heads, but the model's memory has {heads}")
    expected = state_shapes(spec, batch, found_heads, int(tensors["position"].max()))
    tail = tensors.get("conv")
    if heads is not None and conv is not None:
        expected["conv"] = (batch, *conv)
    elif heads is None and tail is not None:
        if tail.dim() != 3 or tail.shape[0] != batch:
            raise ValueError(f"{path} does not fit its own header: conv")
        expected["conv"] = tuple(tail.shape)
    check_shapes(path, tensors, expected)
    check_floats(path, {name: x for name, x in tensors.items() if name != "position"})
    if first.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{path} holds numbers of type {first.dtype}, but a memory state is float32 or float64")
    if any(x.dtype != first.dtype for name, x in tensors.items() if name not in ("position", "conv")):
        raise ValueError(f"{path} mixes number types")
    gate = tensors["window_gate"]
    if gate.numel() and not (float(gate.min()) >= 0.0 and float(gate.max()) <= 1.0):
        raise ValueError(f"{path} has window gates outside of 0..1")
    values = tensors["window_value"].unflatten(-1, (spec.pairs_per_token, -1))
    thresholds = values[..., spec.value_dim :]  # of losses that take one per token
    if thresholds.numel() and not float(thresholds.min()) >= 0.0:
        raise ValueError(f"{path} has negative thresholds in window_value")


def check_parts(state: MemoryState, spec: MemorySpec, batch: int, heads: int) -> None:
    """Raise a ValueError unless every tensor of a state in memory has the shape of `spec`, batch rows and heads.

    A state is a plain object that anybody can put together, and kernels fill outputs of the sizes it claims to have.
    """
    check_place(state, batch)
    expected = state_shapes(spec, batch, heads, 0 if state.pairs is None else state.pairs.length)
    found = {name: tuple(x.shape) for name, x in state.tensors().items() if name != "conv"}
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            shape, part = found.get(name, "none"), re.sub(r"\.(\d+)$", r"[\1]", name)
            raise ValueError(f"state has {part} of shape {shape}, but {expected.get(name, 'none')} is expected")


def check_place(state: MemoryState, batch: int) -> None:
    """Raise a ValueError unless position and chunk_offset are those of `batch` rows, and `start` holds W0 if the retention keeps it."""
    if state.position.dtype != torch.int64 or state.position.shape != (batch,):
        found = f"{tuple(state.position.shape)} of {state.position.dtype}"
        raise ValueError(f"state has position {found}, but ({batch},) of torch.int64 is expected")
    chunk_offset = state.chunk_offset
    if chunk_offset is not None and not (isinstance(chunk_offset, int) and 0 <= chunk_offset < state.spec.chunk_size):
        raise ValueError(
            f"state has chunk_offset={chunk_offset!r:.20}, but None or 0..{state.spec.chunk_size - 1} is expected"
        )
    starts = len(state.spec.shapes) if state.spec.retains.keeps_start else 0
    if len(state.start) != starts:
        raise ValueError(f"state has {len(state.start)} matrices in start, but {starts} are expected")


def state_shapes(spec: MemorySpec, batch: int, heads: int, longest: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a state but its convolution's tails. longest: the largest position, for a state that grows."""
    kinds = ["weights", "anchor"] + ["momentum"] * spec.momentum + ["start"] * spec.retains.keeps_start
    shapes: dict[str, tuple[int, ...]] = {
        f"{kind}.{i}": (batch, heads, *shape) for kind in kinds for i, shape in enumerate(spec.shapes)
    }
    before = batch, spec.window - 1, heads
    shapes |= {"window_key": (*before, spec.key_channels), "window_value": (*before, spec.loss_value_dim)}
    shapes |= {"window_gate": before, "position": (batch,)}
    return shapes | Pairs.shapes(spec, batch, heads, longest) if spec.is_kv_cache else shapes


def check_shapes(path, tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    """Every tensor is there, none is left over, and each has its shape."""
    found = {name: tuple(x.shape) for name, x in tensors.items()}
    if found == expected:
        return
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    name = wrong[0]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    what = f"{name:.60} has shape {found.get(name, 'none')}, but {expected.get(name, 'none')} is expected{more}"
    raise ValueError(f"{path} does not fit its own header: {what}")


def check_position(path, position: Tensor | None) -> None:
    """Positions (B,) count tokens."""
    if position is None or position.dim() != 1 or position.dtype != torch.int64 or position.numel() == 0:
        found = "missing" if position is None else f"{tuple(position.shape)} of {position.dtype}"
        raise ValueError(
            f"{path} does not fit its own header: position is {found}, but (batch,) of torch.int64 is expected"
        )
    least, most = int(position.min()), int(position.max())
    if not 0 <= least <= most <= MAX_POSITION:
        kind = "negative position" if least < 0 else "position beyond 2**53"
        raise ValueError(f"{path} has a {kind}: {position.tolist()[:8]}")


def check_floats(path, tensors: dict[str, Tensor]) -> None:
    """Tensors of finite floating-point numbers."""
    for name, x in tensors.items():
        if x.dtype not in FLOATS:
            raise ValueError(f"{path} holds {x.dtype} in {name:.60}, where floating-point numbers are expected")
        if not bool(torch.isfinite(x).all()):
            bad = int((~torch.isfinite(x)).sum())
            raise ValueError(f"{path} holds {bad} numbers in {name:.60} that are not finite")
