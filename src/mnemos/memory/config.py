"""Everything that defines a `NeuralMemory` layer, as one frozen, JSON-able record."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ..choices import unknown
from ..deprecation import renamed_fields
from ..dispatch import check_backend
from .combinations import MAX_NORM, MIN_NORM, choose, is_norm, is_whole, require
from .features import FEATURES
from .networks import STRUCTURES
from .registry import Registry
from .retention import Start, Zero
from .rules import RULES
from .spec import MemoryOptions, MemorySpec, accumulates

GATES = ("token", "decay", "per-lag")
GATINGS: Registry = Registry("gating")  # modules that compute gates: memory/gating.py
QK_NORMS = ("l2", "rms", "none")


@renamed_fields(skip="residual", learned_start="learn_w0", read_start="w0_branch", start_scale="w0_scale")
@dataclass(frozen=True)
class NeuralMemoryConfig(MemoryOptions):
    """Fields of a `NeuralMemory`, in addition to those of `MemoryOptions`. None means a default that depends on the other fields.

    dim: width of the layer's input and output. heads: independent memories (default: heads of at most 64 dims).
    key_dim, value_dim: per head (default dim / heads).
    retention: "auto" is "start" for a network that forgets and writes at every token, else "zero"; see `MemoryOptions` for both.
    gating: how gates are computed from the input: "linear"; "sparse", whose token gate sees the last tokens and is exactly 0 for
    those that are not to be written; or a registered name.
    momentum, retain: whether the memory has these gates; retain="fixed" learns one number per head that does not depend on the token.
    gate: weight of a token inside the window: "none", "token" (a small network of the token itself, `gate_hidden` wide),
    "decay" (a learned base per head, to the power of the lag), "per-lag" (one weight per lag, from the token that writes),
    or a product of them such as "token*decay".
    max_lr: the writes of a token add up to max_lr · sigmoid(linear(x)); rule "gd" spreads them over time by momentum, so
    lr itself is that times 1 - momentum. The default keeps a chunk of identical keys stable for any momentum.
    lr_init, momentum_init, retain_init, gate_init, decay_init: values of the gates before training.
    learn_w0: learn the initial weights W0; False begins with 0 (memories of a single fast map only).
    With features "exp" the first fast map begins with 0 in any case; its kernel, exp(τ (q·k - |k|²)), has a learned τ per head.
    w0_branch: add a static branch that reads W0 with the same query and has a norm of its own. It models context-independent
    facts; the memory then begins near zero, so that its output reflects only what was written.
    w0_scale: factor of the last map of W0 in the memory's initial weights; by default 0.1 / chunk_size, a tenth of a token's
    write, and 1 without w0_branch or with commits at intervals. An optimiser such as Adam moves that map by its own rate
    at every step: at 1 the initial weights soon dominate the writes, and nothing is learned from them. A commit of Muon at intervals
    has singular values of 1, which dominate any initial weights (docs/log.md).
    residual: add the query to the output, and the key to the prediction, in networks with a residual.
    conv_width: width of the causal convolution over q, k, v; 0 or None for none. qk_norm: "l2", "rms" or "none".
    value_bound: values are shortened to less than this norm, v / sqrt(1 + |v|² / bound²), which keeps deep memories
    stable and loses nothing, because the output is normalised; None leaves them as they are.
    output_gate: multiply the output of the memory by SiLU(linear(x)). backend: see `scan`.

    >>> config = NeuralMemoryConfig(dim=384, window=4, gate="token*decay")
    >>> config.spec.key_dim, config.head_count
    (64, 6)
    >>> NeuralMemoryConfig.from_json(config.to_json()) == config
    True
    """

    dim: int
    heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    residual: bool = dataclasses.field(default=False, kw_only=True)
    retention: str = dataclasses.field(default="auto", kw_only=True)

    gating: str = "linear"
    momentum: bool = True
    retain: bool | str = True
    gate: str = "none"
    gate_hidden: int = 64
    max_lr: float | None = None
    lr_init: float | None = None
    momentum_init: float | None = None
    retain_init: float = 0.999
    gate_init: float = 0.9
    decay_init: float = 0.95
    learn_w0: bool = True
    w0_branch: bool = True
    w0_scale: float | None = None
    conv_width: int | None = 4
    qk_norm: str = "l2"
    value_bound: float | None = 1.0
    output_gate: bool = True
    eps: float = 1e-6
    backend: str = "auto"

    SAVED_DEFAULTS: ClassVar[dict[str, Any]] = {"retention": Zero.name}  # files from before the choice existed

    __hash__ = MemoryOptions.__hash__  # else the dataclass makes one that is not kept

    def __post_init__(self):
        object.__setattr__(self, "backend", check_backend(self.backend))
        if self.retention == "auto":
            object.__setattr__(self, "retention", self._default_retention())
        require(self, "dim gate_hidden", is_whole, "be a whole number >= 1")
        require(self, "heads key_dim value_dim", lambda x: x is None or is_whole(x), "be None or a whole number >= 1")
        require(self, "conv_width", lambda x: x is None or is_whole(x, 0), "be None or a whole number >= 0")
        if None in (self.key_dim, self.value_dim) and self.dim % self.head_count:
            raise ValueError(f"heads={self.heads} must divide dim={self.dim} (or give key_dim and value_dim)")
        self.spec  # noqa: B018 — raises for combinations that no memory has, such as anchor="token" with an mlp
        choose(self, qk_norm=QK_NORMS, retain=(True, False, "fixed"))
        parts = [] if self.gate == "none" else str(self.gate).split("*")
        if not set(parts) <= set(GATES) or len(parts) != len(set(parts)):
            raise ValueError(
                f"gate={self.gate!r:.60} is unknown; it is 'none' or a product of {', '.join(GATES)}: 'token*decay'"
            )
        if "decay" in parts and self.window == 1:
            raise ValueError(f"gate={self.gate!r:.60} needs window > 1: with window=1 there is no lag to decay over")
        gates = "retain_init gate_init decay_init" + " momentum_init" * (self.momentum_init is not None)
        require(self, gates, lambda x: is_number(x) and 0 < x < 1, "lie between 0 and 1, ends excluded")
        require(self, "w0_scale", lambda x: x is None or (is_number(x) and 0 < x < math.inf), "be None or a number > 0")
        require(self, "max_lr", lambda x: x is None or (is_number(x) and x > 0), "be None or > 0")
        norms = f"be None or a number in {MIN_NORM:g}..{MAX_NORM:g}"
        require(self, "value_bound", lambda x: x is None or is_norm(x), norms)
        require(self, "learn_w0 w0_branch output_gate", lambda x: type(x) is bool, "be True or False")
        require(self, "eps", lambda x: is_number(x) and x > 0, "be > 0")
        if not (is_number(self.initial_lr) and 0 < self.initial_lr < self.effective_max_lr):
            raise ValueError(
                f"lr_init={self.lr_init!r:.60} must lie between 0 and max_lr={self.effective_max_lr:g}, ends excluded"
            )
        if self.gating not in GATINGS:
            raise unknown("gating=", self.gating, GATINGS)
        if self.momentum and not self.spec.update_rule.momentum_gate:
            raise ValueError(f"retention={self.retention!r:.60} has no momentum: use momentum=False")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True looks ahead along the momentum: it needs momentum=True")
        if not self.learn_w0 and len(self.spec.network.shapes()) > 1:
            raise ValueError(
                f"learn_w0=False starts all weights at 0, from where structure={self.structure!r:.60} with its "
                f"{len(self.spec.network.shapes())} fast maps can never move; use structure='linear' or learn_w0=True"
            )
        self.has_w0_branch, self.effective_w0_scale  # noqa: B018 — torch.compile cannot trace the first use of a cached property

    def _default_retention(self) -> str:
        """Decay towards W0 for a network that forgets and writes at every token: it stops learning near 0. Else towards 0, as papers print it."""
        structure, features = STRUCTURES.choose(self.structure)[0], FEATURES.choose(self.features)[0]
        has_intervals = RULES.choose(self.rule)[0].commits and self.commit_every != 1
        dies_at_zero = not structure.is_matrix and not features.infinite and not has_intervals
        return Start.name if self.retain and dies_at_zero else Zero.name

    @property
    def head_count(self) -> int:
        """`heads`, or as few heads of at most 64 and at least 16 dims as divide `dim`, or 1."""
        if self.heads is not None:
            return self.heads
        return next((h for h in range(-(-self.dim // 64), self.dim // 16 + 1) if self.dim % h == 0), 1)

    @property
    def splits(self) -> list[int]:
        """Channels of the projections to queries, keys and values, over all heads and pairs."""
        H, spec = self.head_count, self.spec
        return [H * spec.key_dim, H * spec.key_channels, H * spec.pairs_per_token * spec.value_dim]

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: those of the projections, and those that the gating has in it."""
        own = getattr(GATINGS[self.gating], "conv_channels", None)
        return sum(self.splits) + (0 if own is None else own(self))

    @functools.cached_property
    def spec(self) -> MemorySpec:
        """The memory of each head. Without a momentum gate, a rule with commits some tokens apart has an accumulator all the same."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(MemoryOptions)}
        values["key_dim"] = self.key_dim or self.dim // self.head_count
        values["value_dim"] = self.value_dim or self.dim // self.head_count
        kept = self.momentum or accumulates(self.rule, self.retention, self.commit_every or self.chunk_size)
        return MemorySpec(**values, momentum=kept)

    @property
    def gate_parts(self) -> tuple[str, ...]:
        return () if self.gate == "none" else tuple(self.gate.split("*"))

    @functools.cached_property
    def has_w0_branch(self) -> bool:
        """`w0_branch`, if there is a W0 to read: a kv memory (features "exp") has no initial weights in its first map."""
        return self.w0_branch and self.learn_w0 and not self.spec.is_kv_cache

    @functools.cached_property
    def effective_w0_scale(self) -> float:
        """`w0_scale`, or a default chosen by experiments."""
        if self.w0_scale is not None:
            return self.w0_scale
        every_token = not self.spec.commits or (self.spec.update_rule.unit_step and self.spec.commit == 1)
        return 0.1 / self.chunk_size if self.has_w0_branch and every_token else 1.0

    @property
    def initial_momentum(self) -> float:
        """`momentum_init`, or a default chosen by experiments; Muon's S has to span the interval between two commits."""
        if self.momentum_init is not None:
            return self.momentum_init
        return max(0.9, 1 - 1 / self.spec.commit) if self.spec.commits else 0.9

    @functools.cached_property
    def effective_max_lr(self) -> float:
        """`max_lr`, or a bound below which writing the same token again and again does not overshoot.

        Gradients of a chunk are taken at its start, so `chunk_size` identical unit keys (times `pairs_per_token`), each written `window`
        times, move the memory by chunk_size * window * lr of its error: a linear memory is stable below 2. A deeper one also moves what
        its maps see of each other, and gets half of that, without momentum to smooth its steps a quarter, and a quarter of
        that again with more than two maps in a chain, or with two whose product is gated. Where every token has its own
        anchor, 1 / window writes exactly.
        """
        if self.max_lr is not None:
            return self.max_lr
        rule = self.spec.update_rule
        largest = rule.max_lr(self.spec)
        if largest is not None:
            return largest
        squared_key = 1 if self.qk_norm == "l2" or self.spec.is_kv_cache else self.spec.key_dim
        if self.anchor == "token":
            return 1 / (self.window * self.pairs_per_token * squared_key)
        deep = 1.0 if self.momentum else 0.5
        chain = self.spec.network.chain
        maps = len(self.spec.network.shapes() if chain is None else chain.groups)
        steep = maps > 2 or (chain is not None and "geglu" in chain.activations)
        reach = 2.0 if maps == 1 else deep * (0.25 if steep else 1.0)
        reach *= rule.lr_scale(self.spec) / self.spec.loss.max_curvature(2 * (self.value_bound or 1.0))
        return reach / (self.chunk_size * self.window * self.pairs_per_token * squared_key)

    @property
    def initial_lr(self) -> float:
        """`lr_init`, or a value near the ceiling, which learns fastest; half of it for unit steps, which do not shrink with the error."""
        if self.lr_init is not None:
            return self.lr_init
        return self.effective_max_lr * (0.5 if self.spec.update_rule.unit_step else 0.9)


check_fields = NeuralMemoryConfig.check_names  # raises a ValueError for a name that is no field


def is_number(value) -> bool:
    """Whether the value is a float, or a whole number that a float holds exactly."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= 2**53)
