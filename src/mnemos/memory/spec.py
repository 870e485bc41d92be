"""Definition of one memory: its network, inner loss, update rule, retention, feature map, window and chunk size."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..choices import nearest
from ..deprecation import current_names, old_names, renamed_fields
from .combinations import check_combinations, choose, is_whole, require
from .features import FEATURES
from .losses import LOSSES, InnerLoss
from .networks import STRUCTURES, Chain, Structure
from .newton_schulz import NS_COEFFICIENTS
from .retention import RETENTIONS, RetainedDescent, Retention, TransformedRetention
from .rules import RULES, Gates, Muon, Rule

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["Gates", "MemoryOptions", "MemorySpec", "accumulates"]
MAX_DIM = 2**20  # of any dimension, window or chunk: sizes come from files too, and must not exhaust the machine
LIMITS = {"key_dim value_dim window chunk_size": MAX_DIM, "depth degree ns_steps pairs_per_token": 64}


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """The options that a memory (`MemorySpec`) and a layer around one (`NeuralMemoryConfig`) share.

    structure: the network: "linear", "mlp", "gated_mlp" or a registered name; `depth` maps, hidden width round(expansion * value_dim).
    objective: the inner loss: "l2", "dot" or a registered name, with options in brackets: "lp(p=3)".
    rule: "gd", "muon" or a registered name. retention: "zero" (weights decay towards 0), "start" (towards W0, where a network still
    learns) or a registered name, with options in brackets: "lq(q=4)".
    features: "identity", "elementwise", "elementwise_concat", "monomials", "tensor", "sketch" or a registered name, of `degree`, with
    `feature_dim` outputs if the map has a choice; or "exp", the kernel exp(q·k), whose first fast map is a list that grows by a pair
    per token ("linear" or "mlp" under "gd"; W0 omits that map).
    normalize: divide the output by the same sum over values of 1: softmax attention ("linear", "dot" and "exp" only).
    residual: whether networks that have a residual add the key (for reads, the query).
    window: number of tokens, the current one included, that each write sums over.
    chunk_size: gradients are taken at the weights before the chunk (anchor="chunk"), or at the weights of the token
    before (anchor="token", linear and gd only; then chunk_size changes nothing but speed). decay_first: measure the error after the decay.
    commit_every: tokens between two commits of "muon" or of a transformed retention, a divisor of chunk_size (default: chunk_size).
    nesterov: a commit of muon orthogonalises momentum_t S_t - G_t instead of S_t, as the optimiser Muon does.
    lr_position: "outside", a commit adds lr_t NS(S_t); "inside", lr_t multiplies the token's gradient in S instead, where it weighs tokens
    against each other, and a commit adds step_size NS(S_t).
    muon_scale: size of a step of muon: "unit", singular values of about 1 for any error; "nuclear", times <S, NS(S)>, about the nuclear
    norm of S: it vanishes with the error, and for a single token it is the gradient step.
    ns_steps, ns_coefficients: iterations of Newton–Schulz, and their polynomials: "muon" (singular values of 0.7 to 1.2 after five),
    "convergent" (slow, exact), "polar_express" (a polynomial of its own for each iteration: 0.84 to 1.13 after five, exact after eight).
    read: "after" the token's own write, or "before" it.
    pairs_per_token: key-value pairs that a token writes. Its gradient is the sum over its pairs; gates, window, chunks and positions
    count tokens. Keys and values then have pairs_per_token times as many channels, pair after pair.
    max_grad_norm: the gradient of a token, over all fast maps of a head, is scaled down to at most this Frobenius norm, at the anchor
    and before gates, lr and window; None leaves it as it is.
    """

    structure: str = "mlp"
    depth: int = 2
    expansion: float = 4.0
    objective: str = "l2"
    rule: str = "gd"
    retention: str = "zero"
    features: str = "identity"
    degree: int = 2
    feature_dim: int | None = None
    window: int = 1
    chunk_size: int = 64
    anchor: str = "chunk"
    decay_first: bool = False
    commit_every: int | None = None
    read: str = "after"
    ns_steps: int = 5
    ns_coefficients: str = "muon"
    nesterov: bool = False
    lr_position: str = "outside"
    muon_scale: str = "unit"
    step_size: float = 1.0
    normalize: bool = False
    residual: bool = True
    pairs_per_token: int = 1
    max_grad_norm: float | None = None

    SAVED_DEFAULTS: ClassVar[dict[str, Any]] = {}  # of fields that older files lack, where they differ

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Kept, because kernels look their arguments up by config at every token."""
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: hashes of strings differ from process to process."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The spec that `to_json` wrote; raises a ValueError for any other text."""
        try:
            given: dict[str, Any] = json.loads(text)
        except (ValueError, TypeError, RecursionError) as broken:
            raise ValueError(f"a {cls.__name__} in JSON was expected, but the text is none: {broken}") from None
        if not isinstance(given, dict):
            raise ValueError(f"a {cls.__name__} in JSON is an object {{...}}, not {type(given).__name__}")
        cls.check_names(given, listed=False)
        given = current_names(f"a saved {cls.__name__}", given, old_names(cls))
        required = (field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING)
        missing = [name for name in required if name not in given]
        if missing:
            raise ValueError(f"a {cls.__name__} needs {', '.join(missing)}")
        return cls(**cls.SAVED_DEFAULTS | given)

    @classmethod
    def check_names(cls, names: Iterable[str], listed: bool = True) -> None:
        """Raise a ValueError for a name that is no field."""
        known = [field.name for field in dataclasses.fields(cls)]
        wrong = sorted(set(names) - set(known) - set(old_names(cls)))
        if wrong:
            close = nearest(wrong[0], known)
            hint = f"; did you mean {close}?" if close else f"; there are {', '.join(known)}" if listed else ""
            raise ValueError(f"{cls.__name__} has no field {', '.join(wrong)[:200]}{hint}")


@renamed_fields(skip="residual")
@dataclass(frozen=True)
class MemorySpec(MemoryOptions):
    """The whole definition of one memory. Immutable, hashable, and JSON both ways (`to_json`, `from_json`).

    key_dim, value_dim: per head, before the feature map. momentum: False drops the accumulator S from the state.
    All else: see `MemoryOptions`.

    >>> spec = MemorySpec(key_dim=4, value_dim=4, structure="mlp", depth=2)
    >>> spec.shapes
    ((4, 16), (16, 4))
    """

    key_dim: int
    value_dim: int
    momentum: bool = dataclasses.field(default=True, kw_only=True)

    __hash__ = MemoryOptions.__hash__  # else the dataclass makes one that is not kept

    def __post_init__(self):
        for registry in (STRUCTURES, LOSSES, RULES, RETENTIONS, FEATURES):
            registry.choose(getattr(self, registry.kind))
        LOSSES.make(self.objective), RETENTIONS.make(self.retention)  # raise for options out of range
        choose(self, anchor=("chunk", "token"), read=("after", "before"), ns_coefficients=tuple(NS_COEFFICIENTS))
        choose(self, lr_position=("outside", "inside"), muon_scale=("unit", "nuclear"))
        for names, most in LIMITS.items():
            require(self, names, lambda x, most=most: is_whole(x, 1, most), f"be a whole number >= 1 and <= {most}")
        sizes = f"a whole number >= 1 and <= {MAX_DIM}"
        require(self, "feature_dim", lambda x: x is None or is_whole(x, 1, MAX_DIM), f"be None or {sizes}")
        positive = f"be a number > 0 and <= {MAX_DIM}"
        require(self, "expansion", lambda x: type(x) in (int, float) and 0 < x <= MAX_DIM, positive)
        switches = "momentum decay_first nesterov normalize residual"
        require(self, switches, lambda x: isinstance(x, bool), "be True or False")
        check_combinations(self)
        if self.lifted_dim > MAX_DIM:
            raise ValueError(
                f"features={self.features!r} of degree={self.degree} lift key_dim={self.key_dim} to more than {MAX_DIM} dimensions"
            )
        if max(max(shape) for shape in self.network.shapes()) > MAX_DIM:
            raise ValueError(
                f"expansion={self.expansion} and value_dim={self.value_dim} make a hidden layer wider than {MAX_DIM}, the most it may be"
            )
        for name in ("loss", "retains", "update_rule", "windowed", "chain", "shapes"):
            getattr(self, name)  # torch.compile cannot trace the first use of a cached property

    @property
    def is_kv_cache(self) -> bool:
        """Whether the state grows with the sequence, as an attention cache does: features "exp" only."""
        return FEATURES[self.features].infinite

    @property
    def depends_on_chunking(self) -> bool:
        """Whether results depend on where chunks begin. They do not if the error of a token does not depend on the weights."""
        if self.is_kv_cache and not self.shapes and not self.loss.uses_output:
            return False
        return self.anchor == "chunk"

    @property
    def pair_dim(self) -> int:
        """Outputs of the first map of a kv memory, and one more for the sum of weights if it is normalised."""
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
        """Tokens between two commits."""
        return self.commit_every or self.chunk_size

    @property
    def has_residual(self) -> bool:
        """Whether the key (of a read, the query) is added to the network's output."""
        return self.residual and self.network.residual and self.key_dim == self.value_dim

    @functools.cached_property
    def loss(self) -> InnerLoss:
        return LOSSES.make(self.objective)

    @functools.cached_property
    def retains(self) -> Retention:
        return RETENTIONS.make(self.retention)

    @functools.cached_property
    def update_rule(self) -> Rule:
        """The rule; under a transformed retention the rule that commits by it."""
        if isinstance(self.retains, TransformedRetention):
            return RetainedDescent(self.retains)
        return RULES.make(self.rule)

    @property
    def commits(self) -> bool:
        """Whether weights change at commits alone."""
        return self.update_rule.commits

    @functools.cached_property
    def windowed(self) -> bool:
        """Whether the rule commits after every token, by a function of the window's gradients alone."""
        return self.update_rule.is_windowed(self)

    @property
    def has_intervals(self) -> bool:
        """Whether engines compute commit interval by commit interval."""
        return self.commits and not self.windowed

    @property
    def has_nuclear_step(self) -> bool:
        return self.muon_scale == "nuclear"

    @property
    def key_channels(self) -> int:
        """Channels of the keys of a token, all its pairs."""
        return self.pairs_per_token * self.key_dim

    @property
    def loss_value_dim(self) -> int:
        """Channels of the values of a token as the inner loss takes them: value_dim for each pair, and one more for a threshold."""
        return self.pairs_per_token * (self.value_dim + self.loss.has_threshold)

    def loss_value(self, value: Tensor, gates: Gates) -> Tensor:
        """Values (B, T, H, ·) as the inner loss takes them: with the token's threshold behind each pair's, if it has one."""
        if not self.loss.has_threshold:
            return value
        threshold = gates.threshold
        if threshold is None:
            threshold = torch.full_like(value[..., 0], self.loss.initial_threshold)
        threshold = threshold.to(value.dtype).unsqueeze(-1)
        return torch.cat([x for pair in self.pairs(value) for x in (pair, threshold)], -1)

    def target(self, value: Tensor, key: Tensor) -> Tensor:
        """The value that the network without its residual is trained on for a key: value - key, or the value itself."""
        if not (self.has_residual and self.loss.of_difference):
            return value
        if not self.loss.has_threshold:
            return value - key
        pairs = zip(self.pairs(value), self.pairs(key))
        return torch.cat([x for v, k in pairs for x in (v[..., : self.value_dim] - k, v[..., self.value_dim :])], -1)

    def pairs(self, x: Tensor) -> tuple[Tensor, ...]:
        """The pairs of a token's keys or values: (..., pairs_per_token * D) -> that many of (..., D)."""
        return (x,) if self.pairs_per_token == 1 else x.chunk(self.pairs_per_token, -1)

    def lift(self, features, x: Tensor) -> Tensor:
        """The feature map of every pair: (..., heads, pairs_per_token * key_dim) -> (..., heads, pairs_per_token * lifted_dim)."""
        if features is None:
            return x
        return features(x) if self.pairs_per_token == 1 else torch.cat([features(pair) for pair in self.pairs(x)], -1)

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

    if TYPE_CHECKING:  # a state is made of a spec, so this file cannot import states
        from .state import initial_state as initial_state


def accumulates(rule: Any, retention: Any, commit: Any) -> bool:
    """Whether a memory without momentum keeps an accumulator: between commits, or under a transformed retention. Unknown names: no."""
    try:
        return (RULES.choose(rule)[0].commits and commit != 1) or not RETENTIONS.choose(retention)[0].is_linear
    except ValueError:
        return False
