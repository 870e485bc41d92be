"""`MemorySpec.initial_state`: the state before the first token."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .kv_memory import Pairs
from .spec import MemorySpec
from .state import MemoryState


def initial_state(
    self: MemorySpec,
    W0: list[Tensor],
    batch: int,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> MemoryState:
    """State before the first token, for `batch` rows. W0: list of (H, d_in, d_out), one per fast map; gradients reach it.

    heads, dtype (float32) and device (cpu) are for a memory without matrices, features "exp" and structure "linear", whose W0 is [];
    otherwise they are those of W0.

    >>> spec = MemorySpec(key_dim=4, value_dim=4, structure="linear")
    >>> spec.initial_state([torch.zeros(2, 4, 4)], batch=3).weights[0].shape
    torch.Size([3, 2, 4, 4])
    """
    spec = self
    if not isinstance(batch, (int, torch.SymInt)) or isinstance(batch, bool) or batch < 1:
        raise ValueError(f"batch={batch!r} must be a whole number >= 1")
    W0 = list(W0) if isinstance(W0, Iterable) else [W0]
    if not all(isinstance(w, Tensor) for w in W0):
        raise ValueError("W0 must be a list of tensors (heads, d_in, d_out), one per fast map")
    if len(W0) != len(spec.shapes):
        raise ValueError(
            f"W0 has {len(W0)} matrices, but structure {spec.structure!r} has {len(spec.shapes)} fast maps"
        )
    if not W0:
        if type(heads) is not int or heads < 1:
            raise ValueError(f"heads={heads!r} must be a whole number >= 1, for W0 is empty and cannot tell it")
        W0 = [torch.zeros(heads, 0, 0, dtype=dtype, device=device)]
    elif (heads, dtype, device) != (None, None, None):
        raise ValueError("heads, dtype and device are those of W0: give them only where W0 is []")
    heads = W0[0].shape[0] if W0[0].dim() == 3 else 0
    dtype = torch.promote_types(torch.float32, W0[0].dtype)
    for i, (w, shape) in enumerate(zip(W0, spec.shapes)):
        if tuple(w.shape) != (heads, *shape) or heads == 0:
            wanted = f"({heads or 'heads'}, {shape[0]}, {shape[1]})"
            raise ValueError(f"W0[{i}] has shape {tuple(w.shape)}, but (heads, d_in, d_out) = {wanted} is expected")
        if not w.is_floating_point():
            raise ValueError(f"W0[{i}] has type {w.dtype}, but must be a floating-point tensor")
        if w.device != W0[0].device:
            raise ValueError(f"W0[{i}] is on {w.device}, but W0[0] is on {W0[0].device}")
        dtype = torch.promote_types(dtype, w.dtype)
    rule, initial = spec.update_rule, [w.to(dtype) for w in W0[: len(spec.shapes)]]

    def rows(w: Tensor) -> Tensor:
        return w.unsqueeze(0).expand(batch, *w.shape)

    weights = [rows(rule.initial_weights(w)) for w in initial]
    c, like = spec.window - 1, W0[0].to(dtype)
    empty = like.new_zeros
    return MemoryState(
        spec=spec,
        weights=weights,
        momentum=[rows(rule.initial_accumulator(w)).contiguous() for w in initial] if spec.momentum else [],
        anchor=list(weights),
        window_key=empty(batch, c, heads, spec.key_channels),
        window_value=empty(batch, c, heads, spec.loss_value_dim),
        window_gate=empty(batch, c, heads),
        position=torch.zeros(batch, dtype=torch.int64, device=like.device),
        chunk_offset=0,
        pairs=Pairs.empty(spec, batch, heads, like) if spec.is_kv_cache else None,
        start=[rows(w.clone()) for w in initial] if spec.retains.keeps_start else [],  # an optimiser may move W0
    )


MemorySpec.initial_state = initial_state
