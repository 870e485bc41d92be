"""`step`: one token per row, for decoding. Rows may stand at different positions; nothing is copied to the host.

B batch, H heads, c window, F lifted key dim, V value dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from .autograd_engine import _errors_at_anchor
from .checks import check_inputs
from .newton_schulz import newton_schulz
from .scan import fold_lags
from .spec import NS_COEFFICIENTS, Gates, MemorySpec
from .state import MemoryState


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    spec: MemorySpec,
    features: Callable[[Tensor], Tensor] | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, MemoryState]:
    """One token: q, k (B, 1, H, key_dim), v (B, 1, H, value_dim), gates (B, 1, H) -> y (B, 1, H, value_dim), state.

    Equal to `scan` on one token; its cost does not depend on the position. mask (B, 1): rows that are False are skipped.

    >>> from mnemos.memory import Gates, MemorySpec, step
    >>> spec = MemorySpec(key_dim=4, value_dim=4, structure="linear")
    >>> state = spec.initial_state([torch.zeros(1, 4, 4)], batch=2)
    >>> y, state = step(*torch.randn(3, 2, 1, 1, 4), Gates(lr=torch.ones(2, 1, 1)), state, spec)
    >>> y.shape
    torch.Size([2, 1, 1, 4])
    """
    if k.dim() != 4 or k.shape[1] != 1:
        raise ValueError(f"k has shape {tuple(k.shape)}, but step takes one token: (B, 1, H, {spec.key_dim})")
    check_inputs(q, k, v, gates, state, spec, features, mask, None)
    B, _, H, _ = k.shape
    dtype = torch.promote_types(torch.promote_types(k.dtype, v.dtype), state.weights[0].dtype)
    folded = fold_lags(gates, spec, dtype)
    gate = torch.ones_like(k[..., 0], dtype=dtype) if gates.gate is None else gates.gate.to(dtype)
    keys = torch.cat([state.window_key.to(dtype), k.to(dtype)], 1)  # B c H K
    values = torch.cat([state.window_value.to(dtype), v.to(dtype)], 1)
    window_gate = torch.cat([state.window_gate.to(dtype), gate], 1)  # B c H
    queries = q.to(dtype)

    def heads_first(x: Tensor) -> Tensor:  # B c H D -> B H c D
        return x.transpose(1, 2)

    def each(x: Tensor) -> Tensor:  # B 1 H -> B H 1 1
        return x.transpose(1, 2).unsqueeze(-1)

    lr = each(folded.lr)
    W, S = [w.to(dtype) for w in state.weights], [s.to(dtype) for s in state.momentum]
    retained = W if folded.retain is None else [each(folded.retain) * w for w in W]
    A = [a.to(dtype) for a in state.anchor]
    if spec.anchor == "token":
        A = retained if spec.decay_first else W
    target = values - keys if spec.residual and spec.objective == "l2" else values
    lifted = keys if features is None else features(keys)
    weight = window_gate if folded.lag is None else window_gate * folded.lag.squeeze(1).flip(-1).transpose(1, 2)
    weight = heads_first(weight.unsqueeze(-1))  # B H c 1
    uses = _errors_at_anchor(spec, heads_first(lifted), heads_first(target), A)
    if spec.rule == "gd":
        weight = lr * weight
    pushes = [sum((weight * a).mT @ d for a, d in use) for use in uses]
    if S and folded.momentum is not None:
        moved = [each(folded.momentum) * s - g for s, g in zip(S, pushes)]
    else:
        moved = [-g for g in pushes]  # ty: ignore[unsupported-operator]
    if spec.rule == "gd":
        written = [w + s for w, s in zip(retained, moved)]
    else:
        written = _commit(state, spec, retained, moved, lr)

    current = W if spec.read == "before" else written
    lifted_query = heads_first(queries if features is None else features(queries))
    y = spec.network.forward(lifted_query, lambda i, x: x @ current[i]).transpose(1, 2)
    y = y + queries if spec.residual else y

    final = dataclasses.replace(
        state,
        weights=written,
        momentum=moved if S else [],
        window_key=keys[:, 1:],
        window_value=values[:, 1:],
        window_gate=window_gate[:, 1:],
        position=state.position + 1,
        phase=None if state.phase is None else (state.phase + 1) % spec.chunk_size,
    )
    final = dataclasses.replace(final, anchor=_anchor(final, A, spec))
    if mask is not None:
        y, final = _skip_rows(y, final, state, mask.squeeze(1), spec)
    return y.to(v.dtype), final


def _commit(state: MemoryState, spec: MemorySpec, retained, moved, lr) -> list[Tensor]:
    """Muon's weights after the token: decayed, and where the row commits, stepped."""
    if state.phase is not None and (state.phase + 1) % spec.commit:
        return retained
    coefficients = NS_COEFFICIENTS[spec.ns_coefficients]
    if state.phase is None:
        due = (state.position + 1) % spec.commit == 0
        lr = lr * due.to(lr.dtype).reshape(-1, 1, 1, 1)
    return [w + lr * newton_schulz(s, spec.ns_steps, coefficients) for w, s in zip(retained, moved)]


def _anchor(state: MemoryState, A: list[Tensor], spec: MemorySpec) -> list[Tensor]:
    """The anchor after the token: the new weights where a chunk has just ended."""
    if spec.anchor == "token" or state.phase == 0:
        return state.weights
    if state.phase is not None:
        return A
    ended = (state.position % spec.chunk_size == 0).reshape(-1, 1, 1, 1)
    return [torch.where(ended, w, a) for w, a in zip(state.weights, A)]


def _skip_rows(y: Tensor, new: MemoryState, old: MemoryState, keep: Tensor, spec: MemorySpec):
    """Rows whose token is masked stay as they were, and read 0."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(keep.reshape(-1, *(1,) * (a.dim() - 1)), a, b.to(a.dtype))

    def all_of(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        return [choose(x, z) for x, z in zip(a, b)]

    final = dataclasses.replace(
        new,
        weights=all_of(new.weights, old.weights),
        momentum=all_of(new.momentum, old.momentum),
        anchor=all_of(new.anchor, old.anchor),
        window_key=choose(new.window_key, old.window_key),
        window_value=choose(new.window_value, old.window_value),
        window_gate=choose(new.window_gate, old.window_gate),
        position=choose(new.position, old.position),
        phase=None,
    )
    if torch.compiler.is_compiling() or spec.chunk_size == 1:
        final.phase = 0 if spec.chunk_size == 1 else None
    elif bool(keep.all()):
        final.phase = new.phase
    elif not bool(keep.any()):
        final.phase = old.phase
    return choose(y, torch.zeros_like(y)), final
