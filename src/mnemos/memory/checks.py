"""The one place where arguments from outside are checked, in words a user understands."""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import Gates, MemorySpec
from .state import MemoryState


def check_state(state: MemoryState, spec: MemorySpec, batch: int, heads: int, device: torch.device) -> None:
    if not isinstance(state, MemoryState):
        raise ValueError(f"state is a {type(state).__name__}, but must be a MemoryState (spec.initial_state(W0, batch=...))")
    if state.spec != spec:
        raise ValueError("state belongs to another spec; make one with spec.initial_state(W0, batch=...)")
    if state.batch != batch:
        raise ValueError(f"state holds {state.batch} rows, but the input has {batch}")
    if state.heads != heads:
        raise ValueError(f"state holds {state.heads} heads, but the input has {heads}")
    if state.position.device != device:
        raise ValueError(f"state is on {state.position.device}, but the input is on {device}; use state.to(...)")


def check_inputs(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    spec: MemorySpec,
    features,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Shapes, types and devices; and values, but under torch.compile."""
    for name, x, dim in (("k", k, spec.key_dim), ("q", q, spec.key_dim), ("v", v, spec.value_dim)):
        if x is None and name == "q":
            continue
        if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[-1] != dim:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} has shape {shape}, but (B, T, H, {dim}) is expected")
        if not x.is_floating_point():
            raise ValueError(f"{name} has type {x.dtype}, but must be a floating-point tensor")
        if x.shape[:3] != k.shape[:3]:
            raise ValueError(f"{name} has (B, T, H) = {tuple(x.shape[:3])}, but k has {tuple(k.shape[:3])}")
        if x.device != k.device:
            raise ValueError(f"{name} is on {x.device}, but k is on {k.device}")
    B, T, H = k.shape[:3]
    if T == 0:
        raise ValueError("the sequence is empty: T must be >= 1")
    documents = B
    if cu_seqlens is not None:
        documents = _check_cu_seqlens(cu_seqlens, B, T)
    check_state(state, spec, documents, H, k.device)
    if mask is not None and (mask.shape != (B, T) or mask.dtype != torch.bool):
        raise ValueError(f"mask has shape {tuple(mask.shape)} and type {mask.dtype}, but a bool tensor {(B, T)} is expected")
    _check_features(features, spec, H)
    _check_gates(gates, (B, T, H), spec, k.device)


def _check_cu_seqlens(cu_seqlens: Tensor, B: int, T: int) -> int:
    if B != 1:
        raise ValueError(f"cu_seqlens needs one packed row, but the batch is {B}")
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise ValueError("cu_seqlens must be a whole-number vector [0, end of document 1, ..., T]")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != T or any(a > b for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"cu_seqlens must rise from 0 to T={T}, but is {bounds[:4]}...{bounds[-1:]}")
    return len(bounds) - 1


def _check_features(features, spec: MemorySpec, heads: int) -> None:
    if features is None:
        if spec.features != "identity":
            raise ValueError(f"the spec has features={spec.features!r}: pass features=make_features(spec, heads={heads})")
    elif (features.dim_in, features.dim_out) != (spec.key_dim, spec.lifted_dim):
        raise ValueError(
            f"features map {features.dim_in} to {features.dim_out} dimensions, but the spec needs {spec.key_dim} to {spec.lifted_dim}"
        )


def _check_gates(gates: Gates, shape: tuple[int, int, int], spec: MemorySpec, device: torch.device) -> None:
    if not isinstance(gates, Gates) or not isinstance(gates.lr, Tensor):
        raise ValueError("gates must be Gates(lr=...) with a tensor lr (B, T, H)")
    if gates.momentum is not None and not spec.momentum:
        raise ValueError("gates.momentum is given, but the spec has momentum=False")
    expected = dict.fromkeys(("lr", "momentum", "retain", "gate"), shape) | {"decay": shape[2:], "lag": (*shape, spec.window)}
    for name, wanted in expected.items():
        x = getattr(gates, name)
        if x is None:
            continue
        if x.shape != wanted:
            raise ValueError(f"gates.{name} has shape {tuple(x.shape)}, but {tuple(wanted)} is expected")
        if x.device != device:
            raise ValueError(f"gates.{name} is on {x.device}, but k is on {device}")
        if not torch.compiler.is_compiling():
            low, high = (float(end) for end in torch.aminmax(x.detach()))
            if not (low >= 0.0 and high < float("inf")) or (name != "lr" and high > 1.0):
                allowed = "finite and >= 0" if name == "lr" else "in [0, 1]"
                raise ValueError(f"gates.{name} must be {allowed}, but ranges over [{low}, {high}]")
