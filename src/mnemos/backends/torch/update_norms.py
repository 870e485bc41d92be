"""Norms of what each token writes: of its gradient G_t, and of the accumulator S_t after it. For inspection, not for training.

Neither matrix is built. With one entry e per gradient, of input a_e and error d_e, and K[e,e'] = Σ_maps (a_e·a_e') (d_e·d_e'):
    ‖Σ_e w_e a_eᵀ d_e‖² = wᵀ K w                        ‖m S - Σ_e n_e a_eᵀ d_e‖² = m² ‖S‖² - 2 m Σ_e n_e (a_e S d_eᵀ) + nᵀ K n

B batch, T time, H heads, G = B x H, L tokens, E = c-1+L window_tokens, c window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...memory.kv_memory import logits, per_head
from ...memory.retention import decayed
from ...memory.spec import Gates, MemorySpec
from ...memory.state import MemoryState
from ...nn.checkpoint import full_precision
from .coefficients import decay_products, window_matrix
from .engine import Engine
from .inner_grads import Uses, errors_at_anchor
from .kv_scan import kv_errors
from .tokens import prepare


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
        return _norms(k, v, gates, state, spec, features)


def _norms(k: Tensor, v: Tensor, gates: Gates, state: MemoryState, spec: MemorySpec, features) -> tuple[Tensor, Tensor]:
    (B, L, H), c = k.shape[:3], spec.window
    tokens = prepare(None, k, v, gates, state, spec, features, Engine())
    value = spec.target(tokens.raw_value, tokens.raw_key)
    key, value, gate = (x.transpose(1, 2).flatten(0, 1) for x in (tokens.lifted_key, value, tokens.gate))  # G E ...
    roles = tokens.roles.map(lambda x: x.transpose(1, 2).flatten(0, 1))  # G L ...
    lag = None if roles.lag is None else roles.lag.unsqueeze(0)
    window = window_matrix(gate.unsqueeze(0), lag, L, c).squeeze(0)
    window = torch.diag_embed(window) if c == 1 else window  # G L E

    anchor = [a.to(key.dtype).flatten(0, 1) for a in state.anchor]
    if spec.decay_first and roles.retain is not None:  # one token: its error is measured after the decay
        start = [w.flatten(0, 1) for w in tokens.start] or [None] * len(anchor)
        anchor = [decayed(a, w0, roles.retain[:, :1, None]) for a, w0 in zip(anchor, start)]
    S = [s.to(key.dtype).flatten(0, 1) for s in state.momentum]
    gram, cross, squared = key.new_zeros(len(key), key.shape[1], key.shape[1]), torch.zeros_like(gate), 0.0
    if state.pairs is None:
        uses = errors_at_anchor(spec, key, value, anchor)
    else:
        d, matrices, kernel = _list_errors(key, value, anchor, state, spec, features)
        uses, gram = [[use] for use in matrices], kernel * (d @ d.mT)
        if state.pairs.momentum is not None:
            held = _heads_first(state.pairs.momentum, key)[..., : d.shape[-1]]
            keys = _heads_first(state.pairs.key, key)
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
    keys, weight = _heads_first(state.pairs.key, key), _heads_first(state.pairs.anchor, key)
    z = logits(key, keys, offset).exp() @ weight
    d, matrices = kv_errors(spec, z, value, anchor)
    return d, matrices, kernel


def _heads_first(x: Tensor, like: Tensor) -> Tensor:  # B n H D -> G n D
    return x.to(like.dtype).transpose(1, 2).flatten(0, 1)


def _offset(features, like: Tensor, batch: int) -> Tensor | None:  # G 1 1
    offset = per_head(features, like)
    return None if offset is None else offset.repeat(batch, 1, 1)
