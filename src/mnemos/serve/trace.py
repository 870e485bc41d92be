"""What the memories did with the tokens of a turn: surprise, gates, and the earlier tokens that each read resembles.

The turn is read again from the state before it, in pieces of a job, so that others are not delayed.
Shapes: T tokens of the turn, H heads.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from ..memory import NeuralMemory
from ..report.attention_map import Writes, resemblance
from ..sessions.reading import read_tokens

SERIES = ("surprise", "lr", "retain")
GATES = ("momentum", "gate")
MAX_RESEMBLED = 512  # tokens: the work grows with their square
RESEMBLED = 3


class TurnTrace:
    """Reads the tokens of a turn again. model: with memories. length: tokens of the turn.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("titans-mag", "nano", num_hidden_layers=2)).eval()
    >>> trace = TurnTrace(model, 5)
    >>> _ = trace.read(torch.tensor([list(b"hello")]), None, False)
    >>> len(trace.series()["surprise"]), [near["index"] for near in trace.resembled()[1]]
    (5, [0])
    """

    def __init__(self, model: Any, length: int):
        self.model, self.length = model, length
        self.is_busy = False
        self.calls: dict[NeuralMemory, list[dict[str, Tensor | None]]] = {}

    def read(self, ids: Tensor, cache: Any, is_own: bool) -> tuple[Tensor, Any]:
        """Read the next piece (1, n), as `read_tokens` does."""
        with contextlib.ExitStack() as stack:
            for module in self.model.modules():
                if isinstance(module, NeuralMemory):
                    handle = module.register_forward_pre_hook(self._record, with_kwargs=True)
                    stack.callback(handle.remove)
            return read_tokens(self.model, cache, ids, is_own)

    @torch.no_grad()
    def _record(self, memory: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run the call of a memory once before itself, with a trace."""
        if self.is_busy or not isinstance(memory, NeuralMemory):
            return
        self.is_busy = True
        try:
            x = args[0]
            state = args[1] if len(args) > 1 else kwargs.get("state")
            state = memory.initial_state(x.shape[0]) if state is None else state.clone()
            found: dict[str, Tensor | None] = {}
            if self.length <= MAX_RESEMBLED:
                q, k, _, _ = memory.project(x, state, None, None)
                lag = memory.gates(x, state, None, None).lag_weights(memory.spec.window, torch.float32)
                found = {"q": q[0], "k": k[0], "lag": None if lag is None else lag[0].cpu()}
            *_, trace = memory(x, state, trace=True)
            found |= {name: getattr(trace, name)[0].float().cpu() for name in (*SERIES, *GATES)}
        finally:
            self.is_busy = False
        self.calls.setdefault(memory, []).append(found)

    def _whole(self, calls: list[dict[str, Tensor | None]], name: str) -> Tensor | None:
        """The values of the turn's tokens, without those of persistent tokens before them."""
        parts = [x for x in (call.get(name) for call in calls) if x is not None]
        return torch.cat(parts)[-self.length :] if parts else None

    def series(self) -> dict[str, list[float]]:
        """Mean over layers and heads of surprise, lr and retain, T numbers each; no names for a model without memories."""
        found: dict[str, list[float]] = {}
        for name in SERIES:
            layers = [x for x in (self._whole(calls, name) for calls in self.calls.values()) if x is not None]
            if layers:
                mean = torch.stack([x.mean(-1) for x in layers]).mean(0)
                found[name] = torch.nan_to_num(mean, nan=0.0, posinf=1e30, neginf=-1e30).tolist()
        return found

    @torch.no_grad()
    def resembled(self) -> list[list[dict[str, Any]]] | None:
        """For each token, up to three earlier tokens of the turn that its reads resemble most; their weights sum to at most 1 over all
        layers. None if the turn is too long."""
        if not self.calls or self.length > MAX_RESEMBLED:
            return None
        T = self.length
        total = torch.zeros(T, T)
        for memory, calls in self.calls.items():
            q, k, lag = (self._whole(calls, name) for name in ("q", "k", "lag"))
            lr, momentum, retain, gate = (self._whole(calls, name) for name in ("lr", "momentum", "retain", "gate"))
            if q is None or k is None or lr is None or momentum is None or retain is None or gate is None:
                return None
            spec, features = memory.spec, memory.features
            q, k = q if features is None else features(q), torch.stack(spec.pairs(spec.lift(features, k))).sum(0)
            offset = getattr(features, "offset", None)
            offset = None if offset is None else offset.float().cpu()
            writes = Writes(lr, momentum, retain, gate, lag)
            near = resemblance(q.float().cpu(), k.float().cpu(), writes, spec, offset, RESEMBLED)
            weight = torch.nan_to_num(near.weight[0].abs())
            weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-30) / len(self.calls)
            kept = torch.where(near.token[0] >= 0, weight, 0.0)
            total.scatter_add_(1, near.token[0].clamp(min=0), kept)
        best, index = total.topk(min(RESEMBLED, T), -1)
        return [
            [{"index": i, "weight": round(w, 4)} for i, w in zip(row, weights) if w > 0]
            for row, weights in zip(index.tolist(), best.tolist())
        ]
