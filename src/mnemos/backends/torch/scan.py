"""A scan in torch operations: onto the chunk grid, through an engine chunk by chunk, and the state after the last token.

An engine computes runs of chunks (`ChunkRun`): `engine.Engine` in torch; a backend with kernels has one of its own and shares all else.
B batch, T time, H heads, K key dim, V value dim, c window, b chunk size.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...memory.spec import Gates, MemorySpec
from ...memory.state import MemoryState, common_chunk_offset
from ...nn.checkpoint import full_precision
from . import kv_scan
from .chunking import ChunkRun, cut, from_tiles, to_tiles, to_window_tokens
from .coefficients import committed_coefficients, gd_coefficients
from .engine import Engine, RunInputs
from .tokens import Tokens, close_pairs, open_pairs, prepare
from .varlen import scan_varlen
from .windowed import windowed_coefficients


def scan(q, k, v, gates: Gates, state: MemoryState, spec: MemorySpec, features, mask, cu_seqlens, engine: Engine):
    """`mnemos.memory.scan` of checked arguments."""
    with full_precision(k.device.type):  # coefficients and states are float32 or wider
        return _scan(q, k, v, gates, state, spec, features, mask, cu_seqlens, engine)


def _scan(q, k, v, gates: Gates, state: MemoryState, spec: MemorySpec, features, mask, cu_seqlens, engine: Engine):
    grid_matters = spec.depends_on_chunking and spec.chunk_size > 1
    if cu_seqlens is not None or mask is not None or (state.chunk_offset is None and grid_matters):
        return scan_varlen(run_grid, q, k, v, gates, state, spec, features, mask, cu_seqlens, engine)
    tokens = prepare(q, k, v, gates, state, spec, features, engine)
    chunk_offset = state.chunk_offset or 0
    tokens_to_boundary = -chunk_offset % spec.chunk_size
    tokens, maps = open_pairs(tokens, state, features)
    y, *maps = run_grid(tokens, tokens_to_boundary, *maps, spec)
    T, c = k.shape[1], spec.window
    (W, S, A), pairs = close_pairs(maps, tokens, state, 0, T + (0 if state.pairs is None else state.pairs.length))
    position = state.position + T
    final = dataclasses.replace(
        state,
        weights=W,
        momentum=S,
        anchor=A,
        window_key=_tail(tokens.raw_key, c - 1),
        window_value=_tail(tokens.raw_value, c - 1),
        window_gate=_tail(tokens.gate, c - 1),
        position=position,
        chunk_offset=common_chunk_offset(position, spec)
        if state.chunk_offset is None
        else (state.chunk_offset + T) % spec.chunk_size,
        pairs=pairs,
        start=tokens.start,
    )
    return (y if y is None else y.to(v.dtype)), final


def run_grid(
    tokens: Tokens, tokens_to_boundary: int, W: list[Tensor], S: list[Tensor], A: list[Tensor], spec: MemorySpec
):
    """Tokens from a known place on the chunk grid: the first `tokens_to_boundary` of them at the anchor A. Returns y, W, S, A."""
    if tokens.pairs is not None:
        return kv_scan.run_grid(tokens, tokens_to_boundary, W, S, A, spec)
    B, n = tokens.raw_key.shape[0], tokens.raw_key.shape[1] - (spec.window - 1)
    dtype, shapes = tokens.raw_key.dtype, [w.shape for w in W]
    W, S, A, W0 = ([x.to(dtype).flatten(0, 1) for x in xs] for xs in (W, S, A, tokens.start))
    value, engine = spec.target(tokens.raw_value, tokens.raw_key), tokens.engine
    runs = cut(n, tokens_to_boundary, spec, together=engine.joins_chunks)
    state, start = engine.open(spec, W, S), engine.open(spec, W0, []) if W0 else None
    anchor = None if runs[0].fresh else engine.open(spec, A, [])
    outputs, moved = [], False
    for chunks in runs:
        if chunks.fresh:
            anchor, moved = state, True
        y, state = _run_chunks(chunks, tokens, value, state, anchor, start, spec)
        outputs.append(y)
    W, S = engine.close(spec, state)
    ends_on_grid = spec.anchor == "token" or (n - tokens_to_boundary) % spec.chunk_size == 0
    if ends_on_grid:
        A = W
    elif moved:
        A = engine.close(spec, anchor)[0]
    y = None
    if tokens.query is not None:
        y = torch.cat([from_tiles(x, B) for x in outputs], 1) if len(outputs) > 1 else from_tiles(outputs[0], B)
        if spec.has_residual:
            y = y + tokens.query

    def unflatten(xs: list[Tensor]) -> list[Tensor]:
        return [x.reshape(shape) for x, shape in zip(xs, shapes)]

    final = unflatten(W)
    return y, final, unflatten(S), final if ends_on_grid else unflatten(A)


def _run_chunks(chunks: ChunkRun, tokens: Tokens, value: Tensor, state, anchor, start, spec: MemorySpec):
    c = spec.window
    tiled, valid, window = tokens.tiled(chunks, spec)
    products = tokens.engine.decay_products
    if spec.windowed:
        coefficients = windowed_coefficients(tiled, valid, window, products)
    elif spec.commits:
        present = window.new_ones(window.shape[:3]) if valid is None else valid
        if tiled.strength is not None:
            window = tiled.strength * window if c == 1 else tiled.strength.unsqueeze(-1) * window
        coefficients = committed_coefficients(tiled.momentum, tiled.retain, present, window, products, spec.nesterov)
    else:
        assert tiled.strength is not None
        coefficients = gd_coefficients(tiled.strength, tiled.momentum, tiled.retain, valid, window, products)
    q = None if tokens.lifted_query is None else to_tiles(tokens.lifted_query, chunks)
    k, v = (to_window_tokens(x, chunks, c) for x in (tokens.lifted_key, value))
    given = RunInputs(chunks, q, k, v, coefficients, tiled.rate, tiled.retain)
    return tokens.engine.run(spec, given, state, anchor, None if tiled.retain is None else start)  # else nothing decays


def _tail(x: Tensor, n: int) -> Tensor:
    """The last n tokens, as a tensor of their own: a view would keep the whole sequence alive."""
    return x[:, x.shape[1] - n :].clone() if n else x[:, :0].clone()
