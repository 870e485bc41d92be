"""`mac`, memory as context: attention inside a segment, over what the memory held for it when the segment began.

For every segment: retrieve with the weights W the memory had at its start, attend over [persistent ‖ long-term ‖ retrieved ‖
segment], write what attention made of it into the memory and read it there, and join both by a gate.
Shapes: B batch, T time, D hidden size, H heads, K key dim, V value dim, P persistent and N long-term tokens, L segment length.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import MemoryState, NeuralMemory
from ..memory import read as read_memory
from ..memory.norm import RMSNorm, l2_normalize, rms_norm
from ..nn import RowCache, SegmentAttention, SegmentCache
from .config import MnemosConfig
from .gate import Gate, State, attention_choices


@dataclass
class FrozenCache(RowCache):
    """weights: (B, M), the memory's fast weights at the start of each row's segment, all maps in one row."""

    weights: Tensor


class Retrieval(nn.Module):
    """Looks tokens up in weights that stand still: x (B, T, D) -> (B, T, D)."""

    def __init__(self, config: MnemosConfig, memory: NeuralMemory):
        super().__init__()
        D, spec, N = config.hidden_size, memory.spec, config.num_longterm_tokens
        self.heads, self.norms, self.eps = memory.heads, memory.config.qk_norm, memory.config.eps
        self.query = nn.Linear(D, memory.heads * spec.key_dim, bias=False)
        self.norm = RMSNorm(spec.value_dim, memory.config.eps)
        self.out = nn.Linear(memory.heads * spec.value_dim, D, bias=False)
        self.longterm = nn.Parameter(torch.empty(N, D)) if N else None
        self.reset_start()

    @torch.no_grad()
    def reset_start(self) -> None:
        if self.longterm is not None:
            nn.init.normal_(self.longterm)  # as large as what a norm gives

    def forward(self, x: Tensor, state: MemoryState, features) -> Tensor:
        q = F.silu(self.query(x)).unflatten(-1, (self.heads, -1))  # B T H K
        if self.norms == "l2":
            q = l2_normalize(q, self.eps)
        elif self.norms == "rms":
            q = rms_norm(q, eps=self.eps)
        return self.out(self.norm(read_memory(q, state, state.spec, features)).flatten(2))


class ContextMixer(nn.Module):
    """`mac`. A row's segments are counted in its own real tokens, so rows may stand at different places of theirs."""

    def __init__(self, config: MnemosConfig):
        super().__init__()
        self.length = config.segment_length
        self.attention = SegmentAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.segment_length,
            longterm=config.num_longterm_tokens,
            **attention_choices(config),
        )
        self.memory = NeuralMemory(config.memory_config)
        self.retrieval = Retrieval(config, self.memory)
        self.gate = Gate(config)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        now, before = self._begin(x, state, persistent)
        x, mask = x[:, persistent:], None if mask is None else mask[:, persistent:]
        if state is None and mask is None:
            offset = 0
        else:
            offsets = set(now.attention.position.remainder(self.length).tolist()) if now.attention is not None else {0}
            offset = offsets.pop() if len(offsets) == 1 and mask is None else None
        y = self._ragged(x, mask, now) if offset is None else self._aligned(x, offset, now)
        y = y if before is None else torch.cat([before, y], 1)
        return y, now.state() if use_cache else None

    def _begin(self, x: Tensor, state: State | None, P: int) -> tuple[_Now, Tensor | None]:
        """Where the rows stand, and what the block adds to the persistent tokens, which come before every segment."""
        if state is not None:
            memory: MemoryState = state["memory"]
            return _Now(memory, state["attention"], _unflatten(state["frozen"].weights, memory)), None
        now = _Now(self.memory.initial_state(x.shape[0]), None, None)
        if not P:
            return now, None
        x = x[:, :P]
        y, now.attention = self.attention(x, torch.zeros_like(x), persistent=P)
        m, now.memory = self.memory(y, now.memory)
        return now, self.gate(y, m, x)

    def _aligned(self, x: Tensor, offset: int, now: _Now) -> Tensor:
        """All rows at the same place of their segments: pieces are slices."""
        parts, start = [], 0
        while start < x.shape[1]:
            end = min(x.shape[1], start + self.length - offset)
            if offset == 0:
                now.frozen = now.memory.weights
            parts.append(self._piece(x[:, start:end], None, now))
            start, offset = end, 0
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def _ragged(self, x: Tensor, mask: Tensor | None, now: _Now) -> Tensor:
        """Piece k holds, of every row, the tokens of its k-th segment in this call."""
        B, T, L = x.shape[0], x.shape[1], self.length
        count = torch.full((B,), T, device=x.device) if mask is None else mask.sum(1)
        offset = torch.zeros_like(count) if now.attention is None else now.attention.position % L
        row = torch.arange(B, device=x.device).unsqueeze(1)
        y = x.new_zeros(B, T + 1, x.shape[2])  # one more column, for what is not valid
        for k in range(max(1, -(-int((offset + count).max()) // L))):
            begin = (k * L - offset).clamp(min=0)
            end = torch.minimum(count, (k + 1) * L - offset)
            width = max(1, int((end - begin).max()))
            column = begin.unsqueeze(1) + torch.arange(width, device=x.device)  # B width
            valid = column < end.unsqueeze(1)
            fresh = valid[:, 0] & (offset + begin).remainder(L).eq(0)
            now.freeze(fresh)
            piece = x[row, column.clamp(max=T - 1)]
            whole = bool(valid.all())
            y = y.index_put(
                (row, column.where(valid, T)), self._piece(piece, None if whole else valid, now).to(y.dtype)
            )
        return y[:, :T]

    def _piece(self, x: Tensor, mask: Tensor | None, now: _Now) -> Tensor:
        """Tokens (B, T, D) of one segment of every row."""
        assert now.frozen is not None
        frozen = dataclasses.replace(now.memory, weights=now.frozen, anchor=now.frozen)
        longterm = None
        if self.retrieval.longterm is not None:
            queries = self.retrieval.longterm.to(x.dtype).expand(x.shape[0], -1, -1)
            longterm = self.retrieval(queries, frozen, self.memory.features)
        retrieved = self.retrieval(x, frozen, self.memory.features)
        y, now.attention = self.attention(x, retrieved, longterm, now.attention, mask)
        m, now.memory = self.memory(y, now.memory, mask)
        return self.gate(y, m, x)


@dataclass
class _Now:
    """The states while a call goes on."""

    memory: MemoryState
    attention: SegmentCache | None
    frozen: list[Tensor] | None

    def freeze(self, rows: Tensor) -> None:
        """Take over the memory's weights for these rows (B,)."""
        if self.frozen is None or bool(rows.all()):
            self.frozen = self.memory.weights
        elif bool(rows.any()):
            pick = rows[:, None, None, None]
            self.frozen = [torch.where(pick, new, old) for new, old in zip(self.memory.weights, self.frozen)]

    def state(self) -> State:
        assert self.attention is not None and self.frozen is not None
        flat = torch.cat([w.flatten(1) for w in self.frozen], dim=1)
        return {
            "memory": self.memory,
            "attention": self.attention,
            "frozen": FrozenCache(self.attention.position, flat),
        }


def _unflatten(flat: Tensor, memory: MemoryState) -> list[Tensor]:
    shapes = [w.shape[1:] for w in memory.weights]
    return [part.unflatten(1, shape) for part, shape in zip(flat.split([math.prod(s) for s in shapes], 1), shapes)]
