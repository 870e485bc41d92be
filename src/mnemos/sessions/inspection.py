"""The tokens of the last turn in the memories: surprise, learning rate and retention.

Shapes: T tokens of the turn, H heads.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from ..memory import NeuralMemory
from .session import Session

SERIES = ("surprise", "lr", "retain")


@torch.no_grad()
def inspect_turn(session: Session) -> tuple[list[int], dict[str, Tensor]]:
    """The token ids of the last turn, and the mean over layers and heads of "surprise", "lr" and "retain", each (T,).

    The turn is read again from the state before it, and the session stays as it is. A model without memories has no values.

    >>> from mnemos.data import open_tokenizer
    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("titans-mag", "nano", num_hidden_layers=2)).eval()
    >>> session = Session(model, open_tokenizer("bytes"))
    >>> session.tell("hello")
    >>> ids, values = inspect_turn(session)
    >>> len(ids), values["surprise"].shape
    (5, torch.Size([5]))
    """
    if session.last_turn is None:
        raise ValueError("there is no turn to inspect since the session was opened")
    cache, ids = session.last_turn
    calls: dict[nn.Module, list[dict[str, Tensor]]] = {}
    with contextlib.ExitStack() as stack:
        for module in session.model.modules():
            if isinstance(module, NeuralMemory):
                calls[module] = []
                handle = module.register_forward_pre_hook(_recorder(calls[module]), with_kwargs=True)
                stack.callback(handle.remove)
        session._read(cache, ids)
    T = len(ids)
    layers = [
        {name: torch.cat([call[name] for call in found])[-T:] for name in SERIES} for found in calls.values() if found
    ]
    if not layers:
        return ids, {}
    return ids, {name: torch.stack([layer[name] for layer in layers]).mean(0) for name in SERIES}


def _recorder(calls: list[dict[str, Tensor]]):
    busy = False

    def record(memory: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run the call of a memory once before itself, with a trace."""
        nonlocal busy
        if busy:
            return
        busy = True
        try:
            state = args[1] if len(args) > 1 else kwargs.get("state")
            *_, trace = memory(args[0], None if state is None else state.clone(), trace=True)
        finally:
            busy = False
        calls.append({name: getattr(trace, name)[0].float().mean(-1).cpu() for name in SERIES})

    return record
