"""`step`: one token per row, for decoding. Rows may stand at different positions.

Nothing is copied to the host but for the value checks, and for the offset in the chunk of rows that do not agree or are masked.
B batch, H heads, G = B x H, c window, F lifted key dim, V value dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...memory.retention import decayed
from ...memory.rules import Roles
from ...memory.spec import Gates, MemorySpec
from ...memory.state import MemoryState, common_chunk_offset
from ...nn.derivatives import in_full_precision
from .chunking import heads_first
from .engine import windowed_step
from .inner_grads import errors_at_anchor

Write = Callable[..., tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]]


@in_full_precision  # one token is no work for low precision
def step(
    q,
    k,
    v,
    gates: Gates,
    state: MemoryState,
    spec: MemorySpec,
    features,
    mask,
    write: Write | None = None,
    inplace=False,
) -> tuple[Tensor, MemoryState]:
    """`mnemos.memory.step` of checked arguments. write: a kernel for `_write_and_read`; inplace: it writes into the state."""
    out_dtype = v.dtype
    dtype = torch.promote_types(torch.promote_types(k.dtype, out_dtype), state.dtype)
    q, k, v = q.to(dtype), k.to(dtype), spec.loss_value(v.to(dtype), gates)
    window = [x.to(dtype) for x in (state.window_key, state.window_value, state.window_gate)]
    gate = None if gates.gate is None else gates.gate.to(dtype)
    if spec.window > 1:
        gate = torch.ones_like(k[..., 0]) if gate is None else gate
        k, v, gate = (torch.cat(pair, 1) for pair in zip(window, (k, v, gate)))  # B c H ...
        window = [k[:, 1:], v[:, 1:], gate[:, 1:]]
    target = spec.target(v, k)
    lifted_q, lifted_k = q, k
    if features is not None and spec.pairs_per_token > 1:
        lifted_k, lifted_q = spec.lift(features, k), features(q)
    elif features is not None:
        lifted_k, lifted_q = features(torch.cat((k, q), 1)).split((k.shape[1], 1), 1)
    window_tokens, query = (heads_first(lifted_k), heads_first(target)), heads_first(lifted_q)
    roles = spec.update_rule.roles(gates, spec).map(lambda x: x.to(dtype).reshape(-1, 1, 1))  # B 1 H -> G 1 1
    gate = None if gate is None else gate.transpose(1, 2).reshape(-1, spec.window, 1)  # G c 1
    lag = gates.lag_weights(spec.window, dtype)
    lag = None if lag is None else lag.flip(-1).reshape(-1, spec.window, 1)  # oldest first, as the window tokens are
    factors = [x for x in (gate, lag, roles.strength) if x is not None]
    weight = functools.reduce(torch.mul, factors) if factors else None
    y, weights, momentum, anchor = (write or _write_and_read)(query, window_tokens, weight, roles, state, spec, dtype)
    y = y.reshape(*q.shape[:3], -1)
    y = y + q if spec.has_residual else y

    final = state.after_token(weights, momentum, anchor, window, inplace)
    if mask is not None:
        y, final = _skip_rows(y, final, state, mask.squeeze(1))
    return y.to(out_dtype), final


def _write_and_read(query: Tensor, window_tokens, weight: Tensor | None, roles: Roles, state: MemoryState, spec, dtype):
    """y (G, 1, V), and weights, momentum and anchor after the token; the anchor is the one that was used."""
    shapes = [w.shape for w in state.weights]
    # contiguous: initial weights that rows share are copied once, not at each token
    anchor = [a.to(dtype).contiguous() for a in state.anchor]
    W, S, A = ([x.to(dtype).flatten(0, 1) for x in xs] for xs in (state.weights, state.momentum, anchor))
    retained = None
    if spec.decay_first or spec.commits or state.start:
        retained = W if roles.retain is None else _retained(W, state, roles.retain)
    if spec.anchor == "token":
        A = retained if spec.decay_first else W
    assert A is not None
    uses = errors_at_anchor(spec, *window_tokens, A, recompute=True)

    def accumulate(S: list[Tensor]) -> list[Tensor]:
        kept = [None] * len(W) if not S or roles.momentum is None else [roles.momentum * s for s in S]
        return [_push(s, use, weight, w) for s, use, w in zip(kept, uses, W)]

    moved = [] if spec.windowed else accumulate(S)
    if spec.windowed:
        assert retained is not None and roles.rate is not None
        weight = torch.ones_like(roles.rate) if weight is None else weight
        written = [w + windowed_step(spec, use, weight, roles.rate) for w, use in zip(retained, uses)]
    elif spec.commits:
        assert retained is not None and roles.rate is not None
        written = _commit(state, spec, retained, accumulate(moved) if spec.nesterov else moved, roles.rate)
    elif retained is not None or roles.retain is None:
        written = [w + s for w, s in zip(retained or W, moved)]
    else:
        written = [torch.addcmul(s, roles.retain, w) for w, s in zip(W, moved)]
    current = W if spec.read == "before" else written
    y = spec.network.forward(query, lambda i, x: torch.matmul(x, current[i]))
    weights = [w.view(shape) for w, shape in zip(written, shapes)]
    return y, weights, [s.view(shape) for s, shape in zip(moved, shapes)] if S else [], anchor


def _retained(W: list[Tensor], state: MemoryState, retain: Tensor) -> list[Tensor]:
    """The decayed weights, (G, d_in, d_out) each. A start that rows share is not copied for each of them."""
    if not state.start:
        return [retain * w for w in W]
    rows, heads = state.batch, state.heads

    def by_row(x: Tensor) -> Tensor:
        return x.unflatten(0, (rows, heads))

    kept = by_row(retain)
    return [decayed(by_row(w), w0.to(w.dtype), kept).flatten(0, 1) for w, w0 in zip(W, state.start)]


def _push(carried: Tensor | None, use: list[tuple[Tensor, Tensor]], weight: Tensor | None, like: Tensor) -> Tensor:
    """carried (a tensor of our own, or None for 0) - the weighted gradients of the uses of one map."""
    total = carried
    for a, d in use:
        a = a if weight is None else weight * a
        total = torch.bmm(a.mT, -d) if total is None else total.baddbmm_(a.mT, d, alpha=-1)
    return torch.zeros_like(like) if total is None else total


def _commit(
    state: MemoryState, spec: MemorySpec, retained: list[Tensor], moved: list[Tensor], rate: Tensor
) -> list[Tensor]:
    """The weights after the token: decayed, and changed by a commit in rows that commit here."""
    if state.chunk_offset is not None and (state.chunk_offset + 1) % spec.commit:
        return retained
    commit = spec.update_rule.commit
    if state.chunk_offset is None:
        due = ((state.position + 1) % spec.commit == 0).repeat_interleave(state.heads)  # G
        if not torch.compiler.is_compiling():  # of rows at different positions few commit at the same token
            rows = due.nonzero().squeeze(1)
            if not len(rows):
                return retained
            written = [commit(w[rows], s[rows], rate[rows], spec) for w, s in zip(retained, moved)]
            return [w.index_copy(0, rows, new) for w, new in zip(retained, written)]
        rate = rate * due.to(rate.dtype).reshape(-1, 1, 1)
    return [commit(w, s, rate, spec) for w, s in zip(retained, moved)]


def _skip_rows(y: Tensor, new: MemoryState, old: MemoryState, keep: Tensor) -> tuple[Tensor, MemoryState]:
    """Rows whose token is masked stay as they were, and read 0."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(keep.reshape(-1, *(1,) * (a.dim() - 1)), a, b.to(a.dtype))

    final = new.map(choose, old)
    final.chunk_offset, final.conv, final.start = common_chunk_offset(final.position, new.spec), old.conv, new.start
    if final.chunk_offset == 0 or new.spec.anchor == "token":
        final.anchor = list(final.weights)
    return choose(y, torch.zeros_like(y)), final
