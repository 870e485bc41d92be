"""Memory states: every kind of layer, its files mutated, and all that can be done with a state that was loaded."""

from __future__ import annotations

import copy
import dataclasses
from functools import cached_property, partial
from pathlib import Path
from random import Random

import torch
from fuzz_files import parse, to_bytes
from fuzz_mutations import mutated
from fuzz_target import Mismatch, Target, check_finite, check_numbers, check_positions

from mnemos.memory import Gates, MemoryState, NeuralMemory, scan, step
from mnemos.memory.features import make_features

WINDOWED = dict(heads=2, rule="muon", commit_every=1, momentum=False)
LAYERS = {
    "mlp": dict(heads=2),
    "no-conv": dict(heads=4, conv_width=0),
    "one-head": dict(heads=1, conv_width=0),
    "wide": dict(heads=8, dim=32, conv_width=0, chunk_size=4),
    "linear": dict(structure="linear", heads=2, momentum=False),
    "online": dict(structure="linear", heads=2, anchor="token", conv_width=2),
    "gated": dict(structure="gated_mlp", heads=2, w0_branch=False, retain=False),
    "deep": dict(depth=3, heads=2, residual=True, expansion=2.0, chunk_size=1),
    "window": dict(heads=2, window=3, gate="token*decay"),
    "muon": dict(heads=2, rule="muon", window=2, commit_every=2),
    "exp": dict(heads=2, features="exp", expansion=1.0),
    "softmax": dict(heads=2, features="exp", structure="linear", objective="dot", normalize=True, momentum=False),
    "huber": dict(heads=2, objective="huber_switch", window=3, momentum=False),
    "lq": dict(heads=2, objective="lp(p=3)", retention="lq(q=4, floor=1)", commit_every=2, momentum=False),
    "kl": dict(heads=2, retention="kl(scale=2)", structure="linear", momentum=False),
    "start": dict(heads=2, retention="start", window=2),
    "start-online": dict(heads=2, retention="start", structure="linear", anchor="token", conv_width=0),
    "tensor": dict(heads=2, key_dim=2, value_dim=4, features="tensor", structure="linear"),
    "windowed": dict(WINDOWED, window=3, gate="token*decay"),
    "windowed-linear": dict(WINDOWED, window=4, structure="linear", muon_scale="nuclear", conv_width=0),
    "windowed-start": dict(WINDOWED, window=2, retention="start", depth=3, expansion=2.0, chunk_size=2),
    "start-muon": dict(heads=2, retention="start", rule="muon", window=3, commit_every=2),
}


def form_of(state: MemoryState) -> dict:
    """Shapes without the row, and whether a tensor holds real numbers."""
    return {name: (tuple(x.shape[1:]), x.is_floating_point()) for name, x in state.tensors().items()}


def in_float64(layer: NeuralMemory, x: torch.Tensor, state: MemoryState) -> list[torch.Tensor]:
    """Output and states of the layer in float64, by its torch path, token by token."""
    wide, first = copy.deepcopy(layer).double(), state
    wide.config = dataclasses.replace(wide.config, backend="torch")
    state, y = state.to(torch.float64), x
    for t in range(x.shape[1]):
        y, state = wide(x[:, t : t + 1].double(), state)
    return [y, *first.tensors().values(), *state.tensors().values()]


class States(Target):
    """`MemoryState.load`, then forward, `scan`, `step`, `read`, `write`, `select`, `stack` and `clone`."""

    kind = "state"

    @cached_property
    def layers(self) -> list[NeuralMemory]:
        made = []
        for i, fields in enumerate(LAYERS.values()):
            torch.manual_seed(i)
            fields = dict(dim=8, chunk_size=4) | fields
            layer = NeuralMemory(fields.pop("dim"), **fields).eval()
            made.append(layer.double() if i == 4 else layer)
        return made

    def build(self) -> None:
        self.files, self.owner = [], []
        for i, layer in enumerate(self.layers):
            dtype = layer.qkv.weight.dtype
            for length, batch in ((0, 1), (3, 2), (9, 1)):
                x = torch.randn(batch, length or 1, layer.config.dim, dtype=dtype)
                with torch.no_grad():
                    state = layer.initial_state(batch) if length == 0 else layer.write(x)
                self.files.append(self.saved(state.save))
                self.owner.append(i)
            with torch.no_grad():
                rows = [layer.write(torch.randn(1, n, layer.config.dim, dtype=dtype)) for n in (2, 4, 7)]
            self.files.append(self.saved(MemoryState.stack(rows).save))
            self.owner.append(i)
        self.raws = [parse(data) for data in self.files]
        self.forms = [form_of(layer.initial_state(1)) for layer in self.layers]

    def mutate(self, rng: Random, folder: Path) -> None:
        self.chosen = rng.randrange(len(self.raws))
        raw = self.raws[self.chosen]
        data = to_bytes(raw) if rng.random() < 0.02 else mutated(rng, raw, self.raws, to_bytes)
        (folder / "state").write_bytes(data)

    def use(self, rng: Random, folder: Path) -> None:
        layer = self.layers[self.owner[self.chosen] if rng.random() < 0.85 else rng.randrange(len(self.layers))]
        state = MemoryState.load(folder / "state", layer.spec if rng.random() < 0.5 else None)
        self.step("loaded")
        check_numbers(state.tensors().values())
        check_positions(state.tensors())
        forked = MemoryState.stack([state, state.clone()]).select([0, state.batch])
        if forked.batch != 2 or forked.heads != state.heads or state.nbytes < 1:
            raise Mismatch(f"stack and select of a state gave {forked.batch} rows and {forked.heads} heads")
        grad = rng.random() < 0.1
        with torch.enable_grad() if grad else torch.no_grad():
            if rng.random() < 0.3:
                self.by_its_spec(rng, state)
            self.by_layer(rng, layer, state)

    def by_layer(self, rng: Random, layer: NeuralMemory, state: MemoryState) -> None:
        """Forward of some tokens, as decoding does it, and a read."""
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        dtype = layer.qkv.weight.dtype
        x = torch.randn(state.batch, 8, layer.config.dim, generator=generator, dtype=dtype)
        kept = state.clone()
        before = state.position.clone()
        lengths = rng.choice([[1, 1, 1], [1, 5], [5, 1], [1, 1]])
        t = 0
        for length in lengths:
            if rng.random() < 0.3 and not torch.is_grad_enabled():
                state = dataclasses.replace(state.clone(), inplace=True)
            y, state = layer(x[:, t : t + length], state)
            self.step("used")
            t += length
            check_finite(y, partial(in_float64, layer, x[:, :t], kept))
        self.compare(layer, kept)
        if not torch.equal(state.position, before + t):
            raise Mismatch(f"position {before.tolist()[:4]} became {state.position.tolist()[:4]} after {t} tokens")
        check_finite(layer.read(x[:, :2], kept), lambda: in_float64(layer, x, kept))

    def compare(self, layer: NeuralMemory, state: MemoryState) -> None:
        """A layer that took a state must have been given one of its own form."""
        own, found = self.forms[self.layers.index(layer)], form_of(state)
        wrong = [n for n in own.keys() | found.keys() if own.get(n) != found.get(n) and not n.startswith("pairs.")]
        if wrong or state.spec != layer.spec:
            raise Mismatch(f"the layer took a state of another form: {', '.join(sorted(wrong)) or 'spec'}")

    def by_its_spec(self, rng: Random, state: MemoryState) -> None:
        """The functions, by whatever spec the file has."""
        spec, B, H = state.spec, state.batch, state.heads
        if spec.lifted_dim > 512 or max((n for shape in spec.shapes for n in shape), default=0) > 512:
            return
        features = None if spec.features == "identity" else make_features(spec, H).to(state.dtype)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        q, k = (torch.randn(B, 5, H, spec.key_dim, generator=generator, dtype=state.dtype) for _ in "qk")
        v = torch.randn(B, 5, H, spec.value_dim, generator=generator, dtype=state.dtype)
        gates = Gates(lr=torch.full((B, 5, H), 0.01, dtype=state.dtype))
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        kept = state.clone()

        def wide(steps: int) -> list[torch.Tensor]:
            lifted = None if features is None else copy.deepcopy(features).double()
            every, wide_gates = [x.double() for x in (q, k, v)], gates.map(torch.Tensor.double)
            y, after = scan(*every, wide_gates, kept.to(torch.float64), spec, lifted)
            for _ in range(steps):
                first = wide_gates.map(lambda x: x[:, :1])
                y, after = step(*(x[:, :1] for x in every), first, after, spec, lifted)
            return [y, *kept.tensors().values(), *after.tensors().values()]

        y, after = scan(q, k, v, gates, state, spec, features)
        self.step("used")
        check_finite(y, partial(wide, 0))
        y, after = step(q[:, :1], k[:, :1], v[:, :1], gates.map(lambda x: x[:, :1]), after, spec, features)
        check_finite(y, partial(wide, 1))
        if not torch.equal(after.position, kept.position + 6):
            raise Mismatch(f"position {kept.position.tolist()[:4]} became {after.position.tolist()[:4]} after 6 tokens")
