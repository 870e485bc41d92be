"""Decoding of one token by compiled blocks, for `MnemosForCausalLM.compile_decoding`.

A compiled function takes tensors; a Python number that it depends on becomes a constant of the graph. The only such number in the state
of a memory is its offset in the chunk. It is replaced before the call by one of few offsets that give the same result, and restored after
it, so that few graphs serve all offsets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..memory import MemoryState

States = list[dict[str, Any]]


class CompiledDecoder:
    """x (B, 1, D) and the states of all layers -> x after the last layer, and the new states. It keeps no state itself."""

    def __init__(self, layers: nn.ModuleList, **options):
        def run(x: Tensor, states: States) -> tuple[Tensor, States]:
            new = []
            for block, state in zip(layers, states):
                x, state = block(x, state, None, 0, True)
                new.append(state)
            return x, new

        self.run: Callable[[Tensor, States], tuple[Tensor, States]] = torch.compile(run, dynamic=False, **options)

    def __call__(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        new_x, new = self.run(x, [{name: _for_graph(s) for name, s in layer.items()} for layer in states])
        pairs = [zip(before.items(), after.values()) for before, after in zip(states, new)]
        return new_x, [{name: _from_graph(old, s) for (name, old), s in layer} for layer in pairs]


def _for_graph(state):
    """The state at an equivalent offset in the chunk, with an anchor that is no alias of its weights."""
    if not isinstance(state, MemoryState):
        return state
    state = dataclasses.replace(state, own=False)  # a graph writes into no memory
    if not _is_moved(state):
        return state
    spec, following = state.spec, state.chunk_offset + 1
    commits = spec.commits and following % spec.commit == 0
    offset = following if following == spec.chunk_size else spec.commit if commits else 1
    anchor = [a.clone() if a is w else a for a, w in zip(state.anchor, state.weights)]
    return dataclasses.replace(state, chunk_offset=offset - 1, anchor=anchor)


def _from_graph(old, state):
    """The new state at the offset that follows that of the old one."""
    if not isinstance(state, MemoryState) or not _is_moved(old):
        return state
    chunk_offset = (old.chunk_offset + 1) % state.spec.chunk_size
    return dataclasses.replace(
        state, chunk_offset=chunk_offset, anchor=state.weights if chunk_offset == 0 else state.anchor
    )


def _is_moved(state: MemoryState) -> bool:
    """Whether the offset is replaced. A memory with a growing list of keys keeps it: it separates the pairs of the current chunk."""
    return state.chunk_offset is not None and state.spec.chunk_size > 1 and not state.spec.is_kv_cache
