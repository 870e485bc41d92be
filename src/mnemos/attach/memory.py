"""`AttachedMemory`: a memory beside one attention module, behind a gate that is zero before training.

Shapes: B, T as given; R rows of L tokens (models/row_layout.py); D width of the model, K key dim, H heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ..memory import MemoryState, NeuralMemory, NeuralMemoryConfig
from ..memory.scan import read, scan
from ..nn.norm import RMSNorm
from .call import KEYWORD, AttachedCall
from .control import Switches


class AttachedMemory(nn.Module):
    """gate · memory(norm(x)), added to the output of an attention module with the input x (B, T, D).

    The gate, one number per channel, is zero at the start. It has a gradient from the first step on; the memory, whose gradient the
    gate multiplies, has one from the second step on.

    >>> memory = AttachedMemory(NeuralMemoryConfig(dim=32, heads=2), index=0)
    >>> x = torch.randn(2, 5, 32)
    >>> bool(memory(x, AttachedCall(shape=(2, 5))).any())
    False
    """

    def __init__(self, config: NeuralMemoryConfig, index: int):
        super().__init__()
        self.index = index
        self.norm = RMSNorm(config.dim)  # models with norms behind attention hand it the stream itself
        self.memory = NeuralMemory(config)
        self.gate = nn.Parameter(torch.zeros(config.dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gate)

    def hook(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook of the attention module: adds the output of the memory, if the call is that of an attached model."""
        call = kwargs.get(KEYWORD)
        if call is None:
            return None
        y = self(attention_input(args, kwargs) if call.source is None else call.source, call)
        return output + y if isinstance(output, Tensor) else (output[0] + y, *output[1:])

    def forward(self, hidden: Tensor, call: AttachedCall) -> Tensor:
        """hidden (B, T, D) -> (B, T, D), 0 for skipped tokens. The state in the cache of the call advances."""
        call.reached.append(self.index)
        if call.cache is None and call.switches.scale == 0.0:
            return torch.zeros_like(hidden)  # no state to carry
        x = call.pack(hidden)  # R L D
        x = self.norm(x.to(self.gate.dtype))
        state = None if call.cache is None else call.cache.memory.get(self.index)
        y, state = run(self.memory, x, state, call.mask, call.switches)
        if call.cache is not None:
            state.inplace = not torch.is_grad_enabled()  # no other cache holds these tensors
            call.cache.memory[self.index] = state
        y = y * self.gate
        if call.switches.scale != 1.0:
            y = y * call.switches.scale
        return call.unpack(y).to(hidden.dtype)


def attention_input(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The hidden states (B, T, D) that an attention module is called with."""
    return args[0] if args else kwargs["hidden_states"]


def take_source(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the attention whose input all memories read: keeps it in the call of an attached model."""
    call = kwargs.get(KEYWORD)
    if call is not None:
        call.source = attention_input(args, kwargs)


def run(
    memory: NeuralMemory, x: Tensor, state: MemoryState | None, mask: Tensor | None, switches: Switches
) -> tuple[Tensor, MemoryState]:
    """Write x (R, L, D) and read it, as far as the switches allow: -> (R, L, D) and the state."""
    if switches.writes and not switches.swaps:
        y, state = memory(x, state, mask)
        return y, state
    x, state = memory.check(x, state, mask)
    if switches.swaps and x.shape[0] < 2:
        raise ValueError("knock_out('swap') exchanges memories between rows: give a batch of two rows or more")
    q, k, v, tail = memory.project(x, state, mask, None)
    opened = memory.read_gate(x, state, mask, None)
    turned = q.roll(1, 0) if switches.swaps else q  # row r is read with the queries of row r - 1
    if switches.writes:
        gates = memory.gates(x, state, mask, None)
        y, state = scan(turned, k, v, gates, state, memory.spec, memory.features, mask, None, memory.config.backend)
    else:
        y = read(turned, state, memory.spec, memory.features)
    y = y.roll(-1, 0) if switches.swaps else y
    y = memory._output(y if opened is None else y * opened.unsqueeze(-1), q, x)
    if mask is not None:
        y = y.masked_fill(~mask.unsqueeze(-1), 0.0)
    return y, dataclasses.replace(state, conv=tail)
