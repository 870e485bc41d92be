"""A scan that also records a `Trace`, cut into runs at the ends of chunks.

Shapes: B batch, T time, H heads.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...memory.kv_memory import logits, per_head
from ...memory.retention import decayed
from ...memory.scan import inner_loss, scan
from ...memory.spec import Gates, MemorySpec
from ...memory.state import MemoryState
from ...memory.trace import Trace
from .chunking import TILE
from .update_norms import update_norms


def traced_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    spec: MemorySpec,
    features,
    mask: Tensor | None,
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
        surprises.append(_surprise(k[:, part], v[:, part], piece_gates, state, spec, features))
        piece_mask = None if mask is None else mask[:, part]
        updates.append(update_norms(k[:, part], v[:, part], piece_gates, state, spec, features, piece_mask))
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
def _surprise(k: Tensor, v: Tensor, gates: Gates, state: MemoryState, spec: MemorySpec, features) -> Tensor:
    """Inner loss of tokens that share the state's anchor: (B, T, H)."""
    anchor = state.anchor
    if spec.decay_first and gates.retain is not None:  # one token: its error is measured after the decay
        kept = gates.retain[:, 0, :, None, None].to(state.dtype)
        anchor = [decayed(a, state.start[i] if state.start else None, kept) for i, a in enumerate(anchor)]
    pairs = None if state.pairs is None else dataclasses.replace(state.pairs, weight=state.pairs.anchor)
    state = dataclasses.replace(state, weights=anchor, pairs=pairs)
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
