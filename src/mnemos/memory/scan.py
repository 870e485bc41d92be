"""`scan`: a whole sequence through the memory, exactly as token by token. And `read`: look up, write nothing.

B batch, T time, H heads, K key dim, V value dim, c window, b chunk size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import exp_engine, torch_engine
from .checks import check_inputs, check_query
from .derivatives import refuse_transforms
from .mode import Mode, chain_kernel, choose_mode, muon_kernel
from .pairs import Opened, close_pairs, open_pairs
from .ragged import scan_ragged
from .rules import gd_coefficients, muon_coefficients, window_matrix
from .spec import Gates, MemorySpec
from .state import MemoryState, common_phase
from .tiles import Piece, cut, from_tiles, to_entries, to_tiles


def scan(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    spec: MemorySpec,
    features: Callable[[Tensor], Tensor] | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, MemoryState]:
    """Write the tokens (k, v) into the memory and read it with q, token by token in meaning, in large matmuls in fact.

    q, k: (B, T, H, key_dim), unlifted; v: (B, T, H, value_dim); gates: (B, T, H). q=None writes without reading (y is None).
    features: the feature map of the spec, applied to keys and queries alike; None is the identity.
    mask: (B, T) bool, False tokens are skipped: no write, no step in position, y = 0.
    cu_seqlens: [0, end of document 1, ..., T] for B = 1; the state then has one row per document.
    backend: "torch" everywhere; "cpp", a kernel for CPUs that the machine's own compiler makes at first use, where the memory
    is one it knows (at a chunk's anchor, of a built-in structure); "auto", that one where it can be had.
    Returns y (B, T, H, value_dim) and the state after the last token. The input state is left as it was.

    >>> from mnemos.memory import Gates, MemorySpec, scan
    >>> spec = MemorySpec(key_dim=4, value_dim=4, structure="linear", chunk_size=8)
    >>> q, k, v = torch.randn(3, 2, 20, 1, 4)
    >>> state = spec.initial_state([torch.zeros(1, 4, 4)], batch=2)
    >>> y, state = scan(q, k, v, Gates(lr=torch.full((2, 20, 1), 0.1)), state, spec)
    >>> y.shape, state.position.tolist()
    (torch.Size([2, 20, 1, 4]), [20, 20])
    """
    refuse_transforms("scan")
    check_inputs(q, k, v, gates, state, spec, features, mask, cu_seqlens)
    mode = choose_mode(backend, k, spec)
    with torch.autocast(
        k.device.type, enabled=False
    ):  # coefficients and states are float32 or wider; engines lower their matmuls
        return _scan(q, k, v, gates, state, spec, features, mask, cu_seqlens, mode)


def _scan(q, k, v, gates: Gates, state: MemoryState, spec: MemorySpec, features, mask, cu_seqlens, mode: Mode):
    grid_matters = spec.on_grid and spec.chunk_size > 1
    if cu_seqlens is not None or mask is not None or (state.phase is None and grid_matters):
        return scan_ragged(run_grid, q, k, v, gates, state, spec, features, mask, cu_seqlens, mode)
    tokens = prepare(q, k, v, gates, state, spec, features, mode)
    phase = state.phase or 0
    room = -phase % spec.chunk_size
    tokens, maps = open_pairs(tokens, state, features)
    y, *maps = run_grid(tokens, room, *maps, spec)
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
        phase=common_phase(position, spec) if state.phase is None else (state.phase + T) % spec.chunk_size,
        pairs=pairs,
    )
    return (y if y is None else y.to(v.dtype)), final


def read(q: Tensor, state: MemoryState, spec: MemorySpec, features: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """M(q; W) at the state's weights, for q (B, T, H, key_dim) -> (B, T, H, value_dim). Writes nothing.

    >>> from mnemos.memory import MemorySpec, read
    >>> spec = MemorySpec(key_dim=4, value_dim=3, structure="linear")
    >>> read(torch.randn(2, 5, 1, 4), spec.initial_state([torch.ones(1, 4, 3)], batch=2), spec).shape
    torch.Size([2, 5, 1, 3])
    """
    check_query(q, state, spec, features)
    wide = q.to(torch.promote_types(q.dtype, state.dtype))
    lifted = (wide if features is None else features(wide)).transpose(1, 2)  # B H T F
    if state.pairs is not None:
        y = exp_engine.read(lifted, state, spec, features)
    else:
        y = spec.network.forward(lifted, lambda i, x: x @ state.weights[i].to(x.dtype))
    y = y.transpose(1, 2)
    return (y + wide if spec.residual else y).to(q.dtype)


@dataclass
class Tokens:
    """A sequence in the engine's terms. Keys, values and gates carry the c-1 tokens before the first."""

    query: Tensor | None  # B T H K, unlifted
    lifted_query: Tensor | None  # B T H F
    raw_key: Tensor  # B c-1+T H K
    raw_value: Tensor  # B c-1+T H V
    lifted_key: Tensor  # B c-1+T H F
    gate: Tensor  # B c-1+T H
    gates: Gates  # B T H, gate and decay folded away: lag holds decay^j * lag, or None
    mode: Mode
    valid: Tensor | None = None  # B T, 1 or 0
    pairs: Opened | None = None  # with features "exp"

    def part(self, start: int, stop: int, c: int) -> Tokens:
        def tokens(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, start:stop]

        def entries(x: Tensor) -> Tensor:
            return x[:, start : stop + c - 1]

        return Tokens(
            tokens(self.query),
            tokens(self.lifted_query),
            entries(self.raw_key),
            entries(self.raw_value),
            entries(self.lifted_key),
            entries(self.gate),
            self.gates.map(lambda x: x[:, start:stop]),
            self.mode,
            tokens(self.valid),
            None if self.pairs is None else self.pairs.part(start, c),
        )


def prepare(q, k, v, gates: Gates, state: MemoryState, spec: MemorySpec, features, mode: Mode) -> Tokens:
    """Widen the types, prepend the window buffers, lift, and fold decay and lag into one weight per lag."""
    dtype = torch.promote_types(torch.promote_types(k.dtype, v.dtype), state.dtype)
    k, v = k.to(dtype), v.to(dtype)
    gate = torch.ones_like(k[..., 0]) if gates.gate is None else gates.gate.to(dtype)
    if spec.window > 1:
        k = torch.cat([state.window_key.to(dtype), k], 1)
        v = torch.cat([state.window_value.to(dtype), v], 1)
        gate = torch.cat([state.window_gate.to(dtype), gate], 1)
    if q is not None:
        q = q.to(dtype)
    return Tokens(
        query=q,
        lifted_query=q if q is None or features is None else features(q),
        raw_key=k,
        raw_value=v,
        lifted_key=k if features is None else features(k),
        gate=gate,
        gates=fold_lags(gates, spec, dtype),
        mode=mode,
    )


def fold_lags(gates: Gates, spec: MemorySpec, dtype: torch.dtype) -> Gates:
    """Gates in `dtype`, with `lag` standing for decay^j * lag_j and `gate`, `decay` gone."""
    kept = Gates(lr=gates.lr, momentum=gates.momentum, retain=gates.retain).map(lambda x: x.to(dtype))
    return dataclasses.replace(kept, lag=lag_weights(gates, spec, dtype))


def lag_weights(gates: Gates, spec: MemorySpec, dtype: torch.dtype) -> Tensor | None:
    """decay^j * lag_j, the weight of the token j steps back: (B, T, H, c), or None where all are 1."""
    lag = None if gates.lag is None else gates.lag.to(dtype)
    if gates.decay is None or spec.window == 1:
        return lag
    powers = torch.arange(spec.window, device=gates.decay.device)
    decay = gates.decay.to(dtype).unsqueeze(-1) ** powers  # H c
    return decay.expand(*gates.lr.shape, spec.window) if lag is None else lag * decay


def run_grid(tokens: Tokens, room: int, W: list[Tensor], S: list[Tensor], A: list[Tensor], spec: MemorySpec):
    """Tokens from a known place on the chunk grid: the first `room` of them at the anchor A. Returns y, W, S, A."""
    if tokens.pairs is not None:
        return exp_engine.run_grid(tokens, room, W, S, A, spec)
    B, n, _ = tokens.gates.lr.shape
    dtype, shapes = tokens.raw_key.dtype, [w.shape for w in W]
    W, S, A = ([x.to(dtype).flatten(0, 1) for x in xs] for xs in (W, S, A))
    value = tokens.raw_value
    if spec.residual and spec.objective == "l2":
        value = value - tokens.raw_key
    outputs = []
    for piece in cut(n, room, spec, together=not tokens.mode.native):
        if piece.fresh:
            A = W
        y, W, S = _run_piece(piece, tokens, value, W, S, A, spec)
        outputs.append(y)
    ends_on_grid = spec.anchor == "token" or (n - room) % spec.chunk_size == 0
    if ends_on_grid:
        A = W
    y = None
    if tokens.query is not None:
        y = torch.cat([from_tiles(x, B) for x in outputs], 1) if len(outputs) > 1 else from_tiles(outputs[0], B)
        if spec.residual:
            y = y + tokens.query

    def unflatten(xs: list[Tensor]) -> list[Tensor]:
        return [x.reshape(shape) for x, shape in zip(xs, shapes)]

    final = unflatten(W)
    return y, final, unflatten(S), final if ends_on_grid else unflatten(A)


def _run_piece(piece: Piece, tokens: Tokens, value: Tensor, W, S, A, spec: MemorySpec):
    c, gates = spec.window, tokens.gates
    tiled = gates.map(lambda x: to_tiles(x, piece))
    valid = None
    if tokens.valid is not None:
        valid = to_tiles(tokens.valid.unsqueeze(-1).expand(gates.lr.shape).to(value.dtype), piece)
    window = window_matrix(to_entries(tokens.gate, piece, c), tiled.lag, piece.stride, c)
    if spec.rule == "gd":
        coefficients = gd_coefficients(tiled.lr, tiled.momentum, tiled.retain, valid, window, tokens.mode.native)
    else:
        ones = torch.ones_like(tiled.lr) if valid is None else valid
        if spec.lr_position == "inside":
            window = tiled.lr * window if c == 1 else tiled.lr.unsqueeze(-1) * window
            tiled.lr = spec.step_size * ones
        coefficients = muon_coefficients(tiled.momentum, tiled.retain, ones, window, tokens.mode.native, spec.nesterov)
    q = None if tokens.lifted_query is None else to_tiles(tokens.lifted_query, piece)
    k = to_entries(tokens.lifted_key, piece, c)
    v = to_entries(value, piece, c)
    if tokens.mode.native and spec.rule == "muon":
        return muon_kernel()(spec, piece, q, k, v, coefficients, tiled.lr, W, S, A)
    if tokens.mode.native:
        return chain_kernel()(spec, piece, q, k, v, coefficients, W, S, A)
    return torch_engine.run(spec, piece, q, k, v, coefficients, tiled.lr, tiled.retain, W, S, A, tokens.mode.low)


def _tail(x: Tensor, n: int) -> Tensor:
    """The last n tokens, as a tensor of their own: a view would keep the whole sequence alive."""
    return x[:, x.shape[1] - n :].clone() if n else x[:, :0].clone()
