"""One forward pass over a text with hooks: the values of each layer's memory and gate at every token.

Shapes: T tokens of the text, P persistent tokens before them, H heads, N moments, D hidden size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..attach import AttachedForCausalLM
from ..attach.architectures import attention_modules
from ..memory import MemoryState, NeuralMemory, measure_vitality
from ..memory.scan import Trace
from ..models import MnemosForCausalLM
from ..models.gate import TokenGate
from ..models.memory_mixers import MALMixer
from ..train.hooks import AnyModel
from .attention_map import Resemblance, Writes, resemblance
from .spectrum import Spectrum, look, over_time

MOMENTS = 64  # largest number of times the weights are examined
SINGULAR_VALUES = 8
RESEMBLED = 5
GATE_SERIES = ("surprise", "gradient_norm", "momentum_norm", "lr", "retain", "momentum", "gate")


@dataclass
class LayerTrace:
    """The record of one layer. values: name -> (T, heads), for those names in `GATE_SERIES` and "route", "share" that the layer has.

    route: weight of the memory in the gate (convex: 1 - g, additive: g). share: norm of the memory's output as a fraction of the norms of
    both parts. moments: (N,) tokens read when the weights were examined; the first is W0. reads: tokens -1..-P are persistent, -P-1 is none.
    commit: interval in tokens at which rule "muon" writes; else 0. vitality: of the memory after the text, see
    `mnemos.memory.measure_vitality`.
    """

    index: int
    kind: str
    rule: str = ""
    values: dict[str, Tensor] = field(default_factory=dict)
    moments: list[int] = field(default_factory=list)
    spectra: list[Spectrum] = field(default_factory=list)
    reads: Resemblance | None = None
    commit: int = 0
    vitality: dict[str, float] = field(default_factory=dict)


class _Watch:
    """Records the calls of one layer's memory; a `mac` calls it once per segment.

    Weights are examined every `stride` tokens and at the end, and not kept: those of a large model would not fit into memory.
    """

    def __init__(self, memory: NeuralMemory, stride: int):
        self.memory, self.stride, self.busy = memory, stride, False
        self.traces: list[Trace] = []
        self.inputs, self.queries, self.keys, self.lags = [], [], [], []
        self.first: MemoryState | None = None
        self.start: list[Tensor] = []
        self.positions: list[int] = []
        self.looks: list[list[dict[str, Tensor]]] = []
        self.last: tuple[MemoryState, Tensor] | None = None  # state at the end of a call between two examinations

    def hook(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self.busy:  # our own call of the memory
            return
        self.busy = True
        try:
            self._follow(args[0], args[1] if len(args) > 1 else None)
        finally:
            self.busy = False

    def _follow(self, x: Tensor, state: MemoryState | None) -> None:
        memory = self.memory
        state = memory.initial_state(x.shape[0]) if state is None else state
        if not self.looks:
            self.first = state
            self.start = [w[0].cpu() for w in state.weights]
            self._look(state, torch.zeros(memory.heads, 1))
        q, k, _, _ = memory.project(x, state, None, None)
        lag = memory.gates(x, state, None, None).lag_weights(memory.spec.window, torch.float32)
        self.inputs.append(x)
        self.queries.append(q[0])
        self.keys.append(k[0])
        self.lags.append(None if lag is None else lag[0].cpu())
        begin = here = int(state.position[0])
        end = here + x.shape[1]
        for stop in [*range((here // self.stride + 1) * self.stride, end, self.stride), end]:
            _, state, trace = memory(x[:, here - begin : stop - begin], state, trace=True)
            self.traces.append(trace)
            norms, here = trace.weight_norms[0, -1].cpu(), stop
            if stop % self.stride == 0:
                self._look(state, norms)
                self.last = None
            else:
                self.last = state, norms

    def _look(self, state: MemoryState, norms: Tensor) -> None:
        """norms: (H, maps), available for a list of pairs too, which has no other measure."""
        maps = [look(w[0].cpu(), start, SINGULAR_VALUES) for w, start in zip(state.weights, self.start)]
        listed = [{"norm": norms[:, 0]}] if self.memory.spec.is_kv_cache else []
        self.positions.append(int(state.position[0]))
        self.looks.append(listed + maps)

    def fill(self, layer: LayerTrace, persistent: int) -> None:
        """Write the record to `layer`, without the persistent tokens."""
        spec, features = self.memory.spec, self.memory.features
        layer.rule, layer.commit = spec.rule, spec.commit if spec.commits else 0
        whole = {name: torch.cat([getattr(t, name)[0] for t in self.traces]).float().cpu() for name in GATE_SERIES}
        layer.values |= {name: x[persistent:] for name, x in whole.items()}
        lag = None if self.lags[0] is None else torch.cat(self.lags)
        writes = Writes(whole["lr"], whole["momentum"], whole["retain"], whole["gate"], lag)
        q, k = (torch.cat(x) for x in (self.queries, self.keys))
        q, k = q if features is None else features(q), torch.stack(spec.pairs(spec.lift(features, k))).sum(0)
        offset = getattr(features, "offset", None)
        offset = None if offset is None else offset.float().cpu()
        found = resemblance(q.float().cpu(), k.float().cpu(), writes, spec, offset, RESEMBLED)
        token = torch.where(found.token >= 0, found.token - persistent, -persistent - 1)  # -1..-P: persistent tokens
        layer.reads = Resemblance(token[:, persistent:], found.weight[:, persistent:], found.own[:, persistent:])
        if self.last is not None:
            self._look(*self.last)
        x = torch.cat(self.inputs, 1)
        layer.vitality = measure_vitality(self.memory, x, self.memory.write(x, self.first))
        kept = [i for i, at in enumerate(self.positions) if i == 0 or at > persistent]
        layer.moments = [max(0, self.positions[i] - persistent) for i in kept]
        shapes = [None] * spec.is_kv_cache + list(spec.shapes)
        for number, (name, shape) in enumerate(zip(_map_names(len(shapes)), shapes)):
            name = name if shape is not None else f"{name} (a list of pairs)"
            layer.spectra.append(over_time(name, shape, [self.looks[i][number] for i in kept]))


def _map_names(maps: int) -> list[str]:
    return ["the map"] if maps == 1 else [f"map {i + 1} of {maps}" for i in range(maps)]


@torch.no_grad()
def watch(model: AnyModel, ids: Tensor) -> tuple[Tensor, list[LayerTrace]]:
    """Run a model over ids (1, T). Returns the logits (T, V) and the record of every layer; of an attached model, of those with a memory."""
    P, T = model.config.num_persistent_tokens, ids.shape[1]
    watches: list[tuple[_Watch, LayerTrace]] = []
    with contextlib.ExitStack() as stack:
        layers = _parts(model, P, stack)
        for layer, memory in layers:
            if isinstance(memory, NeuralMemory):
                chunk = memory.spec.chunk_size
                seen = _Watch(memory, chunk * -(-(T + P) // (chunk * MOMENTS)))
                watches.append((seen, layer))
                stack.enter_context(_hooked(memory, seen.hook))
        logits = model(ids, use_cache=False).logits[0].float()
    for seen, layer in watches:
        seen.fill(layer, P)
    return logits, [layer for layer, _ in layers]


@functools.singledispatch
def _parts(model: Any, persistent: int, stack: contextlib.ExitStack) -> list[tuple[LayerTrace, nn.Module | None]]:
    """The layers to record and their memories, with hooks for all but the memories, which `stack` removes."""
    raise ValueError(f"model is a {type(model).__name__}, which has no memories to look into")


@_parts.register
def _(model: MnemosForCausalLM, persistent: int, stack: contextlib.ExitStack):
    found = []
    for i, (kind, block) in enumerate(zip(model.config.blocks, model.model.layers)):
        layer, mixer = LayerTrace(i, kind), block.mixer
        gate = getattr(mixer, "gate", None)
        if isinstance(mixer, MALMixer):  # before the memory's own hook, which calls the memory again
            stack.enter_context(_sharing(layer, mixer, persistent))
        if isinstance(gate, TokenGate):  # others have no value per token
            stack.enter_context(_hooked(gate, _routing(layer, persistent)))
        found.append((layer, getattr(mixer, "memory", None)))
    return found


@_parts.register
def _(model: AttachedForCausalLM, persistent: int, stack: contextlib.ExitStack):
    modules = attention_modules(model.base, model.attach_config.target)
    found = []
    for i, memory in model.memory_modules().items():
        layer = LayerTrace(i, "attached")
        stack.enter_context(_adding(layer, model.memories[str(i)], modules[i]))
        found.append((layer, memory))
    return found


@contextlib.contextmanager
def _hooked(module: nn.Module, hook) -> Generator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _routing(layer: LayerTrace, persistent: int):
    def hook(gate: TokenGate, args: tuple, output: Tensor) -> None:
        y, m, x = (part[0, persistent:].float() for part in args)
        g = gate.opening(gate.linear(args[2]))[0, persistent:].float()  # T heads
        layer.values["route"] = gate.weights(g)[1].cpu()
        attention, memory = gate.weights(g.repeat_interleave(x.shape[-1] // gate.heads, -1))  # T D
        layer.values["share"] = _share(memory * m, attention * y)

    return hook


@contextlib.contextmanager
def _sharing(layer: LayerTrace, mixer: MALMixer, persistent: int) -> Generator[None]:
    """For `mal`, which adds both parts to the residual stream: records the share of the memory by norms."""
    parts: dict[str, Tensor] = {}

    def keep(name: str):
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            parts.setdefault(name, output[0][0, persistent:].float())

        return hook

    with _hooked(mixer.memory, keep("memory")), _hooked(mixer.attention, keep("attention")):

        def done(module: nn.Module, args: tuple, output: Any) -> None:
            layer.values["share"] = _share(parts["memory"], parts["attention"])

        with _hooked(mixer, done):
            yield


@contextlib.contextmanager
def _adding(layer: LayerTrace, added: nn.Module, attention: nn.Module) -> Generator[None]:
    """For an attached memory, which adds to the output of attention: records the share of the memory by norms."""
    parts: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, output: Tensor) -> None:
        parts.append(output[0].float())

    def done(module: nn.Module, args: tuple, output: Any) -> None:
        both = (output if isinstance(output, Tensor) else output[0])[
            0
        ].float()  # this hook runs after the one that adds
        layer.values["share"] = _share(parts[-1], both - parts[-1])

    with _hooked(added, keep), _hooked(attention, done):
        yield


def _share(memory: Tensor, attention: Tensor) -> Tensor:
    """(T, D) each -> (T, 1): the memory's share of both norms."""
    m, a = memory.norm(dim=-1, keepdim=True), attention.norm(dim=-1, keepdim=True)
    return (m / (m + a).clamp(min=1e-30)).cpu()
