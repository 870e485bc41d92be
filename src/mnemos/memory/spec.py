"""What one memory is: its network, its objective, its rule, its window and its grid. And the gates it is driven by."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..deprecation import current_names, old_names, renamed_fields
from .features import FEATURES
from .losses import LOSSES, InnerLoss
from .networks import STRUCTURES, Chain, Structure
from .newton_schulz import NS_COEFFICIENTS
from .rules import RULES, Muon, Rule

if TYPE_CHECKING:
    from .state import MemoryState

WIDEST = 2**20  # no dimension, window or chunk is larger: sizes come from files too, and must not exhaust the machine
LIMITS = {
    "key_dim": WIDEST,
    "value_dim": WIDEST,
    "depth": 64,
    "degree": 64,
    "window": WIDEST,
    "chunk_size": WIDEST,
    "ns_steps": 64,
}


@dataclass
class Gates:
    """Per-token, per-head numbers that steer the memory; None means momentum 0, retain 1, gate 1.

    lr, momentum, retain, gate: (B, T, H). decay: (H,), weight decay^j of the token j steps back in the window.
    lag: (B, T, H, window), lag[..., j] weights token t-j. All lie in [0, 1], but lr, which is any number >= 0.
    """

    lr: Tensor
    momentum: Tensor | None = None
    retain: Tensor | None = None
    gate: Tensor | None = None
    decay: Tensor | None = None
    lag: Tensor | None = None

    def map(self, function) -> Gates:
        """Apply `function` to every gate that has a time axis; `decay` has none and stays."""
        timed = {name: getattr(self, name) for name in ("lr", "momentum", "retain", "gate", "lag")}
        mapped: dict[str, Any] = {name: None if x is None else function(x) for name, x in timed.items()}
        return Gates(**mapped, decay=self.decay)

    def lag_weights(self, window: int, dtype: torch.dtype) -> Tensor | None:
        """decay^j * lag_j, the weight of the token j steps back: (B, T, H, window), or None if all are 1."""
        lag = None if self.lag is None else self.lag.to(dtype)
        if self.decay is None or window == 1:
            return lag
        powers = torch.arange(window, device=self.decay.device)
        decay = self.decay.to(dtype).unsqueeze(-1) ** powers  # H c
        return decay.expand(*self.lr.shape, window) if lag is None else lag * decay


@renamed_fields(skip="residual")
@dataclass(frozen=True)
class MemorySpec:
    """The whole definition of one memory. Immutable, hashable, and JSON both ways (`to_json`, `from_json`).

    key_dim, value_dim: per head, before the feature map.
    structure: "linear", "mlp", "gated_mlp" or a registered name; `depth` maps, hidden width round(expansion * value_dim).
    objective: "l2" or "dot". rule: "gd" or "muon". features: "identity", "elementwise", "elementwise_concat", "monomials",
    "tensor", "sketch" or a registered name, of `degree`, with `feature_dim` outputs where the map has a choice; or "exp", the kernel exp(q·k),
    whose first fast map is a list that grows by a pair per token ("linear" or "mlp" under "gd"; W0 omits that map).
    normalize: divide what is read by the same sum over values of 1: softmax attention ("linear", "dot" and "exp" only).
    residual: False leaves out the residual of structures that have one.
    window: how many tokens, the current one included, each write sums over.
    chunk_size: gradients are taken at the weights of the chunk's start (anchor="chunk"), or at the weights of the token
    before (anchor="token", linear and gd only; then chunk_size changes nothing but speed). decay_first: measure the error after the decay.
    momentum: False drops the accumulator from the state. commit_every: muon's interval, a divisor of chunk_size.
    nesterov: a commit of muon orthogonalises momentum_t S_t - G_t instead of S_t, as the optimiser Muon does.
    lr_position: "outside", a commit adds lr_t NS(S_t); "inside", lr_t multiplies the token's gradient in S instead, where it weighs tokens
    against each other, and a commit adds step_size NS(S_t).
    ns_steps, ns_coefficients: iterations of Newton–Schulz, and their polynomials: "muon" (singular values of 0.7 to 1.2 after five),
    "convergent" (slow, exact), "polar_express" (a polynomial of its own for each iteration: 0.84 to 1.13 after five, exact after eight).
    read: "after" the token's own write, or "before" it.

    >>> spec = MemorySpec(key_dim=4, value_dim=4, structure="mlp", depth=2)
    >>> spec.shapes
    ((4, 16), (16, 4))
    """

    key_dim: int
    value_dim: int
    structure: str = "mlp"
    depth: int = 2
    expansion: float = 4.0
    objective: str = "l2"
    rule: str = "gd"
    features: str = "identity"
    degree: int = 2
    feature_dim: int | None = None
    window: int = 1
    chunk_size: int = 64
    anchor: str = "chunk"
    decay_first: bool = False
    momentum: bool = True
    commit_every: int | None = None
    read: str = "after"
    ns_steps: int = 5
    ns_coefficients: str = "muon"
    nesterov: bool = False
    lr_position: str = "outside"
    step_size: float = 1.0
    normalize: bool = False
    residual: bool = True

    def __post_init__(self):
        def choose(name: str, allowed) -> None:
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r:.40} is unknown; choose one of {', '.join(map(repr, allowed))}")

        choose("structure", tuple(STRUCTURES))
        choose("objective", tuple(LOSSES))
        choose("rule", tuple(RULES))
        choose("features", tuple(FEATURES))
        choose("anchor", ("chunk", "token"))
        choose("read", ("after", "before"))
        choose("ns_coefficients", tuple(NS_COEFFICIENTS))
        choose("lr_position", ("outside", "inside"))
        for name, most in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r:.40} must be a whole number >= 1 and <= {most}")
        if type(self.expansion) not in (int, float) or not 0 < self.expansion <= WIDEST:
            raise ValueError(f"expansion={self.expansion!r:.40} must be a number > 0 and <= {WIDEST}")
        if self.feature_dim is not None and (type(self.feature_dim) is not int or not 1 <= self.feature_dim <= WIDEST):
            raise ValueError(
                f"feature_dim={self.feature_dim!r:.40} must be None or a whole number >= 1 and <= {WIDEST}"
            )
        for name in ("momentum", "decay_first", "nesterov", "normalize", "residual"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r:.40} must be True or False")
        if self.commit_every is not None:
            if not self.update_rule.commits:
                raise ValueError(f"commit_every goes with {_committed()} only")
            if type(self.commit_every) is not int or self.commit_every < 1 or self.chunk_size % self.commit_every:
                raise ValueError(f"commit_every={self.commit_every!r:.40} must divide chunk_size={self.chunk_size}")
        self._check_muon()
        if self.anchor == "token" and (
            not self.network.is_matrix or self.update_rule.commits or not self.loss.solvable
        ):
            raise ValueError(
                "anchor='token' goes with structure='linear' and rule='gd' "
                f"(any objective, features, window, momentum, read), not structure={self.structure!r}, rule={self.rule!r}"
            )
        if self.decay_first and self.anchor != "token":
            raise ValueError("decay_first=True needs anchor='token' (structure='linear', rule='gd')")
        self._check_kernel()
        if self.lifted_dim > WIDEST:
            raise ValueError(
                f"features={self.features!r} of degree={self.degree} lift key_dim={self.key_dim} to more than {WIDEST} dimensions"
            )
        if max(max(shape) for shape in self.network.shapes()) > WIDEST:
            raise ValueError(
                f"expansion={self.expansion} and value_dim={self.value_dim} make a hidden layer wider than {WIDEST}, the most it may be"
            )
        for name in (
            "loss",
            "update_rule",
            "chain",
            "shapes",
        ):  # torch.compile cannot trace the first use of a cached property
            getattr(self, name)

    def _check_muon(self) -> None:
        """What goes together with nesterov, lr_position and step_size."""
        if self.nesterov and not (self.update_rule.commits and self.momentum):
            raise ValueError(
                f"nesterov=True goes with rule='muon' and momentum=True, not rule={self.rule!r}, momentum={self.momentum}"
            )
        if self.lr_position == "inside" and not self.update_rule.commits:
            raise ValueError(f"lr_position='inside' goes with rule='muon' only, not rule={self.rule!r}")
        if type(self.step_size) not in (int, float) or not 0 < self.step_size < float("inf"):
            raise ValueError(f"step_size={self.step_size!r:.40} must be a number > 0")
        if self.step_size != 1 and self.lr_position == "outside":
            raise ValueError(
                f"step_size={self.step_size!r:.40} goes with lr_position='inside' only: outside, lr is the size of a step"
            )

    def _check_kernel(self) -> None:
        """What goes together with features="exp"."""
        if self.normalize and not (self.is_kv_cache and self.network.is_matrix and not self.loss.uses_output):
            raise ValueError(
                "normalize=True goes with features='exp', structure='linear' and objective='dot', not "
                f"features={self.features!r}, structure={self.structure!r}, objective={self.objective!r}"
            )
        if not self.is_kv_cache:
            return
        if not self.network.is_mlp or self.update_rule.commits or self.anchor != "chunk":
            why = "; a product of two maps that start at 0 never leaves it" if self.network.is_gated else ""
            why = "; chunk_size=1 is the same" if self.anchor == "token" else why
            raise ValueError(
                "features='exp' goes with structure='linear' or 'mlp', rule='gd' and anchor='chunk' (any objective, window, "
                f"momentum, read), not structure={self.structure!r}, rule={self.rule!r}, anchor={self.anchor!r}{why}"
            )

    @property
    def is_kv_cache(self) -> bool:
        """Whether the state grows with what was read, as an attention cache does: features "exp" only."""
        return FEATURES[self.features].infinite

    @property
    def depends_on_chunking(self) -> bool:
        """Whether results depend on where chunks begin. Not where the error of a token does not look at the weights."""
        if self.is_kv_cache and not self.shapes and not self.loss.uses_output:
            return False
        return self.anchor == "chunk"

    @property
    def pair_dim(self) -> int:
        """What the first map of a growing memory puts out: its outputs, and the sum of weights where it is normalised."""
        return self.network.shapes()[0][1] + self.normalize

    @property
    def lifted_dim(self) -> int:
        """Dimension of keys and queries after the feature map."""
        return FEATURES[self.features].lifted_dim(self.key_dim, self.degree, self.feature_dim)

    @property
    def hidden_dim(self) -> int:
        return max(1, round(self.expansion * self.value_dim))

    @property
    def commit(self) -> int:
        """Tokens between two commits of rule "muon"."""
        return self.commit_every or self.chunk_size

    @property
    def has_residual(self) -> bool:
        """Whether the key (of a read, the query) is added to what the network gives."""
        return self.residual and self.network.residual and self.key_dim == self.value_dim

    @functools.cached_property
    def loss(self) -> InnerLoss:
        return LOSSES[self.objective]()

    @functools.cached_property
    def update_rule(self) -> Rule:
        return RULES[self.rule]()

    def target(self, value: Tensor, key: Tensor) -> Tensor:
        """What the network without its residual is trained to give for a key: value - key, or the value itself."""
        return value - key if self.has_residual and self.loss.of_difference else value

    @functools.cached_property
    def network(self) -> Structure:
        return STRUCTURES[self.structure](self)

    @functools.cached_property
    def chain(self) -> Chain | None:
        return self.network.chain

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(d_in, d_out) of every fast map that is a matrix: all but the first of a growing memory."""
        return tuple(self.network.shapes()[1 if self.is_kv_cache else 0 :])

    def with_ns_steps(self, ns_steps: int) -> MemorySpec:
        """The same memory with another number of Newton–Schulz iterations; for rule "muon" only.

        `scan` and `step` take it for a state of the spec it comes from, and return a state of that spec.
        """
        if not isinstance(self.update_rule, Muon):
            raise ValueError(f"ns_steps={ns_steps!r:.40} goes with rule='muon' only, not rule={self.rule!r}")
        return dataclasses.replace(self, ns_steps=ns_steps)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> MemorySpec:
        """The spec that `to_json` wrote; a ValueError for any other text."""
        try:
            given: dict[str, Any] = json.loads(text)
        except (TypeError, RecursionError) as broken:
            raise ValueError(f"a MemorySpec in JSON was expected, but the text is none: {broken}") from None
        if not isinstance(given, dict):
            raise ValueError(f"a MemorySpec in JSON is an object {{...}}, not {type(given).__name__}")
        given = current_names("a saved MemorySpec", given, old_names(cls))
        fields = dataclasses.fields(cls)
        unknown = given.keys() - {field.name for field in fields}
        if unknown:
            raise ValueError(f"MemorySpec has no field {', '.join(sorted(unknown))[:200]}")
        missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in given]
        if missing:
            raise ValueError(f"a MemorySpec needs {', '.join(missing)}")
        return cls(**given)

    if TYPE_CHECKING:  # memory/initial_state.py has it: a state is made of a spec, so this file cannot import states

        def initial_state(
            self,
            W0: list[Tensor],
            batch: int,
            heads: int | None = None,
            dtype: torch.dtype | None = None,
            device: torch.device | str | None = None,
        ) -> MemoryState: ...


def _committed() -> str:
    return " or ".join(f"rule={name!r}" for name, rule in RULES.items() if rule.commits)
