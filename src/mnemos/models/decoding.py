"""One token at a time through compiled blocks: what `MnemosForCausalLM.compile_decoding` puts in the place of the loop over them.

A compiled function is a function of tensors; Python numbers it depends on are compiled in. So the one such number of a memory's
state, its place inside a chunk, is replaced by a stand-in before the call and restored after it: few graphs serve all places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..memory import MemoryState

States = list[dict[str, Any]]


class Decoder:
    """x (B, 1, D) and the states of all layers -> x after the last layer, and the states after it. Keeps no state itself."""

    def __init__(self, layers: nn.ModuleList, **options):
        def run(x: Tensor, states: States) -> tuple[Tensor, States]:
            new = []
            for block, state in zip(layers, states):
                x, state = block(x, state, None, 0, True)
                new.append(state)
            return x, new

        self.run: Callable[[Tensor, States], tuple[Tensor, States]] = torch.compile(run, dynamic=False, **options)

    def __call__(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        new_x, new = self.run(x, [{name: _enter(s) for name, s in layer.items()} for layer in states])
        pairs = [zip(before.items(), after.values()) for before, after in zip(states, new)]
        return new_x, [{name: _leave(old, s) for (name, old), s in layer} for layer in pairs]


def _enter(state):
    """The state as the graphs know it: at a stand-in for its place, and with an anchor of its own."""
    if not isinstance(state, MemoryState):
        return state
    state = dataclasses.replace(state, own=False)  # a graph writes into no memory
    if not _moved(state):
        return state
    spec, following = state.spec, state.chunk_offset + 1
    commits = spec.update_rule.commits and following % spec.commit == 0
    place = following if following == spec.chunk_size else spec.commit if commits else 1
    anchor = [a.clone() if a is w else a for a, w in zip(state.anchor, state.weights)]
    return dataclasses.replace(state, chunk_offset=place - 1, anchor=anchor)


def _leave(old, state):
    if not isinstance(state, MemoryState) or not _moved(old):
        return state
    chunk_offset = (old.chunk_offset + 1) % state.spec.chunk_size
    return dataclasses.replace(
        state, chunk_offset=chunk_offset, anchor=state.weights if chunk_offset == 0 else state.anchor
    )


def _moved(state: MemoryState) -> bool:
    """Whether a state has a place to be replaced. What grows (features "exp") keeps it: its place says which of its pairs are of the
    current chunk."""
    return state.chunk_offset is not None and state.spec.chunk_size > 1 and not state.spec.is_kv_cache
