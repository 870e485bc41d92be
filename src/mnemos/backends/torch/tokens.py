"""A sequence as engines take it: types widened, window buffers in front, keys and queries lifted, lags folded; and its run, chunk by chunk.

B batch, T time, H heads, K key dim, V value dim, F lifted key dim, c window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...memory.kv_memory import Pairs
from ...memory.rules import Roles
from ...memory.spec import Gates, MemorySpec
from ...memory.state import MemoryState
from .chunking import ChunkRun, cut, from_tiles, to_tiles, to_window_tokens
from .coefficients import committed_coefficients, gd_coefficients, window_matrix, window_weights, windowed_coefficients
from .engine import Engine, RunInputs
from .kv_scan import ListEngine, Opened


@dataclass
class Tokens:
    """A sequence in the engine's terms. Keys, values and gates carry the c-1 tokens before the first."""

    query: Tensor | None  # B T H K, unlifted
    lifted_query: Tensor | None  # B T H F
    raw_key: Tensor  # B c-1+T H K, pair after pair as all keys and values
    raw_value: Tensor  # B c-1+T H V, with a threshold behind if the inner loss has one
    lifted_key: Tensor  # B c-1+T H F
    gate: Tensor  # B c-1+T H
    roles: Roles  # B T H; lag holds decay^j * lag, or None
    engine: Engine
    start: list[Tensor]  # B H d_in d_out each: the initial weights, [] where the retention does not keep them
    valid: Tensor | None = None  # B T, 1 or 0
    pairs: Opened | None = None  # with features "exp"

    def map(self, timed: Callable[[Tensor], Tensor], window: Callable[[Tensor], Tensor]) -> Tokens:
        """Functions of the tensors with an entry per token, and of those that have the c-1 tokens before the first too."""

        def optional(x: Tensor | None) -> Tensor | None:
            return None if x is None else timed(x)

        return dataclasses.replace(
            self,
            query=optional(self.query),
            lifted_query=optional(self.lifted_query),
            raw_key=window(self.raw_key),
            raw_value=window(self.raw_value),
            lifted_key=window(self.lifted_key),
            gate=window(self.gate),
            roles=self.roles.map(timed),
            valid=optional(self.valid),
        )

    def part(self, start: int, stop: int, c: int) -> Tokens:
        part = self.map(lambda x: x[:, start:stop], lambda x: x[:, start : stop + c - 1])
        if start and self.pairs is not None:
            place = self.pairs.place + start
            part.pairs = dataclasses.replace(self.pairs, place=place, seen=place + c - 1)
        return part

    def run_inputs(self, chunks: ChunkRun, value: Tensor, spec: MemorySpec) -> RunInputs:
        """The tokens of a run in tiles, with the coefficients of the rule. value: `raw_value`, as the network is trained on it."""
        c, roles, valid = spec.window, self.roles.map(lambda x: to_tiles(x, chunks)), None
        if self.valid is not None:
            valid = self.valid.unsqueeze(-1).expand(*self.valid.shape, self.gate.shape[2])
            valid = to_tiles(valid.to(self.gate.dtype), chunks)
        gate, products = to_window_tokens(self.gate, chunks, c), self.engine.decay_products
        if spec.windowed:
            coefficients = windowed_coefficients(roles, valid, window_weights(gate, roles, c), products)
        else:
            window = window_matrix(gate, roles.lag, chunks.stride, c)
            kept = roles.momentum, roles.retain
            if spec.commits:
                valid = window.new_ones(window.shape[:3]) if valid is None else valid
                if roles.strength is not None:
                    window = roles.strength * window if c == 1 else roles.strength.unsqueeze(-1) * window
                coefficients = committed_coefficients(*kept, valid, window, products, spec.nesterov)
            else:
                assert roles.strength is not None
                coefficients = gd_coefficients(roles.strength, *kept, valid, window, products)
        q = None if self.lifted_query is None else to_tiles(self.lifted_query, chunks)
        k, v = (to_window_tokens(x, chunks, c) for x in (self.lifted_key, value))
        return RunInputs(chunks, q, k, v, coefficients, roles.rate, roles.retain)


def prepare(q, k, v, gates: Gates, state: MemoryState, spec: MemorySpec, features, engine: Engine) -> Tokens:
    """Widen the types, prepend the window buffers, lift, and fold decay and lag into one weight per lag."""
    dtype = torch.promote_types(torch.promote_types(k.dtype, v.dtype), state.dtype)
    k, v = k.to(dtype), spec.loss_value(v.to(dtype), gates)
    gate = torch.ones_like(k[..., 0]) if gates.gate is None else gates.gate.to(dtype)
    if spec.window > 1:
        k = torch.cat([state.window_key.to(dtype), k], 1)
        v = torch.cat([state.window_value.to(dtype), v], 1)
        gate = torch.cat([state.window_gate.to(dtype), gate], 1)
    if q is not None:
        q = q.to(dtype)
    roles = spec.update_rule.roles(gates, spec).map(lambda x: x.to(dtype))
    return Tokens(
        query=q,
        lifted_query=q if q is None or features is None else features(q),
        raw_key=k,
        raw_value=v,
        lifted_key=spec.lift(features, k),
        gate=gate,
        roles=roles.replace(lag=gates.lag_weights(spec.window, dtype)),
        engine=engine,
        start=[w.to(dtype) for w in state.start],
    )


def open_pairs(tokens: Tokens, state: MemoryState, features) -> tuple[Tokens, list[list[Tensor]]]:
    """Tokens that know the list, and [weights, momentum, anchor] whose first map is it, (B, H, N, P), with room for them."""
    pairs = state.pairs
    if pairs is None:
        return tokens, [state.weights, state.momentum, state.anchor]
    keys, old = tokens.lifted_key, pairs.length
    opened = Opened(torch.cat([pairs.key.to(keys.dtype), keys], 1), old, old, getattr(features, "offset", None))

    def widened(share: Tensor) -> Tensor:
        return F.pad(share.to(keys.dtype), (0, 0, 0, 0, 0, keys.shape[1])).transpose(1, 2)

    weight = widened(pairs.weight)
    anchor = weight if pairs.anchor is pairs.weight else widened(pairs.anchor)
    momentum = [] if pairs.momentum is None else [widened(pairs.momentum)]
    maps = [[weight, *state.weights], [*momentum, *state.momentum], [anchor, *state.anchor]]
    return dataclasses.replace(tokens, pairs=opened), maps


def close_pairs(
    maps: list[list[Tensor]], tokens: Tokens, state: MemoryState, offset: Tensor | int, length: int
) -> tuple[list[list[Tensor]], Pairs | None]:
    """The maps that are matrices, and the list of a state, `length` long. offset: (B, 1), slots before each row's first token."""
    if tokens.pairs is None:
        return maps, None
    assert state.pairs is not None
    old, c = state.pairs.length, state.window_key.shape[1] + 1
    keys = tokens.pairs.key  # B N H K
    index = torch.arange(length, device=keys.device)
    slot = index - state.position.unsqueeze(-1) + offset + old + c - 1  # B length, where a pair of this call stands
    new = (slot >= old) & (slot < keys.shape[1])
    slot = slot.clamp(0, keys.shape[1] - 1)
    rows = torch.arange(len(keys), device=keys.device).unsqueeze(-1)

    def written(x: Tensor) -> Tensor:  # B N H D -> B length H D
        return x[rows, slot] * new.to(x.dtype)[..., None, None]

    def share(x: Tensor) -> Tensor:  # the c-1 tokens before the first stand in both lists
        x = x.transpose(1, 2)
        return F.pad(x[:, :old], (0, 0, 0, 0, 0, length - old)) + written(x)

    before = (index < state.position.unsqueeze(-1))[..., None, None]
    kept = F.pad(keys[:, :old], (0, 0, 0, 0, 0, length - old))
    W, S, A = maps
    weight = share(W[0])
    pairs = Pairs(
        key=torch.where(before, kept, written(keys)),
        weight=weight,
        momentum=share(S[0]) if S else None,
        anchor=weight if A[0] is W[0] else share(A[0]),
    )
    return [W[1:], S[1:], A[1:]], pairs


def run_grid(
    tokens: Tokens, tokens_to_boundary: int, W: list[Tensor], S: list[Tensor], A: list[Tensor], spec: MemorySpec
):
    """Tokens from a known place on the chunk grid: the first `tokens_to_boundary` of them at the anchor A. Returns y, W, S, A."""
    B, n = tokens.raw_key.shape[0], tokens.raw_key.shape[1] - (spec.window - 1)
    dtype, shapes = tokens.raw_key.dtype, [w.shape for w in W]
    W, S, A, W0 = ([x.to(dtype).flatten(0, 1) for x in xs] for xs in (W, S, A, tokens.start))
    runs = cut(n, tokens_to_boundary, spec, together=tokens.engine.joins_chunks)
    ends_on_grid = not spec.depends_on_chunking or (n - tokens_to_boundary) % spec.chunk_size == 0
    value = spec.target(tokens.raw_value, tokens.raw_key)
    engine = tokens.engine if tokens.pairs is None else ListEngine(tokens.pairs)
    outputs, W, S, A = _run(tokens, engine, runs, value, W, S, A, W0, spec, ends_on_grid)
    y = None
    if tokens.query is not None:
        y = torch.cat([from_tiles(x, B) for x in outputs], 1) if len(outputs) > 1 else from_tiles(outputs[0], B)
        y = y + tokens.query if spec.has_residual else y

    def unflatten(xs: list[Tensor]) -> list[Tensor]:
        return [x.reshape(*shape[:2], *x.shape[1:]) for x, shape in zip(xs, shapes)]

    final = unflatten(W)
    return y, final, unflatten(S), final if A is W else unflatten(A)


def _run(
    tokens: Tokens, engine: Engine, runs: list[ChunkRun], value, W, S, A, W0, spec: MemorySpec, ends_on_grid: bool
):
    """The runs of a memory with maps (G, d_in, d_out): y of each run, and W, S and A at the end."""
    state, start = engine.open(spec, W, S), None
    if W0:
        start = engine.open(spec, W0, []) if tokens.pairs is None else W0
    anchor = None if runs[0].fresh else engine.open(spec, A, [])
    outputs, moved = [], False
    for chunks in runs:
        if chunks.fresh:
            anchor, moved = state, True
        given = tokens.run_inputs(chunks, value, spec)
        y, state = engine.run(
            spec, given, state, anchor, None if given.retain is None else start
        )  # else nothing decays
        outputs.append(y)
    W, S = engine.close(spec, state)
    if ends_on_grid:
        A = W
    elif moved:
        A = engine.close(spec, anchor)[0]
    return outputs, W, S, A
