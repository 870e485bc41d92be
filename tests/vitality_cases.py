"""Presets with a finite memory, as the tests of vitality try them: which must stay alive, and which are known not to."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mnemos.memory import MemoryState, NeuralMemory, NeuralMemoryConfig
from mnemos.memory.retention import RETENTIONS
from mnemos.models import presets

DIM, HEADS = 64, 2
LEAST = 0.8  # of what a chunk teaches a fresh memory
FADES = "its weights are a function of an accumulator that fades to 0, whatever they began with"
MUON = "Muon's first step, of unit size, changes a memory near zero more than later ones"
RESIDUAL = "nothing is forgotten, and the residual makes the inner loss of a fresh memory three times as large"
INTERVAL = {"atlas-interval": MUON}
# Presets that learn less than that, and why: as a layer on noise, and as models on text.
FADING = {"moneta": FADES, "memora": FADES}
DYING_LAYERS = FADING | {"ttt-mlp": RESIDUAL} | INTERVAL
DYING_UNTRAINED = FADING | INTERVAL
DYING_TRAINED = FADING | {
    "ttt-mlp": RESIDUAL,
    "dla": "its Hebbian writes are not bounded: the weights diverge",
}


def forgets_to_zero(config: NeuralMemoryConfig) -> bool:
    """Whether a memory is a network that forgets towards 0, which kills it."""
    return config.retention == "zero" and bool(config.retain) and not config.spec.network.is_matrix


def living(config: NeuralMemoryConfig) -> NeuralMemoryConfig:
    """The memory with retention "start" in place of one that kills it, if there is that."""
    kills = forgets_to_zero(config) and "start" in RETENTIONS
    return dataclasses.replace(config, retention="start") if kills else config


def finite_memories() -> dict[str, NeuralMemoryConfig]:
    """The memory of each preset whose state has a fixed size."""
    found = {}
    for name in presets.names():
        memory = presets.PRESETS[name].memory
        if memory is not None:
            config = NeuralMemoryConfig(DIM, **{"heads": HEADS} | memory)
            if not config.spec.is_kv_cache:
                found[name] = living(config)
    return found


def marks(name: str, config: NeuralMemoryConfig, dying: dict[str, str], strict: bool) -> list[pytest.MarkDecorator]:
    """strict: a preset that is known to die, and does not, fails its test."""
    if forgets_to_zero(config):
        return [pytest.mark.skip(reason='a network that forgets towards 0 dies; retention "start" is not registered')]
    return [pytest.mark.xfail(reason=dying[name], strict=strict or name in FADING)] if name in dying else []


def each_preset(dying: dict[str, str]):
    """pytest parameters: name and memory of every preset with a finite one. The text and the training decide what is near the border."""
    named = finite_memories().items()
    return [pytest.param(name, config, marks=marks(name, config, dying, False), id=name) for name, config in named]


def each_memory():
    """pytest parameters: every distinct memory of these presets, once."""
    first = {config: name for name, config in reversed(finite_memories().items())}
    return [pytest.param(c, marks=marks(name, c, DYING_LAYERS, True), id=name) for c, name in first.items()]


@torch.no_grad()
def streamed(layer: NeuralMemory, tokens: int, batch: int = 1, piece: int = 2000) -> MemoryState:
    """The state after `tokens` tokens of noise."""
    generator = torch.Generator().manual_seed(1)
    state = layer.initial_state(batch)
    for start in range(0, tokens, piece):
        x = torch.randn(batch, min(piece, tokens - start), layer.config.dim, generator=generator)
        state = layer.write(x, state)
    return state
