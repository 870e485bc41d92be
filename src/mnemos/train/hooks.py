"""Forward hooks and switches for a live model: record its gates, turn its memory off, compile its blocks, change its chunk size.

Shapes: B batch, T time, D hidden size, H heads.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch
from torch import Tensor, nn

from ..memory import NeuralMemory
from ..models import MnemosForCausalLM
from ..models.gate import TokenGate
from ..models.mac import Retrieval

if TYPE_CHECKING:
    from ..attach import AttachedForCausalLM

AnyModel: TypeAlias = Union[MnemosForCausalLM, "AttachedForCausalLM"]


def memories(model: AnyModel) -> dict[int, nn.Module]:
    """Memory modules by layer index."""
    return model.memory_modules()


def gates(model: AnyModel) -> dict[int, TokenGate]:
    """Gates between attention and memory that have one value per token, by layer index."""
    return {
        i: module
        for i, block in enumerate(model.decoder_layers())
        for module in block.modules()
        if isinstance(module, TokenGate)
    }


class GateWatch:
    """Records the gates of the last forward pass, with their graph: layer -> (B, T, H) in [0, 1]."""

    def __init__(self, model: AnyModel):
        self.values: dict[int, Tensor] = {}
        self._handles = [gate.linear.register_forward_hook(self._keep(i, gate)) for i, gate in gates(model).items()]

    def _keep(self, layer: int, gate: TokenGate):
        def hook(module, inputs, output):
            self.values[layer] = gate.opening(output)

        return hook

    def clear(self) -> None:
        self.values = {}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class MemoryDropout:
    """In training, sets each layer's memory output to 0 in a random fraction `share` of the batch rows.

    Outputs are not rescaled. With gate_mode "product" a memory that is off turns the whole block off; use "convex" or "additive".
    """

    def __init__(self, model: AnyModel, share: float):
        for memory in memories(model).values() if share else ():
            memory.register_forward_hook(self._hook)
        self.share = share

    def _hook(self, module: nn.Module, inputs, output):
        if not module.training:
            return output
        y = output[0]
        keep = torch.rand(y.shape[0], 1, 1, device=y.device) >= self.share
        return (y * keep, *output[1:])


@contextlib.contextmanager
def memory_off(model: AnyModel) -> Generator[None]:
    """Memory off: inside the block, the output of every memory is 0, and so is the context that MAC retrieves from it."""
    handles = [
        memory.register_forward_hook(lambda module, inputs, output: (torch.zeros_like(output[0]), *output[1:]))
        for memory in memories(model).values()
    ]
    handles += [
        module.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
        for module in model.modules()
        if isinstance(module, Retrieval)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def compile_blocks(model: AnyModel) -> None:
    """torch.compile for every block, except its memory, which runs eagerly.

    Tracing unrolls a memory chunk by chunk: compiling takes minutes, and the CPU kernel is lost.
    """
    for memory in memories(model).values():
        memory.forward = torch.compiler.disable(memory.forward)
    for block in model.decoder_layers():
        block.compile()


def set_chunk_size(model: AnyModel, size: int) -> None:
    """Change the memory's chunk size on a live model and in its config, so that a saved model matches the trained one.

    The upper bound of the inner learning rate, the initial momentum and the scale of the initial weights, whose defaults depend on the chunk size, keep their values.
    States from before cannot be used afterwards. With rule "muon" the memory commits once per chunk unless `commit_every` is set.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("titans-mag", "nano", num_hidden_layers=1))
    >>> set_chunk_size(model, 8)
    >>> model.config.memory_config.chunk_size, model.model.layers[0].mixer.memory.spec.chunk_size
    (8, 8)
    """
    config = model.config
    if not config.has_memory:
        return
    old = config.memory_config
    if old.chunk_size == size:
        return
    commit = old.commit_every
    if commit is not None and size % commit:
        commit = next(c for c in range(min(commit, size), 0, -1) if size % c == 0)
    changed: dict[str, Any] = {"chunk_size": size, "commit_every": commit, "momentum_init": old.initial_momentum}
    changed |= {"max_lr": old.effective_max_lr, "w0_scale": old.effective_w0_scale}
    config.change_memory(changed)
    new = dataclasses.replace(old, **changed)
    for memory in memories(model).values():
        if isinstance(memory, NeuralMemory):
            memory.config, memory.spec, memory.gating.config = new, new.spec, new
