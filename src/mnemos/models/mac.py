"""`mac`, memory as context: attention inside a segment, over the segment and tokens retrieved from the memory.

For every segment: read the memory with its weights W at the start of the segment, attend over [persistent ‖ long-term ‖ retrieved ‖
segment], write the output of attention to the memory and read it, and join both outputs by a gate.
Shapes: B batch, T time, D hidden size, H heads, K key dim, V value dim, P persistent and N long-term tokens, L segment length.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import MemoryState, NeuralMemory
from ..memory import read as read_memory
from ..nn import RowCache, SegmentAttention, SegmentCache
from ..nn.attention_segment import PrecomputedSegment
from ..nn.norm import RMSNorm, l2_normalize, rms_norm
from .cache_forms import CacheForm, conv_shapes, memory_form
from .gate import make_gate
from .mixer import Mixer, State, register_block

if TYPE_CHECKING:
    from .config import MnemosConfig

Part = tuple[Tensor, Tensor]  # outputs of attention and memory for some tokens, (B, T, D) each


@dataclass
class FrozenCache(RowCache):
    """weights: (B, M), the fast weights of the memory at the start of each row's segment, all maps flattened into one axis."""

    weights: Tensor


class Retrieval(nn.Module):
    """Reads a memory with fixed weights: queries (B, T, H, K) -> (B, T, D)."""

    def __init__(self, config: MnemosConfig, memory: NeuralMemory):
        super().__init__()
        D, spec, N = config.hidden_size, memory.spec, config.num_longterm_tokens
        self.heads, self.norms, self.eps = memory.heads, memory.config.qk_norm, memory.config.eps
        self.query = nn.Linear(D, memory.heads * spec.key_dim, bias=False)
        self.norm = RMSNorm(spec.value_dim, memory.config.eps)
        self.out = nn.Linear(memory.heads * spec.value_dim, D, bias=False)
        self.longterm = nn.Parameter(torch.empty(N, D)) if N else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.longterm is not None:
            nn.init.normal_(self.longterm)  # the scale of a norm's output

    def queries(self, x: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, H, K)."""
        q = F.silu(self.query(x)).unflatten(-1, (self.heads, -1))
        if self.norms == "l2":
            return l2_normalize(q, self.eps)
        return rms_norm(q, eps=self.eps) if self.norms == "rms" else q

    def forward(self, q: Tensor, state: MemoryState, features) -> Tensor:
        return self.out(self.norm(read_memory(q, state, state.spec, features)).flatten(2))


@register_block
class MACMixer(Mixer):
    """`mac`. The segments of a row count its own real tokens, so rows may be at different offsets of theirs."""

    name = "mac"
    description = "attention within a segment and over tokens retrieved from the memory"
    has_memory = True
    has_attention = True
    has_segments = True
    supports_kv_memory = False  # a segment reads a copy of the memory's weights
    without_memory = "swa"

    def __init__(self, config: MnemosConfig):
        super().__init__(config)
        self.length = config.segment_length
        self.attention = SegmentAttention(
            segment_len=config.segment_length, longterm=config.num_longterm_tokens, **config.attention_options
        )
        self.memory = NeuralMemory(config.memory_config)
        self.retrieval = Retrieval(config, self.memory)
        self.gate = make_gate(config)

    @classmethod
    def attention_span(cls, config: MnemosConfig) -> int | None:
        return config.segment_length

    @classmethod
    def cache_forms(cls, config: MnemosConfig) -> dict[str, CacheForm]:
        P, N, L = config.num_persistent_tokens, config.num_longterm_tokens, config.segment_length
        slots, memory = (P + N + 2 * L, *config.key_value_shape), config.memory_config
        numbers = memory.head_count * sum(math.prod(shape) for shape in memory.spec.shapes)
        return {
            "memory": memory_form(),
            "attention": CacheForm(
                SegmentCache,
                lambda rows, _: {"key": (rows, *slots), "value": (rows, *slots)} | conv_shapes(config, rows),
                {"segment_len": L, "persistent": P, "longterm": N},
            ),
            "frozen": CacheForm(FrozenCache, lambda rows, _: {"weights": (rows, numbers)}),
        }

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        states, parts = self._begin(x[:, :persistent], state)
        real, mask = x[:, persistent:], None if mask is None else mask[:, persistent:]
        offset = self._common_offset(states, mask)
        parts += self._unaligned(real, mask, states) if offset is None else self._aligned(real, offset, states)
        y, m = (torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts))
        return self.gate(y, m, x), states.state() if use_cache else None

    def _begin(self, persistent: Tensor, state: State | None) -> tuple[_CallStates, list[Part]]:
        """The states of the rows, and attention and memory of the persistent tokens, which come before every segment."""
        if state is not None:
            memory: MemoryState = state["memory"]
            flat = state["frozen"].weights
            return _CallStates(memory, state["attention"], _unflatten(flat, memory), flat), []
        B, P = persistent.shape[:2]
        states = _CallStates(self.memory.initial_state(B), None, None)
        if not P:
            return states, []
        y, states.attention = self.attention(persistent, torch.zeros_like(persistent), persistent=P)
        m, states.memory = self.memory(y, states.memory)
        return states, [(y, m)]

    def _common_offset(self, states: _CallStates, mask: Tensor | None) -> int | None:
        """The offset of all rows in their segments, if it is the same and all have the same number of tokens; else None."""
        if mask is not None:
            return None
        if states.frozen is None or states.attention is None:  # before the first real token
            return 0
        offsets = set(states.attention.position.remainder(self.length).tolist())
        return offsets.pop() if len(offsets) == 1 else None

    def _aligned(self, x: Tensor, offset: int, states: _CallStates) -> list[Part]:
        """All rows at the same offset of their segments: pieces are slices."""
        T, L = x.shape[1], self.length
        if T == 1:
            if offset == 0:
                states.freeze()
            return [self._piece(x, self.retrieval.queries(x), None, states)]
        first = min(T, L - offset)
        sizes = [first, *(min(L, T - start) for start in range(first, T, L))]
        tail = None if states.attention is None else states.attention.conv
        precomputed = self.attention.precompute(x, offset, sizes, tail)
        parts = []
        for piece, q, known in zip(x.split(sizes, 1), self.retrieval.queries(x).split(sizes, 1), precomputed):
            if offset == 0:
                states.freeze()
            parts.append(self._piece(piece, q, None, states, known))
            offset = 0
        return parts

    def _unaligned(self, x: Tensor, mask: Tensor | None, states: _CallStates) -> list[Part]:
        """Rows at different offsets: piece k has the tokens of every row's k-th segment in this call."""
        B, T, L = x.shape[0], x.shape[1], self.length
        count = torch.full((B,), T, device=x.device) if mask is None else mask.sum(1)
        offset = torch.zeros_like(count) if states.attention is None else states.attention.position % L
        row = torch.arange(B, device=x.device).unsqueeze(1)
        q = self.retrieval.queries(x)
        y, m = x.new_zeros(2, B, T + 1, x.shape[2])  # one more column, for invalid tokens
        for k in range(max(1, -(-int((offset + count).max()) // L))):
            begin = (k * L - offset).clamp(min=0)
            end = torch.minimum(count, (k + 1) * L - offset)
            width = max(1, int((end - begin).max()))
            column = begin.unsqueeze(1) + torch.arange(width, device=x.device)  # B width
            valid = column < end.unsqueeze(1)
            states.freeze(valid[:, 0] & (offset + begin).remainder(L).eq(0))
            source, target = (row, column.clamp(max=T - 1)), (row, column.where(valid, T))
            made = self._piece(x[source], q[source], None if bool(valid.all()) else valid, states)
            y, m = (whole.index_put(target, part.to(x.dtype)) for whole, part in zip((y, m), made))
        return [(y[:, :T], m[:, :T])]

    def _piece(
        self, x: Tensor, q: Tensor, mask: Tensor | None, states: _CallStates, known: PrecomputedSegment | None = None
    ) -> Part:
        """Tokens x (B, T, D) of one segment of every row and their queries q (B, T, H, K) -> the outputs of attention and memory."""
        assert states.frozen is not None
        frozen = dataclasses.replace(states.memory, weights=states.frozen, anchor=states.frozen)
        retrieved, longterm = q, None
        if self.retrieval.longterm is not None:
            asked = self.retrieval.queries(self.retrieval.longterm.to(x.dtype).unsqueeze(0))
            retrieved = torch.cat([asked.expand(x.shape[0], -1, -1, -1), q], 1)
        retrieved = self.retrieval(retrieved, frozen, self.memory.features)
        if self.retrieval.longterm is not None:
            longterm, retrieved = retrieved.split([len(self.retrieval.longterm), x.shape[1]], 1)
        y, states.attention = self.attention(x, retrieved, longterm, states.attention, mask, precomputed=known)
        m, states.memory = self.memory(y, states.memory, mask)
        return y, m


@dataclass
class _CallStates:
    """The states during a call. flat: `frozen` as the cache holds it, None if that has to be made."""

    memory: MemoryState
    attention: SegmentCache | None
    frozen: list[Tensor] | None
    flat: Tensor | None = None

    def freeze(self, rows: Tensor | None = None) -> None:
        """Copy the current weights of the memory, for these rows (B,) or for all."""
        if self.frozen is None or rows is None or bool(rows.all()):
            self.flat = None
            weights = self.memory.weights
            self.frozen = (
                [w.clone() for w in weights] if self.memory.inplace else weights
            )  # in-place writes would change them
        elif bool(rows.any()):
            self.flat = None
            pick = rows[:, None, None, None]
            self.frozen = [torch.where(pick, new, old) for new, old in zip(self.memory.weights, self.frozen)]

    def state(self) -> State:
        assert self.attention is not None and self.frozen is not None
        flat = torch.cat([w.flatten(1) for w in self.frozen], dim=1) if self.flat is None else self.flat
        return {
            "memory": self.memory,
            "attention": self.attention,
            "frozen": FrozenCache(self.attention.position, flat),
        }


def _unflatten(flat: Tensor, memory: MemoryState) -> list[Tensor]:
    shapes = [w.shape[1:] for w in memory.weights]
    return [part.unflatten(1, shape) for part, shape in zip(flat.split([math.prod(s) for s in shapes], 1), shapes)]
