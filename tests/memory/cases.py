"""The grid of memories that every property is tested on, and random inputs for them."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import torch

from mnemos.memory import Gates, MemorySpec, MemoryState, Structure, make_features, register_module, register_structure
from mnemos.memory.validation import GATE_NAMES


@register_structure
class Composed(Structure):
    """A structure of the tests' own: two branches, a shared map used twice, a norm between them."""

    name = "test_composed"
    residual = True

    def shapes(self):
        return [(self.dim_in, 5), (5, 5), (5, self.dim_out)]

    def forward(self, x, fast):
        hidden = torch.tanh(fast(0, x))
        hidden = hidden + fast(1, torch.sin(hidden)) * torch.sigmoid(fast(1, hidden))
        return fast(2, hidden / (1 + hidden.square().mean(-1, keepdim=True)).sqrt())


@register_structure
class OwnMLP(Structure):
    """The built-in two-layer MLP, written without naming its chain: the autograd engine must agree with the hand-written one."""

    name = "test_own_mlp"
    residual = True

    def shapes(self):
        return [(self.dim_in, self.hidden), (self.hidden, self.dim_out)]

    def forward(self, x, fast):
        return fast(1, torch.nn.functional.gelu(fast(0, x)))


class Whitened(torch.nn.Module):
    """A module that is not made of fast linear maps: a scale, biases, a buffer, a norm between two maps."""

    def __init__(self, dim_in: int, dim_out: int):
        super().__init__()
        self.first, self.norm, self.last = (
            torch.nn.Linear(dim_in, 5),
            torch.nn.LayerNorm(5),
            torch.nn.Linear(5, dim_out),
        )
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.linspace(-1, 1, 5))

    def forward(self, x):
        return self.last(torch.tanh(self.scale * self.norm(self.first(x)) + self.shift))


register_module("test_module")(Whitened)


@dataclass
class Case:
    spec: MemorySpec
    gates: tuple[str, ...] = ("momentum", "retain", "gate", "decay", "lag")
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        plain = MemorySpec(key_dim=1, value_dim=1)
        names = [f for f in plain.__dataclass_fields__ if f not in ("key_dim", "value_dim")]
        changed = [f"{n}={getattr(self.spec, n)}" for n in names if getattr(self.spec, n) != getattr(plain, n)]
        return ",".join([*changed, f"{self.spec.key_dim}x{self.spec.value_dim}", *self.gates])


@dataclass
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: Gates
    W0: list[torch.Tensor]
    features: torch.nn.Module | None

    def leaves(self) -> dict[str, torch.Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v}
        named |= {f"gates.{n}": getattr(self.gates, n) for n in GATE_NAMES}
        named |= {f"W0.{i}": w for i, w in enumerate(self.W0)}
        if self.features is not None:
            named |= {f"features.{n}": p for n, p in self.features.named_parameters()}
        return {n: x for n, x in named.items() if x is not None}

    def double(self) -> Inputs:
        """The same numbers in float64, as leaves of their own."""

        def wide(x):
            return None if x is None else x.detach().double().requires_grad_(x.requires_grad)

        gates = Gates(**{n: wide(getattr(self.gates, n)) for n in GATE_NAMES})
        features = None if self.features is None else copy.deepcopy(self.features).double()
        return Inputs(wide(self.q), wide(self.k), wide(self.v), gates, [wide(w) for w in self.W0], features)

    def state(self, spec: MemorySpec) -> MemoryState:
        return spec.initial_state(self.W0, batch=self.k.shape[0])


def inputs(case: Case, batch: int = 2, length: int = 23, heads: int = 3, seed: int = 0, grad: bool = False) -> Inputs:
    """Random everything; gates hit 0 and 1 exactly now and then."""
    spec, dtype = case.spec, case.dtype
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=g, dtype=torch.float64).mul(scale).to(dtype)

    def uniform(*shape, low=0.0, high=1.0):
        return (torch.rand(*shape, generator=g, dtype=torch.float64) * (high - low) + low).to(dtype)

    def unit(*shape):
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    features = make_features(spec, heads)
    if features is not None:
        features = features.to(dtype)
        for p in features.parameters():
            with torch.no_grad():
                p.add_(normal(*p.shape, scale=0.3))
            p.requires_grad_(grad)
    shape = (batch, length, heads)

    # Newton–Schulz on a nearly singular S amplifies rounding without bound: under muon the gates between 0 and 1 are strong,
    # nothing is wiped before S has gathered several tokens, and momentum is 0 only where a commit gathers several by itself
    muon = spec.rule == "muon"
    first = 2 * spec.key_dim if muon else 0

    def often_extreme(x):
        chance = torch.rand(shape, generator=g)
        chance[:, :first] = 0.5
        return torch.where(chance < 0.05, torch.zeros_like(x), torch.where(chance > 0.95, torch.ones_like(x), x))

    momentum = uniform(*shape, low=0.6, high=0.95) if muon else uniform(*shape, high=0.9)
    made = {
        "momentum": often_extreme(momentum) if not muon or spec.commit >= 4 else momentum,
        "retain": often_extreme(uniform(*shape, low=0.9 if muon else 0.7)),
        "gate": often_extreme(uniform(*shape, low=0.3 if muon else 0.0)),
        "decay": uniform(heads, low=0.5),
        "lag": uniform(*shape, spec.window),
    }
    high = 0.6 / min(spec.window, 4)
    if muon:  # a step of singular values 1 after every token soon is chaotic where lr is large
        high = 0.1 if spec.has_intervals else 0.02
    if "retain" not in case.gates:
        high /= 6  # nothing forgets: keep the inner loop from diverging, which would only measure chaos
    gates = Gates(lr=uniform(*shape, high=high), **{n: x for n, x in made.items() if n in case.gates})
    result = Inputs(
        q=unit(*shape, spec.key_dim),
        k=unit(*shape, spec.pairs_per_token, spec.key_dim).flatten(-2),
        v=normal(*shape, spec.pairs_per_token * spec.value_dim),
        gates=gates,
        W0=[normal(heads, *s, scale=s[0] ** -0.5) for s in spec.shapes],
        features=features,
    )
    if "threshold" in case.gates:  # drawn last, so that other cases keep their numbers
        gates.threshold = uniform(*shape, low=0.2, high=3.0)
    for x in result.leaves().values():
        x.requires_grad_(grad)
    return result


def grid() -> list[Case]:
    """Structures x rules x windows x chunk sizes, then features, reads, objectives, gates and dims across them."""
    cases = []
    structures = [
        {"structure": "linear"},
        {"structure": "mlp", "depth": 1},
        {"structure": "mlp", "depth": 2, "expansion": 2},
        {"structure": "mlp", "depth": 3, "expansion": 1.5},
        {"structure": "gated_mlp", "expansion": 2},
        {"structure": "test_composed"},
    ]
    for shape, (window, chunk) in itertools.product(
        structures, [(1, 1), (1, 4), (1, 64), (3, 1), (5, 8), (9, 4), (40, 16)]
    ):
        cases.append(Case(MemorySpec(key_dim=4, value_dim=4, window=window, chunk_size=chunk, **shape)))
        if chunk > 1 or window == 1:
            muon = MemorySpec(
                key_dim=4,
                value_dim=4,
                window=window,
                chunk_size=chunk,
                rule="muon",
                commit_every=max(1, chunk // 4),
                **shape,
            )
            cases.append(Case(muon))
    for window, chunk in [(1, 1), (1, 16), (3, 8), (30, 4)]:
        for options in ({}, {"decay_first": True}, {"objective": "dot"}, {"read": "before"}, {"momentum": False}):
            spec = MemorySpec(
                key_dim=4, value_dim=3, structure="linear", anchor="token", window=window, chunk_size=chunk, **options
            )
            cases.append(
                Case(spec, ("retain", "gate", "lag") if not spec.momentum else ("momentum", "retain", "decay"))
            )
    for features, degree in [
        ("elementwise", 3),
        ("elementwise_concat", 3),
        ("monomials", 2),
        ("tensor", 2),
        ("sketch", 3),
    ]:
        for structure, window in [("linear", 1), ("mlp", 4), ("gated_mlp", 1)]:
            spec = MemorySpec(
                key_dim=3,
                value_dim=3,
                structure=structure,
                expansion=2,
                features=features,
                degree=degree,
                window=window,
                chunk_size=8,
            )
            cases.append(Case(spec))
    for options in (
        {"objective": "dot"},
        {"features": "exp"},
        {"features": "exp", "objective": "dot", "window": 11, "read": "before"},
        {"read": "before"},
        {"key_dim": 3, "value_dim": 5},
        {"rule": "muon", "read": "before"},
        {"rule": "muon", "ns_coefficients": "convergent", "ns_steps": 3},
        {"rule": "muon", "ns_coefficients": "polar_express", "ns_steps": 4},
        {"rule": "muon", "nesterov": True, "commit_every": 4, "window": 3},
        {"rule": "muon", "nesterov": True, "commit_every": 1, "structure": "gated_mlp", "read": "before"},
        {
            "rule": "muon",
            "nesterov": True,
            "structure": "test_composed",
            "commit_every": 2,
            "lr_position": "inside",
            "step_size": 0.05,
        },
        {"rule": "muon", "lr_position": "inside", "step_size": 0.05, "commit_every": 4, "window": 3},
        {"rule": "muon", "lr_position": "inside", "step_size": 0.1, "structure": "linear", "read": "before"},
        {"rule": "muon", "objective": "dot", "commit_every": 2},
        {"window": 6, "objective": "dot", "read": "before"},
        {"structure": "gated_mlp", "objective": "dot", "window": 3},
        {"structure": "gated_mlp", "read": "before", "chunk_size": 2},
        {"structure": "mlp", "depth": 3, "read": "before", "chunk_size": 2},
        {"structure": "test_own_mlp", "read": "before"},
    ):
        cases.append(Case(MemorySpec(**({"key_dim": 4, "value_dim": 4, "expansion": 2, "chunk_size": 8} | options))))
    for gates in ((), ("momentum",), ("retain",), ("gate",), ("momentum", "decay"), ("lag",)):
        for window, rule in [(1, "gd"), (4, "gd"), (4, "muon")]:
            cases.append(
                Case(MemorySpec(key_dim=4, value_dim=4, expansion=2, window=window, rule=rule, chunk_size=4), gates)
            )
    for structure, window, rule, chunk in [
        ("linear", 1, "gd", 4),
        ("mlp", 3, "gd", 4),
        ("gated_mlp", 1, "gd", 4),
        ("mlp", 8, "muon", 8),
    ]:
        spec = MemorySpec(
            key_dim=4,
            value_dim=4,
            expansion=2,
            structure=structure,
            window=window,
            rule=rule,
            chunk_size=chunk,
            momentum=False,
        )
        cases.append(Case(spec, ("retain", "gate")))
    return [*cases, *miras(), *windowed(), *towards_start(), *several_pairs(), *bounded(), *modules()]


def windowed() -> list[Case]:
    """Muon after every token, computed in the low-rank space of the window: windows shorter and longer than chunk and sequence.

    With a single token in the window the step does not depend on the size of its gate, whose gradient is rounding alone. Newton–Schulz
    lifts the smallest directions of S: windows are well below the dims, and a map with two uses, whose inputs are much alike, takes three
    iterations that lift less.
    """
    base = {"expansion": 2, "rule": "muon", "commit_every": 1, "momentum": False}
    every = ("retain", "gate", "decay", "lag")
    cases = []
    for structure in (
        {"structure": "linear"},
        {"structure": "mlp"},
        {"structure": "mlp", "depth": 3},
        {"structure": "gated_mlp"},
        {"structure": "test_composed", "ns_coefficients": "convergent", "ns_steps": 3},
    ):
        for window, chunk, dim in [(1, 1, 4), (1, 4, 4), (3, 8, 10), (4, 2, 12)]:
            spec = MemorySpec(key_dim=dim, value_dim=dim, window=window, chunk_size=chunk, **base | structure)
            cases.append(Case(spec, every if window > 1 else ("retain",)))
    for options, gates in (
        ({"structure": "linear", "window": 9, "chunk_size": 4, "key_dim": 14, "value_dim": 15}, every),
        ({"structure": "linear", "window": 16, "chunk_size": 16, "key_dim": 24, "value_dim": 25}, every),
        ({"window": 8, "chunk_size": 16, "key_dim": 14, "value_dim": 13}, every),
        ({"window": 8, "chunk_size": 4, "key_dim": 12, "value_dim": 12, "read": "before"}, ("retain", "gate")),
        ({"structure": "linear", "window": 30, "chunk_size": 16, "key_dim": 32, "value_dim": 30}, ("retain", "gate")),
        ({"window": 9, "chunk_size": 4, "key_dim": 4, "value_dim": 4}, every),  # too long for the low-rank form
        ({"retention": "start", "structure": "linear"}, every),
        ({"retention": "start", "window": 8, "chunk_size": 16, "key_dim": 14, "value_dim": 13}, every),
        ({"retention": "start", "structure": "mlp", "depth": 3, "read": "before", "chunk_size": 4}, ("retain", "gate")),
        ({"retention": "start", "structure": "gated_mlp"}, every),
        ({"muon_scale": "nuclear"}, every),
        ({"muon_scale": "nuclear", "structure": "gated_mlp", "window": 4}, every),
        ({"read": "before", "window": 4}, ("retain", "lag")),
        ({"objective": "dot", "structure": "linear"}, ("retain", "gate")),
        ({"features": "monomials", "key_dim": 4, "window": 3, "chunk_size": 16}, ("retain", "gate")),
        ({"ns_coefficients": "convergent", "ns_steps": 3}, ()),
        ({"ns_coefficients": "polar_express", "ns_steps": 4, "window": 2}, ("gate",)),
        ({"muon_scale": "nuclear", "lr_position": "inside", "step_size": 0.05, "value_dim": 9}, ("retain", "gate")),
        ({"objective": "huber", "structure": "linear"}, ("retain", "gate", "threshold")),
    ):
        default = {"key_dim": 8, "value_dim": 8, "window": 3, "chunk_size": 8}
        cases.append(Case(MemorySpec(**base | default | options), gates))
    return cases


def several_pairs() -> list[Case]:
    """Two or three pairs per token, across structures, rules, anchors, features, losses and retentions."""
    base = {"key_dim": 4, "value_dim": 4, "expansion": 2, "chunk_size": 8, "pairs_per_token": 2}
    every = ("momentum", "retain", "gate", "decay", "lag")
    online = {"structure": "linear", "anchor": "token", "value_dim": 3}
    per_token = {"rule": "muon", "commit_every": 1, "momentum": False, "key_dim": 10, "value_dim": 9, "window": 3}
    choices = [
        ({"pairs_per_token": 3}, every),
        ({"window": 5}, every),
        ({"structure": "linear", "chunk_size": 4, "window": 3, "value_dim": 3}, every),
        ({"structure": "linear", "chunk_size": 1, "read": "before"}, every),
        ({"structure": "gated_mlp", "window": 40, "chunk_size": 16}, every),
        ({"structure": "test_composed", "window": 3}, every),
        ({"objective": "dot", "depth": 3, "residual": False}, every),
        ({"features": "monomials", "structure": "linear", "key_dim": 3, "pairs_per_token": 3}, every),
        ({"features": "elementwise", "degree": 3, "window": 2}, ("momentum", "retain")),
        ({"objective": "huber", "window": 3}, ("retain", "gate", "threshold")),
        ({"retention": "start", "window": 3}, every),
        ({"retention": "kl", "commit_every": 4, "window": 3}, ("retain", "gate")),
        ({"rule": "muon", "commit_every": 4, "window": 3}, every),
        (per_token, ("retain", "gate", "lag")),
        (per_token | {"structure": "linear", "retention": "start", "chunk_size": 4}, ("retain", "gate")),
        (online, ("momentum", "retain", "gate")),
        (online | {"window": 3, "decay_first": True, "retention": "start"}, ("momentum", "retain", "gate", "lag")),
    ]
    return [Case(MemorySpec(**base | options), gates) for options, gates in choices]


def modules() -> list[Case]:
    """A module whose parameters are the fast weights. Newton–Schulz normalises each parameter, as one row."""
    base = {"key_dim": 4, "value_dim": 3, "structure": "test_module", "chunk_size": 8}
    every = ("momentum", "retain", "gate", "decay", "lag")
    choices = [
        ({}, every),
        ({"window": 3, "chunk_size": 4, "objective": "huber"}, every),
        ({"retention": "start", "read": "before", "features": "elementwise"}, every),
        ({"pairs_per_token": 2, "max_grad_norm": 2.0}, ("retain", "gate")),
        ({"rule": "muon", "commit_every": 4}, every),
    ]
    return [Case(MemorySpec(**base | options), gates) for options, gates in choices]


def bounded() -> list[Case]:
    """Gradients of at most a norm, which some tokens exceed and others do not."""
    base = {"key_dim": 4, "value_dim": 4, "expansion": 2, "chunk_size": 8, "max_grad_norm": 2.0}
    every = ("momentum", "retain", "gate", "decay", "lag")
    per_token = {"rule": "muon", "commit_every": 1, "momentum": False, "key_dim": 10, "value_dim": 9, "window": 3}
    choices = [
        ({}, every),
        ({"window": 5}, every),
        ({"structure": "linear", "chunk_size": 4, "window": 3, "value_dim": 3}, every),
        ({"structure": "linear", "chunk_size": 1}, ("momentum", "retain")),
        ({"structure": "gated_mlp", "window": 9, "chunk_size": 4, "read": "before"}, every),
        ({"structure": "test_composed", "window": 3}, every),
        ({"objective": "huber", "depth": 3, "max_grad_norm": 1.0}, ("retain", "threshold")),
        ({"features": "monomials", "retention": "start"}, every),
        ({"retention": "lq(q=3)", "commit_every": 4}, ("retain", "gate")),
        ({"rule": "muon", "commit_every": 4, "window": 3}, every),
        (per_token, ("retain", "gate", "lag")),
        ({"pairs_per_token": 2, "window": 3, "max_grad_norm": 3.0}, every),
        ({"pairs_per_token": 3, "structure": "test_composed", "max_grad_norm": 4.0}, ("retain",)),
    ]
    return [Case(MemorySpec(**base | options), gates) for options, gates in choices]


def towards_start() -> list[Case]:
    """Retention "start": every structure, and rules, windows, chunks, anchors, features, reads, losses and gates across them."""
    structures = [
        {"structure": "linear"},
        {"structure": "mlp", "depth": 1},
        {"structure": "mlp", "depth": 2, "expansion": 2},
        {"structure": "mlp", "depth": 3, "expansion": 1.5},
        {"structure": "gated_mlp", "expansion": 2},
        {"structure": "test_composed"},
    ]
    base = {"key_dim": 4, "value_dim": 4, "expansion": 2, "chunk_size": 8, "retention": "start"}
    every = ("momentum", "retain", "gate", "decay", "lag")
    choices = [
        *(shape | {"window": c, "chunk_size": b} for shape in structures for c, b in ((1, 4), (5, 8))),
        *({"window": c, "chunk_size": b} for c, b in ((1, 1), (1, 64), (3, 1), (9, 4), (40, 16))),
        *(shape | {"rule": "muon", "window": 3, "commit_every": 2} for shape in structures),
        {"rule": "muon", "chunk_size": 64, "commit_every": 16},
        {"rule": "muon", "read": "before"},
        {"rule": "muon", "nesterov": True, "commit_every": 4, "window": 3},
        {"rule": "muon", "lr_position": "inside", "step_size": 0.05, "commit_every": 4},
        {"features": "monomials", "structure": "linear"},
        {"features": "sketch", "degree": 3, "window": 4},
        {"features": "elementwise", "structure": "gated_mlp"},
        {"features": "exp"},
        {"features": "exp", "depth": 3, "objective": "dot", "window": 11, "read": "before"},
        {"objective": "dot", "window": 3},
        {"objective": "dot", "structure": "linear", "read": "before"},
        {"read": "before", "structure": "gated_mlp", "chunk_size": 2},
        {"read": "before", "window": 6},
        {"key_dim": 3, "value_dim": 5},
    ]
    cases = [Case(MemorySpec(**base | options), every) for options in choices]
    for c, b in [(1, 1), (1, 16), (3, 8), (30, 4)]:
        for options in ({}, {"decay_first": True}, {"objective": "dot"}, {"read": "before"}, {"momentum": False}):
            online = {"structure": "linear", "anchor": "token", "value_dim": 3, "window": c, "chunk_size": b}
            spec = MemorySpec(**base | online | options)
            cases.append(
                Case(spec, ("retain", "gate", "lag") if not spec.momentum else ("momentum", "retain", "decay"))
            )
    online = {"structure": "linear", "anchor": "token", "decay_first": True, "momentum": False}
    cases.append(Case(MemorySpec(**base | online), ("retain",)))
    for gates in ((), ("momentum",), ("retain",)):
        cases += [Case(MemorySpec(**base | {"rule": rule, "chunk_size": 4}), gates) for rule in ("gd", "muon")]
    for options in (
        {"structure": "linear"},
        {"window": 3},
        {"structure": "gated_mlp", "chunk_size": 4},
        {"rule": "muon", "window": 8},
        {"features": "exp"},
    ):
        cases.append(Case(MemorySpec(**base | options, momentum=False), ("retain", "gate")))
    return cases


def miras() -> list[Case]:
    """Losses and retentions of Miras: each loss under both families, each retention with windows, chunks and commits that differ.

    lq(q=4) as printed divides by the square of a norm that a gate of 0 wipes out, which amplifies rounding without bound: here it
    has a floor; tests/memory/test_miras.py has the printed rule.
    """
    base = {"key_dim": 4, "value_dim": 4, "expansion": 2, "chunk_size": 8}
    every = ("momentum", "retain", "gate", "lag")
    cases = []
    for loss in ("huber", "huber_norm(delta=0.5)", "huber_switch"):
        cases.append(Case(MemorySpec(**base, objective=loss, window=3), (*every, "threshold")))
        cases.append(Case(MemorySpec(**base, objective=loss, structure="test_composed"), ("retain", "threshold")))
        cases.append(Case(MemorySpec(**base | {"chunk_size": 4}, objective=loss, rule="muon", commit_every=2), every))
    for p in (1.5, 3):
        cases.append(Case(MemorySpec(**base, objective=f"lp(p={p})", window=3), every))
        cases.append(Case(MemorySpec(**base, objective=f"lp(p={p})", structure="linear", read="before"), every))
    for retention in ("lq(q=4, floor=0.5)", "lq(q=3)", "kl"):
        for options in (
            {"chunk_size": 1},
            {"commit_every": 2, "window": 3},
            {"structure": "linear", "objective": "dot", "read": "before"},
            {"structure": "gated_mlp", "commit_every": 4, "objective": "huber"},
            {"structure": "test_composed", "commit_every": 1, "window": 11, "chunk_size": 4},
            {"features": "monomials", "objective": "lp(p=3)"},
        ):
            gates = ("retain", "gate", "lag", *(("threshold",) if options.get("objective") == "huber" else ()))
            cases.append(Case(MemorySpec(**base | options, retention=retention), gates))
        cases.append(Case(MemorySpec(**base, retention=retention), ()))
    return cases
