"""Memory layers by other implementations' names and keywords. Shapes: B batch, T time, H heads."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import memory as engine
from ...memory.newton_schulz import NS_COEFFICIENTS
from ...memory.scan import Trace
from ..config import MEMORY_FIELDS
from ..keywords import accept, renamed, strict
from . import unsupported

if TYPE_CHECKING:
    from .configs import AtlasConfig

POLY_MODES = {
    "off": "identity",
    "elementwise": "elementwise",
    "tensor": "tensor",
    "polysketch": "sketch",
    "elementwise_concat": "elementwise_concat",
}
RENAMED = {
    "d_key": "key_dim",
    "d_value": "value_dim",
    "num_memory_layers": "depth",
    "use_momentum": "momentum",
    "use_forget_gate": "retain",
    "omega_window": "window",
    "conv_kernel_size": "conv_width",
    "muon_momentum": "momentum_init",
    "muon_nesterov": "nesterov",
    "num_kv_per_token": "pairs_per_token",
}
SWITCHES: dict[str, tuple[str, dict[bool, Any]]] = {  # keyword -> field, and its value for True and False
    "use_omega_gate": ("gate", {True: "token", False: "none"}),
    "use_muon_optimizer": ("rule", {True: "muon", False: "gd"}),
    "spectral_norm_surprises": ("rule", {True: "muon"}),
    "qk_rmsnorm": ("qk_norm", {True: "rms"}),
    "use_l2_norm_keys": ("qk_norm", {True: "l2", False: "none"}),
    "use_conv": ("conv_width", {False: 0}),
    "use_qkv_convs": ("conv_width", {False: 0}),
}
OMEGA = ("omega_window", "use_omega_gate", "poly_mode", "poly_degree", "use_muon_optimizer")
KEYWORDS = (*RENAMED, *SWITCHES, "poly_mode", "poly_degree", "poly_sketch_size", "memory_hidden_dim", "dim_head")


class Surprises(NamedTuple):
    """momentary: (B, T, H), norm of each token's gradient, summed over its window. past: (B, T, H), norm of the momentum after it.
    loss: (B, T, H), the token's loss before it is written. All are detached."""

    momentary: Tensor
    past: Tensor
    loss: Tensor

    @classmethod
    def of(cls, traces: list[Trace], skip: int = 0) -> Surprises:
        """The surprises of consecutive calls, without the first `skip` tokens."""
        names = "gradient_norm", "momentum_norm", "surprise"
        return cls(*(torch.cat([getattr(trace, name) for trace in traces], 1)[:, skip:] for name in names))


class Choices:
    """Fields of ours, each with the keyword that set it: two keywords that set one field differently raise a ValueError."""

    def __init__(self):
        self.fields: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def set(self, field: str, value: Any, source: str) -> None:
        if field in self.fields and self.fields[field] != value:
            raise ValueError(f"{self.sources[field]} and {source} both set {field}, to different values: give one")
        self.fields[field], self.sources[field] = value, source


def translate_memory(owner: str, width: int, given: dict[str, Any]) -> Choices:
    """Keywords of other implementations' memories, or of ours, as fields of `NeuralMemoryConfig`. None leaves a choice to us."""
    given = accept(owner, given, (*KEYWORDS, *MEMORY_FIELDS), unsupported.MEMORY)
    theirs = {name: value for name, value in given.items() if value is not None and name in KEYWORDS}
    choices = Choices()
    for name, value in theirs.items():
        if name in SWITCHES:
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be True or False")
            field, values = SWITCHES[name]
            if value in values:
                choices.set(field, values[value], name)
        elif name in RENAMED:
            choices.set(RENAMED[name], value, name)
        elif name == "dim_head":
            choices.set("key_dim", value, name)
            choices.set("value_dim", value, name)
    _polynomial(choices, **{name: theirs.get(name) for name in ("poly_mode", "poly_degree", "poly_sketch_size")})
    for name, value in given.items():
        if name not in KEYWORDS:
            choices.set(name, value, name)
    if isinstance(width, int) and type(theirs.get("d_value")) is int and theirs["d_value"] > 0:
        choices.fields.setdefault("heads", max(1, width // theirs["d_value"]))
    if "memory_hidden_dim" in theirs:
        per_head = choices.fields.get("value_dim")
        if per_head is None:
            raise ValueError(f"memory_hidden_dim={theirs['memory_hidden_dim']!r} needs d_value, the width of a head")
        choices.set("expansion", _width("memory_hidden_dim", theirs) / per_head, "memory_hidden_dim")
    return choices


def _polynomial(choices: Choices, poly_mode, poly_degree, poly_sketch_size) -> None:
    if poly_mode is not None and poly_mode not in POLY_MODES:
        raise ValueError(f"poly_mode={poly_mode!r} is unknown; choose one of {', '.join(POLY_MODES)}")
    if poly_mode is None and poly_degree not in (None, 1):
        raise ValueError(f"poly_degree={poly_degree!r} needs poly_mode, one of {', '.join(POLY_MODES)}")
    if poly_degree is not None and (type(poly_degree) is not int or poly_degree < 1):
        raise ValueError(f"poly_degree={poly_degree!r} must be a whole number >= 1")
    if poly_sketch_size is not None:
        if poly_mode != "polysketch" or poly_degree == 1:
            raise ValueError(f"poly_sketch_size={poly_sketch_size!r} needs poly_mode='polysketch' and poly_degree > 1")
        choices.set("feature_dim", poly_sketch_size, "poly_sketch_size")
    if poly_mode in (None, "off") or poly_degree == 1:
        return
    degree = 2 if poly_degree is None else poly_degree
    if poly_mode == "tensor" and degree > 2:
        warnings.warn(f"poly_mode='tensor' has degree 2; poly_degree={degree} falls back to 2", stacklevel=5)
        degree = 2
    choices.set("features", POLY_MODES[poly_mode], "poly_mode")
    choices.set("degree", degree, "poly_degree")


def _width(name: str, given: dict[str, Any]) -> int:
    if type(given[name]) is not int or given[name] < 1:
        raise ValueError(f"{name}={given[name]!r} must be a whole number >= 1")
    return given[name]


class NeuralMemory(engine.NeuralMemory):
    """`NeuralMemory(dim=384, chunk_size=64)`, or `NeuralMemory(d_model=512, d_key=64, d_value=64, num_memory_layers=2, ...)`.

    Keywords: dim or d_model; heads, dim_head, d_key, d_value, num_memory_layers, memory_hidden_dim (of each head); use_momentum,
    use_forget_gate, use_l2_norm_keys, qk_rmsnorm, use_conv, use_qkv_convs, conv_kernel_size; omega_window, use_omega_gate,
    poly_mode (off, elementwise, tensor, polysketch, elementwise_concat), poly_degree, poly_sketch_size; use_muon_optimizer,
    spectral_norm_surprises, muon_momentum, muon_nesterov; num_kv_per_token; and every field of `NeuralMemoryConfig`.

    >>> memory = NeuralMemory(d_model=64, d_key=16, d_value=16, num_memory_layers=2, use_momentum=True, use_forget_gate=True)
    >>> y, state = memory(torch.randn(1, 9, 64))
    >>> y, state = memory(torch.randn(1, 9, 64), memory_state=state)
    """

    def __init__(self, dim: int | None = None, *, d_model: int | None = None, **keywords):
        width = d_model if dim is None else dim
        if width is None or None not in (dim, d_model):
            raise ValueError("give the width as dim or as d_model")
        choices = translate_memory(type(self).__name__, width, keywords)
        with renamed(choices.sources if dim is not None else choices.sources | {"dim": "d_model"}):
            super().__init__(width, **choices.fields)

    @strict(unsupported.MEMORY_CALL)
    def forward(
        self,
        x: Tensor,
        state: engine.MemoryState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        trace: bool = False,
        ns_steps: int | None = None,
        write_mask: Tensor | None = None,
        kv: Tensor | None = None,
        memory_state: engine.MemoryState | None = None,
        return_memory_state: bool = True,
        detach_mem_state: bool = False,
        return_surprises: bool = False,
        store_mask: Tensor | None = None,
        store_seq: Tensor | None = None,
    ):
        """x (B, T, dim) -> y (B, T, dim) and the state; with `return_surprises`, also the `Surprises` of every token.

        store_mask is write_mask, and store_seq (B, T, dim) is kv, by titans-pytorch's names.
        """
        for ours, theirs, name in (
            (state, memory_state, "state and memory_state"),
            (write_mask, store_mask, "write_mask and store_mask"),
            (kv, store_seq, "kv and store_seq"),
        ):
            if ours is not None and theirs is not None:
                raise ValueError(f"{name} are the same: give one")
        if trace and return_surprises:
            raise ValueError("trace=True has the surprises too: leave return_surprises out")
        state = memory_state if state is None else state
        write_mask, kv = store_mask if write_mask is None else write_mask, store_seq if kv is None else kv
        y, state, *record = super().forward(
            x, state, mask, cu_seqlens, trace or return_surprises, ns_steps, write_mask, kv
        )
        kept = (state.detach() if detach_mem_state else state) if return_memory_state else None
        return y, kept, *([Surprises.of(record)] if return_surprises else record)


class DeepMemoryModule(engine.NeuralMemory):
    """A memory of `num_layers` maps, `hidden_dim` wide over all heads. Also takes other fields of `NeuralMemoryConfig`.

    >>> y, state = DeepMemoryModule(input_dim=64, hidden_dim=32, num_layers=3)(torch.randn(1, 9, 64))
    """

    def __init__(self, input_dim: int, hidden_dim: int = 512, num_layers: int = 2, **fields):
        given = {"hidden_dim": hidden_dim, "num_layers": num_layers, "input_dim": input_dim}
        known = [name for name in MEMORY_FIELDS if name not in ("structure", "depth", "expansion")]
        accept(type(self).__name__, given | fields, [*given, *known])
        expansion = _width("hidden_dim", given) / _width("input_dim", given)
        with renamed({"dim": "input_dim", "depth": "num_layers"}):
            super().__init__(input_dim, structure="mlp", depth=num_layers, expansion=expansion, **fields)


class AtlasAttention(engine.NeuralMemory):
    """The layer of an Atlas model: polynomial features, deep memory, Omega rule and Muon, as the config has them.

    >>> from mnemos.compat import AtlasConfig
    >>> layer = AtlasAttention(AtlasConfig(hidden_size=64, context_window_size=4))
    >>> layer(torch.randn(1, 9, 64)).shape
    torch.Size([1, 9, 64])
    """

    @strict()
    def __init__(self, config: AtlasConfig):
        super().__init__(config.translated().memory_config)

    @strict()
    def forward(  # ty: ignore[incompatible-method-override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        memory_state: engine.MemoryState | None = None,
        return_memory_state: bool = False,
    ):
        """(B, T, dim) -> (B, T, dim), and the state where asked for. attention_mask: (B, T), 0 for tokens to skip."""
        mask = None if attention_mask is None else attention_mask.to(torch.bool)
        y, state, *_ = super().forward(hidden_states, memory_state, mask)
        return (y, state) if return_memory_state else y


class AtlasMemoryUpdate(nn.Module):
    """One write of the Omega rule into any network, by Muon or by gradient descent.

    The layers of our models do the same for every token, window and head at once, and forget: this is the rule alone, for networks of
    your own.

    >>> from mnemos.compat import AtlasConfig
    >>> update = AtlasMemoryUpdate(AtlasConfig(hidden_size=64, learning_rate_inner=0.1, momentum_beta=0.9))
    >>> memory, keys, values = nn.Linear(4, 4), torch.randn(3, 4), torch.randn(3, 4)
    >>> weights, momentum = update.omega_rule_update(memory, keys, values, torch.ones(3))
    >>> weights["weight"].shape
    torch.Size([4, 4])
    """

    @strict()
    def __init__(self, config: AtlasConfig):
        super().__init__()
        choices = config.translated().memory_config
        self.rule, self.lr, self.momentum = choices.rule, choices.initial_lr, choices.initial_momentum
        self.steps, self.coefficients = choices.ns_steps, NS_COEFFICIENTS[choices.ns_coefficients]
        self.has_momentum, self.nesterov = choices.momentum, getattr(choices, "nesterov", False)

    def compute_attentional_bias(self, memory: nn.Module, keys: Tensor, values: Tensor) -> Tensor:
        """‖memory(k) - v‖²: keys (..., d_in), values (..., d_out) -> (...)."""
        return (memory(keys) - values).square().sum(-1)

    @strict()
    def omega_rule_update(
        self,
        memory: nn.Module,
        context_keys: Tensor,
        context_values: Tensor,
        gamma_weights: Tensor,
        momentum: dict[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and momentum after one step on Σ γ_i ‖memory(k_i) - v_i‖², by name; `memory` stays as it is.

        context_keys: (c, ..., d_in). context_values: (c, ..., d_out). gamma_weights: (c,). momentum: as the last step returned it.
        """
        named = dict(memory.named_parameters())
        loss = self.compute_attentional_bias(memory, context_keys, context_values)
        total = (gamma_weights * loss.flatten(1).mean(1) if loss.dim() > 1 else gamma_weights * loss).sum()
        gradients = dict(zip(named, torch.autograd.grad(total, list(named.values()))))
        decay = self.momentum if momentum and self.has_momentum else 0.0
        sums = {name: g + decay * (momentum or {}).get(name, torch.zeros_like(g)) for name, g in gradients.items()}
        ahead = {name: gradients[name] + self.momentum * s for name, s in sums.items()} if self.nesterov else sums
        steps = {name: self._step(s) for name, s in ahead.items()}
        return {name: w.detach() - self.lr * steps[name] for name, w in named.items()}, sums

    def _step(self, s: Tensor) -> Tensor:
        if self.rule == "muon" and s.dim() == 2:
            return engine.newton_schulz(s, self.steps, self.coefficients)
        return s
