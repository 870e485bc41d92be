"""A scan in torch operations: onto the chunk grid, through an engine chunk by chunk, and the state after the last token.

An engine computes runs of chunks (`ChunkRun`): `engine.Engine` in torch; a backend with kernels has one of its own and shares all else.
B batch, T time, H heads, K key dim, V value dim, c window, b chunk size; of rows of different lengths R rows, P slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...memory.spec import Gates, MemorySpec
from ...memory.state import MemoryState, common_chunk_offset
from ...nn.derivatives import in_full_precision
from .engine import Engine
from .tokens import Tokens, close_pairs, open_pairs, prepare, run_grid


@in_full_precision  # coefficients and states are float32 or wider
def scan(q, k, v, gates: Gates, state: MemoryState, spec: MemorySpec, features, mask, cu_seqlens, engine: Engine):
    """`mnemos.memory.scan` of checked arguments."""
    grid_matters = spec.depends_on_chunking and spec.chunk_size > 1
    if cu_seqlens is not None or mask is not None or (state.chunk_offset is None and grid_matters):
        return _scan_varlen(q, k, v, gates, state, spec, features, mask, cu_seqlens, engine)
    tokens = prepare(q, k, v, gates, state, spec, features, engine)
    chunk_offset = state.chunk_offset or 0
    tokens_to_boundary = -chunk_offset % spec.chunk_size
    tokens, maps = open_pairs(tokens, state, features)
    y, *maps = run_grid(tokens, tokens_to_boundary, *maps, spec)
    T, c = k.shape[1], spec.window
    maps, pairs = close_pairs(maps, tokens, state, 0, T + (0 if state.pairs is None else state.pairs.length))
    position = state.position + T
    if state.chunk_offset is None:
        chunk_offset = common_chunk_offset(position, spec)
    else:
        chunk_offset = (state.chunk_offset + T) % spec.chunk_size
    # tensors of their own: a view would keep the whole sequence alive
    window = (x[:, x.shape[1] - (c - 1) :].clone() for x in (tokens.raw_key, tokens.raw_value, tokens.gate))
    final = _final(state, maps, window, position, chunk_offset, pairs, tokens.start)
    return (y if y is None else y.to(v.dtype)), final


def _final(state: MemoryState, maps, window, position, chunk_offset: int | None, pairs, start) -> MemoryState:
    names = "weights", "momentum", "anchor", "window_key", "window_value", "window_gate"
    parts: dict[str, Any] = dict(zip(names, (*maps, *window)))
    return dataclasses.replace(state, **parts, position=position, chunk_offset=chunk_offset, pairs=pairs, start=start)


def _scan_varlen(q, k, v, gates: Gates, state: MemoryState, spec: MemorySpec, features, mask, cu_seqlens, engine):
    """For batch rows of different lengths or positions: masks, packed documents, states at different places of the chunk grid.

    Every row's valid tokens are moved onto its own chunk grid, so that one uniform run serves all; slots without a token
    are skipped by the `valid` factor of the rules.
    """
    rows = _sources(k.shape[0], k.shape[1], mask, cu_seqlens)
    flat = k.shape[0] * k.shape[1]
    out_dtype = v.dtype

    def pick(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.reshape(flat, *x.shape[2:])

    q, k, v = pick(q), pick(k), v.reshape(flat, *v.shape[2:])
    shape, gates = gates.lr.shape[:2], gates.map(pick)
    y = None if q is None else torch.zeros(flat, v.shape[1], spec.value_dim, dtype=out_dtype, device=v.device)
    parts: list[tuple[list[int], MemoryState]] = []
    for members in _by_length(rows):
        sub = state if len(members) == len(rows) else state.select(members)
        y_part, final = _run_rows(q, k, v, gates, sub, spec, features, [rows[r] for r in members], engine)
        parts.append((members, final))
        if y is not None and y_part is not None:
            source = torch.cat([rows[r] for r in members]).to(v.device)
            y = y.index_copy(0, source, y_part.to(out_dtype))
    final = parts[0][1]
    if len(parts) > 1:
        order = [r for members, _ in parts for r in members]
        final = MemoryState.stack([s for _, s in parts]).select([order.index(r) for r in range(len(order))])
    return (None if y is None else y.reshape(*shape, *y.shape[1:])), final


def _sources(B: int, T: int, mask: Tensor | None, cu_seqlens: Tensor | None) -> list[Tensor]:
    """For each row of the state, where its tokens stand in the flattened (B*T) input."""
    valid = torch.ones(B, T, dtype=torch.bool) if mask is None else mask.cpu()
    if cu_seqlens is None:
        return [valid[b].nonzero().squeeze(-1) + b * T for b in range(B)]
    bounds = cu_seqlens.tolist()
    return [valid[0, lo:hi].nonzero().squeeze(-1) + lo for lo, hi in zip(bounds, bounds[1:])]


def _by_length(rows: list[Tensor]) -> list[list[int]]:
    """Rows grouped by length to a factor of two, so that padding at most doubles the work."""
    groups: dict[int, list[int]] = {}
    for r, source in enumerate(rows):
        groups.setdefault((len(source) - 1).bit_length() if len(source) else 0, []).append(r)
    return list(groups.values())


def _run_rows(q, k, v, gates: Gates, state: MemoryState, spec: MemorySpec, features, rows: list[Tensor], engine):
    """Rows of similar length. q, k, v and gates are flattened; returns y of all tokens, row after row, and the state."""

    device, b, c = k.device, spec.chunk_size, spec.window
    counts = [len(source) for source in rows]
    longest = max(counts)
    if longest == 0:
        return (None if q is None else v.new_zeros(0, v.shape[1], spec.value_dim)), state
    positions = state.position.tolist()
    offsets = [p % b if spec.depends_on_chunking else 0 for p in positions]
    slots = max(o + n for o, n in zip(offsets, counts))

    index = torch.zeros(len(rows), longest, dtype=torch.int64)
    for r, source in enumerate(rows):
        index[r, : counts[r]] = source
    count = torch.tensor(counts, device=device).unsqueeze(-1)
    offset = torch.tensor(offsets, device=device).unsqueeze(-1)
    index = index.to(device)
    present = torch.arange(longest, device=device) < count  # R longest

    def gather(x: Tensor) -> Tensor:
        """(B*T, ...) -> (R, longest, ...), rows left-aligned."""
        keep = present.reshape(*present.shape, *(1,) * (x.dim() - 1))
        return torch.where(keep, x[index], torch.zeros((), dtype=x.dtype, device=device))

    own = gates.map(gather)
    if own.gate is None:
        own.gate = present.to(k.dtype).unsqueeze(-1).expand(-1, -1, k.shape[1])
    q, k, v = None if q is None else gather(q), gather(k), gather(v)
    compact = prepare(q, k, v, own, state, spec, features, engine)

    def shift(x: Tensor, size: int = slots) -> Tensor:
        """Move each row right by its offset into `size` slots."""
        place = torch.arange(size, device=device) - offset  # R size
        inside = (place >= 0) & (place < x.shape[1])
        taken = x[torch.arange(len(rows), device=device).unsqueeze(-1), place.clamp(0, x.shape[1] - 1)]
        inside = inside.reshape(*inside.shape, *(1,) * (x.dim() - 2))
        return torch.where(inside, taken, torch.zeros((), dtype=x.dtype, device=device))

    tokens = compact.map(shift, lambda x: shift(x, slots + c - 1))
    tokens = _skip(tokens, shift(present), spec)
    tokens, maps = open_pairs(tokens, state, features)
    y, *maps = _run_segments(tokens, *maps, spec, offsets, counts, slots)
    length = max(p + n for p, n in zip(positions, counts))
    maps, pairs = close_pairs(maps, tokens, state, offset, length)
    ends = [o + n for o, n in zip(offsets, counts)]
    if y is not None:
        y = torch.cat([y[r, offsets[r] : ends[r]] for r in range(len(rows))])
    last = count + torch.arange(c - 1, device=device)  # R c-1, where each row's window begins
    each = torch.arange(len(rows), device=device).unsqueeze(-1)
    chunk_offsets = {(p + n) % b for p, n in zip(positions, counts)}
    window = (x[each, last] for x in (compact.raw_key, compact.raw_value, compact.gate))
    chunk_offset = chunk_offsets.pop() if len(chunk_offsets) == 1 else None
    return y, _final(state, maps, window, state.position + count.squeeze(-1), chunk_offset, pairs, tokens.start)


def _skip(tokens: Tokens, valid: Tensor, spec: MemorySpec) -> Tokens:
    """Slots without a token keep S and W and commit nothing; the `valid` factor of the coefficients does the rest."""
    absent, roles = ~valid.unsqueeze(-1), tokens.roles
    momentum = roles.momentum
    if momentum is None and spec.momentum:  # a skipped token must still keep S
        momentum = tokens.gate.new_zeros(*valid.shape, tokens.gate.shape[2])
    filled = {"momentum": (momentum, 1.0), "retain": (roles.retain, 1.0), "rate": (roles.rate, 0.0)}
    roles = roles.replace(**{n: None if x is None else x.masked_fill(absent, fill) for n, (x, fill) in filled.items()})
    return dataclasses.replace(tokens, roles=roles, valid=valid)


def _run_segments(tokens, W, S, A, spec: MemorySpec, offsets, counts, slots: int):
    """Run all slots, stopping where a row ends inside a chunk: that chunk's start is the row's anchor."""
    b = spec.chunk_size
    if not spec.depends_on_chunking:
        return run_grid(tokens, 0, W, S, A, spec)
    ends = [o + n for o, n in zip(offsets, counts)]
    starts = [end // b * b if end % b else None for end in ends]  # where the chunk a row ends in begins
    cuts = sorted({s for s in starts if s})
    anchor, outputs, begin = A, [], 0
    tokens_to_boundary = b if any(offsets) else 0
    for stop in [*cuts, slots]:
        if stop > begin:
            y, W, S, A = run_grid(tokens.part(begin, stop, spec.window), tokens_to_boundary, W, S, A, spec)
            outputs.append(y)
            tokens_to_boundary = 0
        if stop in cuts:
            anchor = _rows_where([s == stop for s in starts], W, anchor)
        begin = stop
    anchor = _rows_where([s is None for s in starts], W, anchor)
    y = None if tokens.query is None else torch.cat(outputs, 1)
    return y, W, S, anchor


def _rows_where(rows: list[bool], new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    chosen = torch.tensor(rows, device=new[0].device).reshape(-1, 1, 1, 1)
    return [torch.where(chosen, n, o.to(n.dtype)) for n, o in zip(new, old)]
