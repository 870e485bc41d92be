"""A scan that also records a `Trace`, cut into runs at the ends of chunks: surprise, and norms of weights and of what tokens write.

The matrices that tokens write are not built. With one entry e per gradient, of input a_e and error d_e, and K[e,e'] = Σ_maps (a_e·a_e') (d_e·d_e'):
    ‖Σ_e w_e a_eᵀ d_e‖² = wᵀ K w                        ‖m S - Σ_e n_e a_eᵀ d_e‖² = m² ‖S‖² - 2 m Σ_e n_e (a_e S d_eᵀ) + nᵀ K n

B batch, T time, H heads, G = B x H, L tokens, E = c-1+L window tokens, c window.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from ...memory.kv_memory import logits, per_head
from ...memory.retention import decayed
from ...memory.scan import Trace, inner_loss, scan
from ...memory.spec import Gates, MemorySpec
from ...memory.state import MemoryState
from ...nn.derivatives import full_precision
from .chunking import TILE, heads_first
from .coefficients import decay_products, window_matrix
from .engine import Engine
from .inner_grads import Uses, errors_at_anchor
from .kv_scan import kv_errors
from .tokens import prepare


def traced_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    spec: MemorySpec,
    features,
    mask,
    position: Tensor,
) -> tuple[Tensor, MemoryState, Trace]:
    """`scan`, run by run, each up to the next place where some row's anchor moves, or shorter. position: (B, T) of every token."""
    T = k.shape[1]
    ended = (position + 1) % spec.chunk_size == 0
    ended = ended if mask is None else ended & mask
    ends = sorted({*(ended.any(0).nonzero().squeeze(-1) + 1).tolist(), T})
    cuts = sorted({*ends, *range(TILE, T, TILE)}) if spec.depends_on_chunking else range(1, T + 1)
    outputs, surprises, updates, norms, start = [], [], [], [], 0
    for stop in cuts:
        part = slice(start, stop)
        piece_gates = gates.map(lambda x, part=part: x[:, part])
        piece_mask = None if mask is None else mask[:, part]
        at_anchor = _at_anchor(state, piece_gates, spec)
        surprises.append(_surprise(k[:, part], v[:, part], piece_gates, at_anchor, spec, features))
        updates.append(update_norms(k[:, part], v[:, part], piece_gates, at_anchor, spec, features, piece_mask))
        y, state = scan(q[:, part], k[:, part], v[:, part], piece_gates, state, spec, features, piece_mask)
        outputs.append(y)
        if stop in ends:
            norms.append(_norms(state, features))
        start = stop
    surprise = torch.cat(surprises, 1)
    gradient_norm, momentum_norm = (torch.cat(runs, 1) for runs in zip(*updates))
    one, zero = torch.ones_like(gates.lr), torch.zeros_like(gates.lr)
    trace = Trace(
        surprise=surprise if mask is None else surprise.masked_fill(~mask.unsqueeze(-1), 0.0),
        gradient_norm=gradient_norm,
        momentum_norm=momentum_norm,
        lr=gates.lr.detach(),
        momentum=zero if gates.momentum is None else gates.momentum.detach(),
        retain=one if gates.retain is None else gates.retain.detach(),
        gate=one if gates.gate is None else gates.gate.detach(),
        weight_norms=torch.stack(norms, 1),
        ends=ends,
    )
    return torch.cat(outputs, 1), state, trace


@torch.no_grad()
def _at_anchor(state: MemoryState, gates: Gates, spec: MemorySpec) -> MemoryState:
    """The state whose anchor is where the errors of the next tokens are measured."""
    if not spec.decay_first or gates.retain is None:
        return state
    kept = gates.retain[:, 0, :, None, None].to(state.dtype)  # one token: its error is measured after the decay
    start = state.start or [None] * len(state.anchor)
    return dataclasses.replace(state, anchor=[decayed(a, w0, kept) for a, w0 in zip(state.anchor, start)])


@torch.no_grad()
def _surprise(k: Tensor, v: Tensor, gates: Gates, state: MemoryState, spec: MemorySpec, features) -> Tensor:
    """Inner loss of tokens that share the state's anchor: (B, T, H)."""
    pairs = None if state.pairs is None else dataclasses.replace(state.pairs, weight=state.pairs.anchor)
    state = dataclasses.replace(state, weights=state.anchor, pairs=pairs)
    return inner_loss(k, spec.loss_value(v.to(k.dtype), gates), state, spec, features)


@torch.no_grad()
def _norms(state: MemoryState, features) -> Tensor:
    """Frobenius norm of every fast map: (B, H, maps). That of a list follows from the kernel between its keys."""
    norms = [w.flatten(2).norm(dim=-1) for w in state.weights]
    if state.pairs is not None:
        weight = state.pairs.weight[..., : state.pairs.weight.shape[-1] - state.spec.normalize].transpose(1, 2)
        key = state.pairs.key.transpose(1, 2)  # B H n K
        kernel = logits(key, key, per_head(features, key)).exp()
        norms.insert(0, (weight * (kernel @ weight)).sum((-2, -1)).clamp(min=0).sqrt())
    return torch.stack(norms, -1)


@torch.no_grad()
def update_norms(
    k: Tensor, v: Tensor, gates: Gates, state: MemoryState, spec: MemorySpec, features, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """‖G_t‖ and ‖S_t‖ over all fast maps, (B, T, H) each, of tokens that share the state's anchor; 0 for masked tokens.

    k: (B, T, H, key_dim), v: (B, T, H, value_dim), mask: (B, T) or None.
    """
    if mask is not None:  # valid tokens first: what follows them does not reach them
        order = (~mask).to(torch.int64).argsort(dim=1, stable=True)
        rows = torch.arange(len(mask), device=mask.device).unsqueeze(-1)
        k, v, gates = k[rows, order], v[rows, order], gates.map(lambda x: x[rows, order])
        norms = update_norms(k, v, gates, state, spec, features, None)
        place = order.argsort(dim=1)
        return norms[0][rows, place] * mask.unsqueeze(-1), norms[1][rows, place] * mask.unsqueeze(-1)
    with full_precision(k.device.type):
        return _update_norms(k, v, gates, state, spec, features)


def _update_norms(
    k: Tensor, v: Tensor, gates: Gates, state: MemoryState, spec: MemorySpec, features
) -> tuple[Tensor, Tensor]:
    (B, L, H), c = k.shape[:3], spec.window
    tokens = prepare(None, k, v, gates, state, spec, features, Engine())
    value = spec.target(tokens.raw_value, tokens.raw_key)
    key, value, gate = (heads_first(x) for x in (tokens.lifted_key, value, tokens.gate))  # G E ...
    roles = tokens.roles.map(heads_first)  # G L ...
    lag = None if roles.lag is None else roles.lag.unsqueeze(0)
    window = window_matrix(gate.unsqueeze(0), lag, L, c).squeeze(0)
    window = torch.diag_embed(window) if c == 1 else window  # G L E

    anchor = [a.to(key.dtype).flatten(0, 1) for a in state.anchor]
    S = [s.to(key.dtype).flatten(0, 1) for s in state.momentum]
    gram, cross, squared = key.new_zeros(len(key), key.shape[1], key.shape[1]), torch.zeros_like(gate), 0.0
    if state.pairs is None:
        uses = errors_at_anchor(spec, key, value, anchor)
    else:
        d, matrices, kernel = _list_errors(key, value, anchor, state, spec, features)
        uses, gram = [[use] for use in matrices], kernel * (d @ d.mT)
        if state.pairs.momentum is not None:
            held = heads_first(state.pairs.momentum.to(key.dtype))[..., : d.shape[-1]]
            keys = heads_first(state.pairs.key.to(key.dtype))
            offset = _offset(features, key, B)
            cross = ((logits(key, keys, offset).exp() @ held) * d).sum(-1)
            squared = (held * (logits(keys, keys, offset).exp() @ held)).sum((-2, -1))
    gram = gram + _gram(uses)
    for s, use in zip(S, uses):
        cross = cross + sum(((a @ s) * d).sum(-1) for a, d in use)
        squared = squared + s.square().sum((-2, -1))
    gradient = _quadratic(window, gram)
    strength = window if roles.strength is None else roles.strength.unsqueeze(-1) * window
    if roles.momentum is None:
        momentum = _quadratic(strength, gram)
    else:
        P = decay_products(F.pad(roles.momentum, (1, 0), value=1.0))
        n, m = P[..., 1:, 1:] @ strength, P[..., 1:, 0]  # G L E, G L
        start = squared if isinstance(squared, float) else squared.unsqueeze(-1)
        momentum = m * m * start - 2 * m * (n @ cross.unsqueeze(-1)).squeeze(-1) + _quadratic(n, gram)
    gradient, momentum = (x.clamp(min=0).sqrt().view(B, H, L).transpose(1, 2) for x in (gradient, momentum))
    return gradient, momentum


def _quadratic(weights: Tensor, gram: Tensor) -> Tensor:
    """wᵀ K w for every row w: (G, L, E), (G, E, E) -> (G, L)."""
    return ((weights @ gram) * weights).sum(-1)


def _gram(uses: Uses) -> Tensor | float:
    """K of the maps that are matrices; a map that the network uses twice has two inputs and errors per entry."""
    total: Tensor | float = 0.0
    for use in uses:
        for a, d in use:
            for b, e in use:
                total = total + (a @ b.mT) * (d @ e.mT)
    return total


def _list_errors(key: Tensor, value: Tensor, anchor: list[Tensor], state: MemoryState, spec: MemorySpec, features):
    """With features "exp": errors of the first map (G, E, V), inputs and errors of the others, and the kernel (G, E, E)."""
    assert state.pairs is not None
    offset = _offset(features, key, state.batch)
    kernel = logits(key, key, offset).exp()
    if not spec.depends_on_chunking:
        return spec.loss.error(None, value), [], kernel
    keys, weight = (heads_first(x.to(key.dtype)) for x in (state.pairs.key, state.pairs.anchor))
    z = logits(key, keys, offset).exp() @ weight
    d, matrices = kv_errors(spec, z, value, anchor)
    return d, matrices, kernel


def _offset(features, like: Tensor, batch: int) -> Tensor | None:  # G 1 1
    offset = per_head(features, like)
    return None if offset is None else offset.repeat(batch, 1, 1)
