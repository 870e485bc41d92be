"""`RingLayer`: keys and values of the last tokens and of the first ones, in a cache layer of constant size.

Shapes: R rows, H key-value heads, L new tokens, D head dim, W window, S sinks.
Token p of a row is in slot S + p % W, and, if p < S, also in slot p.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .call import AttachedCall


class RingLayer(DynamicLayer):
    """The keys and values of one attention layer, (R, H, S + W, D) each. Rows may be at different positions."""

    keys: Any
    values: Any
    is_sliding = True
    is_croppable = False

    def __init__(self, window: int, sinks: int):
        super().__init__()
        self.window, self.sinks = window, sinks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        R, H, _, _ = key_states.shape
        slots = self.sinks + self.window
        self.keys = key_states.new_zeros(R, H, slots, key_states.shape[3])
        self.values = value_states.new_zeros(R, H, slots, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, call: AttachedCall) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, H, T, D). Returns those that attention needs.

        One token without gradients: the slots, (R, H, S + W, D). Otherwise the sinks, the W tokens before the new ones in their
        order, and the new ones: (R, H, S + W + L, D).
        """
        key, value = call.pack_heads(key_states), call.pack_heads(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        if is_single(call):
            rows, slots = call.plan(("slots", self.window, self.sinks), self._slots, call)
            for stored, new in ((self.keys, key), (self.values, value)):
                stored[rows, :, slots] = new.transpose(1, 2).expand(-1, slots.shape[1], -1, -1)
            return self.keys, self.values
        plan = call.plan(("ring", self.window, self.sinks), self._plan, call)
        self.keys, keys = self._advance(self.keys, key, *plan)
        self.values, values = self._advance(self.values, value, *plan)
        return keys, values

    def _slots(self, call: AttachedCall) -> tuple[Tensor, Tensor]:
        """(R, 1) rows and (R, 1 or 2) slots of one new token; a sink is stored twice, any other token twice in one slot."""
        position = call.start
        assert position is not None
        rows = torch.arange(len(position), device=position.device).unsqueeze(1)
        ring = self.sinks + position % self.window
        return rows, torch.stack([ring, torch.where(position < self.sinks, position, ring)], dim=1)

    def _plan(self, call: AttachedCall) -> tuple[Tensor, ...]:
        """Slots of the past tokens in their order; which slots are replaced; by which new token each is: (R, W), (R, S + W) twice."""
        W, S, (R, L) = self.window, self.sinks, call.rows
        start, device = call.start, self.device
        assert start is not None
        start, end = start.unsqueeze(1), call.ends(device).expand(R).unsqueeze(1)
        ring = torch.arange(W, device=device)
        past = S + (start - W + ring) % W
        latest = end - 1 - (end - 1 - ring) % W  # the last position in each slot, negative if there is none
        sink = torch.arange(S, device=device).expand(R, S)
        position = torch.cat([sink.where(sink < end, -1), latest], dim=1)  # R S+W
        return past, position >= start, (position - start).clamp(0, L - 1)

    def _advance(self, stored: Tensor, new: Tensor, past: Tensor, replaced: Tensor, source: Tensor):
        before = _take(stored, past)
        stored = torch.where(replaced[:, None, :, None], _take(new, source), stored)
        return stored, torch.cat([stored[:, :, : self.sinks], before, new], dim=2)


def is_single(call: AttachedCall) -> bool:
    """Whether a call is one token per row, which is written in place."""
    return call.layout is None and call.shape[1] == 1 and not torch.is_grad_enabled()


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x (R, H, N, D), index (R, M) -> (R, H, M, D)."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
