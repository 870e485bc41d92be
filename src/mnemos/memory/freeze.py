"""Freezing of memories: no test-time learning."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator

import torch
from torch import nn

from .gating import Gating
from .spec import Gates


def has_memory(model: nn.Module) -> bool:
    """Whether a model has a `NeuralMemory`, that is, anything to freeze."""
    return isinstance(model, nn.Module) and any(isinstance(m, Gating) for m in model.modules())


@contextlib.contextmanager
def frozen_memory(model: nn.Module) -> Generator[None]:
    """Inside the block every memory stays at its initial weights W0: no writes (lr 0) and no forgetting (retain 1).

    The rest of the model is unchanged, attention and convolutions included: the difference is the effect of test-time learning.

    >>> from mnemos.memory import NeuralMemory
    >>> mem = NeuralMemory(dim=8, heads=1)
    >>> with frozen_memory(mem):
    ...     _, state = mem(torch.randn(1, 100, 8))
    >>> bool((state.weights[0] == mem.W0[0]).all())
    True
    """
    handles = [m.register_forward_hook(_nothing_new) for m in model.modules() if isinstance(m, Gating)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nothing_new(module: nn.Module, inputs: tuple, gates: Gates) -> Gates:
    kept = None if gates.retain is None else torch.ones_like(gates.retain)
    return dataclasses.replace(gates, lr=torch.zeros_like(gates.lr), retain=kept)
