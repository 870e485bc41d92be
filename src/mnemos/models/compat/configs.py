"""`TitansConfig` and `AtlasConfig`, and the sizes that other implementations name. None leaves a choice to us."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ...memory import NeuralMemoryConfig
from ..config import MnemosConfig
from ..keywords import refuse_unknown, renamed, strict
from . import unsupported

VARIANTS = ("MAC", "MAG", "MAL", "LMM")
LIFTED = {2: 16, 3: 8, 4: 6}  # key dims whose monomials of that degree are a few hundred
WINDOW = 512  # of attention, and the segment of MAC


class ForeignConfig:
    """Base of both configs: names are checked when they are set, values when a config is made and when it is translated."""

    variant: str | None
    default_variant = "MAG"

    def __post_init__(self):
        self.translated(check_effect=False)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_unknown(type(self).__name__, [name], (field.name for field in dataclasses.fields(self)))  # ty: ignore[invalid-argument-type]
        super().__setattr__(name, value)

    def translated(self, check_effect: bool = True, **overrides) -> MnemosConfig:
        raise NotImplementedError

    def check_switches(self) -> None:
        for field in dataclasses.fields(self):  # ty: ignore[invalid-argument-type]
            allowed = {"bool": (bool,), "bool | None": (bool, type(None))}.get(str(field.type))
            if allowed and not isinstance(getattr(self, field.name), allowed):
                raise ValueError(f"{field.name}={getattr(self, field.name)!r} must be True or False")

    @property
    def block(self) -> str:
        """The block of every layer."""
        variant = self.default_variant if self.variant is None else self.variant
        if not isinstance(variant, str) or variant.upper() not in VARIANTS:
            raise ValueError(f"variant={variant!r} is unknown; choose one of {', '.join(VARIANTS)}")
        return variant.lower()

    def refuse_without_effect(self, names: tuple[str, ...], applies: bool, reason: str) -> None:
        given = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None]
        if given and not applies:
            raise ValueError(f"{', '.join(given)} has no effect: {reason}")

    def check_block(self) -> None:
        """Raise a ValueError for settings of attention that the block does not use."""
        block = self.block
        self.refuse_without_effect(("chunk_size",), block == "mac", f"only MAC has segments, not {block.upper()}")
        self.refuse_without_effect(
            ("window_size",), block in ("mag", "mal"), f"only MAG and MAL have a sliding window, not {block.upper()}"
        )
        self.refuse_without_effect(("d_head",), block != "lmm", "LMM has no attention")


@strict(unsupported.CONFIG)
@dataclass
class TitansConfig(ForeignConfig):
    """d_model, num_layers, variant ("MAC", "MAG", "MAL" or "LMM"; None is MAG), vocab_size, …

    num_heads: of attention and of the memory. d_head: of attention. d_key, d_value, memory_hidden_dim: of each head of the memory.
    chunk_size: MAC's segment; window_size: of MAG's and MAL's attention; None is 512. ffn_hidden_dim: None is 8/3 of d_model.
    init_std: standard deviation that all linear maps and embeddings are drawn with.

    >>> TitansConfig(d_model=64, num_layers=2, variant="MAC", chunk_size=128).translated().segment_length
    128
    """

    d_model: int = 512
    num_layers: int = 12
    variant: str | None = None
    vocab_size: int = 32000
    num_heads: int = 8
    d_head: int | None = None
    d_key: int | None = None
    d_value: int | None = None
    chunk_size: int | None = None
    window_size: int | None = None
    num_persistent_tokens: int = 8
    num_memory_layers: int = 2
    memory_hidden_dim: int | None = None
    use_momentum: bool = True
    use_forget_gate: bool = True
    use_l2_norm_keys: bool = True
    use_qkv_conv: bool = True
    conv_kernel_size: int | None = None
    ffn_hidden_dim: int | None = None
    dropout: float = 0.0
    init_std: float = 0.02

    def translated(self, check_effect: bool = True, **overrides) -> MnemosConfig:
        """The same as a `MnemosConfig`."""
        self.check_switches()
        if check_effect:
            self.check_block()
        self.refuse_without_effect(("conv_kernel_size",), self.use_qkv_conv, "use_qkv_conv=False")
        memory: dict[str, Any] = {
            "heads": self.num_heads,
            "depth": self.num_memory_layers,
            "momentum": self.use_momentum,
            "retain": self.use_forget_gate,
        }
        if not self.use_l2_norm_keys:
            memory["qk_norm"] = "none"
        if not self.use_qkv_conv or self.conv_kernel_size is not None:
            memory["conv_width"] = self.conv_kernel_size if self.use_qkv_conv else 0
        memory |= {
            ours: value for ours, value in (("key_dim", self.d_key), ("value_dim", self.d_value)) if value is not None
        }
        fields = _model_fields(self, self.d_model, self.num_heads)
        with renamed(TITANS_NAMES):
            fields["memory"] = memory | _hidden_width("memory_hidden_dim", self.memory_hidden_dim, self.d_model, memory)
            return MnemosConfig(**fields | overrides)


@strict(unsupported.ATLAS_CONFIG)
@dataclass
class AtlasConfig(ForeignConfig):
    """d_model, num_layers, context_window, polynomial_degree, vocab_size, …; hidden_size and context_window_size mean the same.

    variant: "MAC", "MAG", "MAL" or "LMM" (None). context_window: of the Omega rule, None is 64. memory_hidden_size: of each head.
    learning_rate_inner, momentum_beta or muon_momentum: values of the gates before training. use_momentum: None is True.
    learnable_decay_weights: tokens of a window are weighted by a gate of the token (None, True), or by a base to the power of the lag
    that is learned from exp(-1 / context_window) on (False). polynomial_degree: None is 2, and 1 is none; use_polynomial_features=False
    is the same. taylor_expansion_order: of `DeepTransformer`'s kernel, in place of the exponential.
    Ablations: polynomial_degree=1, use_muon_optimizer=False, memory_depth=1, context_window=1.

    >>> AtlasConfig(hidden_size=64, num_layers=2, context_window_size=8, vocab_size=100).translated().memory["window"]
    8
    """

    default_variant = "LMM"

    d_model: int | None = None
    num_layers: int = 12
    context_window: int | None = None
    polynomial_degree: int | None = None
    vocab_size: int = 32000
    hidden_size: int | None = None
    context_window_size: int | None = None
    memory_depth: int = 2
    memory_hidden_size: int | None = None
    use_muon_optimizer: bool | None = None
    use_momentum: bool | None = None
    use_forget_gate: bool | None = None
    use_polynomial_features: bool | None = None
    learnable_decay_weights: bool | None = None
    learning_rate_inner: float | None = None
    momentum_beta: float | None = None
    muon_momentum: float | None = None
    muon_nesterov: bool | None = None
    taylor_expansion_order: int | None = None
    num_heads: int | None = None
    d_head: int | None = None
    num_persistent_tokens: int = 0
    chunk_size: int | None = None
    window_size: int | None = None
    variant: str | None = None
    ffn_hidden_dim: int | None = None
    dropout: float = 0.0
    init_std: float = 0.02

    @property
    def width(self) -> int:
        """d_model or hidden_size, or 512."""
        return self._one_of("d_model", "hidden_size", 512)

    @property
    def window(self) -> int:
        """context_window or context_window_size, or 64."""
        return self._one_of("context_window", "context_window_size", 64)

    def _one_of(self, one: str, other: str, default: Any) -> Any:
        values = [value for value in (getattr(self, one), getattr(self, other)) if value is not None]
        if len(values) > 1:
            raise ValueError(f"{one} and {other} are the same: give one")
        return values[0] if values else default

    def translated(self, check_effect: bool = True, memory: dict[str, Any] | None = None, **overrides) -> MnemosConfig:
        """The same as a `MnemosConfig`; `memory` overrides choices of the memory."""
        self.check_switches()
        if check_effect:
            self.check_block()
            self.refuse_without_effect(
                ("taylor_expansion_order",),
                False,
                "DeepTransformer alone has a Taylor kernel; that of Atlas has the order polynomial_degree",
            )
        names = ATLAS_NAMES | {
            "hidden_size": "hidden_size" if self.d_model is None else "d_model",
            "window": "context_window_size" if self.context_window is None else "context_window",
        }
        width, window = self.width, self.window
        with renamed(names):
            heads = max(1, width // 64) if self.num_heads is None else self.num_heads
            choices = self._memory(heads, window) | (memory or {})
            fields = _model_fields(self, width, heads)
            fields["memory"] = choices
            return MnemosConfig(**fields | overrides)

    def _memory(self, heads: int, window: int) -> dict[str, Any]:
        muon = self.use_muon_optimizer is not False
        has_momentum = self.use_momentum is not False
        self.refuse_without_effect(("muon_momentum", "muon_nesterov"), muon, "use_muon_optimizer=False")
        start = self._one_of("momentum_beta", "muon_momentum", None)
        self.refuse_without_effect(("momentum_beta", "muon_momentum"), has_momentum, "use_momentum=False")
        memory: dict[str, Any] = {
            "heads": heads,
            "structure": "linear" if self.memory_depth == 1 else "mlp",
            "depth": self.memory_depth,
            "rule": "muon" if muon else "gd",
            "momentum": has_momentum,
            "window": window,
            "gate": "token",
        }
        if self.learnable_decay_weights is False:
            memory["gate"] = "none" if window == 1 else "decay"
            memory |= {"decay_init": math.exp(-1 / window)} if window > 1 else {}
        memory |= {} if self.use_forget_gate is None else {"retain": self.use_forget_gate}
        memory |= {} if start is None else {"momentum_init": start}
        memory |= {} if self.muon_nesterov is None else {"nesterov": self.muon_nesterov}
        memory |= _hidden_width("memory_hidden_size", self.memory_hidden_size, self.width, memory)
        memory |= self._features()
        if self.learning_rate_inner is not None:
            ceiling = NeuralMemoryConfig(self.width, **memory).effective_max_lr
            if not 0 < self.learning_rate_inner < ceiling:
                raise ValueError(
                    f"learning_rate_inner={self.learning_rate_inner!r} must lie between 0 and {ceiling:g}, the largest stable rate "
                    "of this memory (with Muon it is 1)"
                )
            memory["lr_init"] = self.learning_rate_inner
        return memory

    def _features(self) -> dict[str, Any]:
        degree = self.polynomial_degree
        if degree is not None and (type(degree) is not int or degree < 1):
            raise ValueError(f"polynomial_degree={degree!r} must be a whole number >= 1")
        if self.use_polynomial_features is False:
            self.refuse_without_effect(("polynomial_degree",), degree == 1, "use_polynomial_features=False")
            return {}
        degree = 2 if degree is None else degree
        return {} if degree == 1 else monomials(degree)

    @classmethod
    def small(cls, **fields) -> AtlasConfig:
        """512 wide, 8 layers, a window of 256 and degree 3."""
        return dataclasses.replace(
            cls(hidden_size=512, num_layers=8, memory_depth=2, polynomial_degree=3, context_window_size=256), **fields
        )

    @classmethod
    def medium(cls, **fields) -> AtlasConfig:
        """768 wide, 12 layers, a window of 512 and degree 3."""
        return dataclasses.replace(
            cls(hidden_size=768, num_layers=12, memory_depth=2, polynomial_degree=3, context_window_size=512), **fields
        )

    @classmethod
    def large(cls, **fields) -> AtlasConfig:
        """1024 wide, 24 layers, a window of 1024, degree 4 and memories of three maps."""
        return dataclasses.replace(
            cls(hidden_size=1024, num_layers=24, memory_depth=3, polynomial_degree=4, context_window_size=1024),
            **fields,
        )


TITANS_NAMES = {  # ours -> theirs
    "hidden_size": "d_model",
    "dim": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "heads": "num_heads",
    "head_dim": "d_head",
    "key_dim": "d_key",
    "value_dim": "d_value",
    "segment_length": "chunk_size",
    "attention_window": "window_size",
    "intermediate_size": "ffn_hidden_dim",
    "initializer_range": "init_std",
    "depth": "num_memory_layers",
    "expansion": "memory_hidden_dim",
    "conv_width": "conv_kernel_size",
    "momentum": "use_momentum",
    "retain": "use_forget_gate",
}
ATLAS_NAMES = {
    name: TITANS_NAMES[name] for name in TITANS_NAMES if name not in ("hidden_size", "key_dim", "value_dim")
} | {
    "dim": "hidden_size",
    "depth": "memory_depth",
    "expansion": "memory_hidden_size",
    "degree": "polynomial_degree",
    "lr_init": "learning_rate_inner",
    "momentum_init": "momentum_beta",
    "nesterov": "muon_nesterov",
}


def monomials(degree: int) -> dict[str, Any]:
    """Choices of a memory over all monomials up to `degree`, with keys short enough for a few hundred of them."""
    return {"features": "monomials", "degree": degree, "key_dim": LIFTED.get(degree, 4)}


def _model_fields(config: TitansConfig | AtlasConfig, width: int, heads: int) -> dict[str, Any]:
    """The fields of a `MnemosConfig` outside the memory."""
    return {
        "layers": config.block,
        "hidden_size": width,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "num_attention_heads": heads,
        "head_dim": config.d_head,
        "segment_length": WINDOW if config.chunk_size is None else config.chunk_size,
        "attention_window": WINDOW if config.window_size is None else config.window_size,
        "num_persistent_tokens": config.num_persistent_tokens,
        "intermediate_size": config.ffn_hidden_dim,
        "dropout": config.dropout,
        "initializer_range": config.init_std,
    }


def _hidden_width(name: str, hidden: int | None, width: int, memory: dict[str, Any]) -> dict[str, float]:
    """The `expansion` that makes hidden layers of each head `hidden` wide."""
    if hidden is None:
        return {}
    if type(hidden) is not int or hidden < 1:
        raise ValueError(f"{name}={hidden!r} must be a whole number >= 1")
    return {"expansion": hidden / NeuralMemoryConfig(width, **memory).spec.value_dim}


def titans_small(**fields: Any) -> TitansConfig:
    """768 wide, 12 layers, 12 heads."""
    return dataclasses.replace(TitansConfig(d_model=768, num_layers=12, num_heads=12), **fields)


def titans_medium(**fields: Any) -> TitansConfig:
    """1024 wide, 24 layers, 16 heads."""
    return dataclasses.replace(TitansConfig(d_model=1024, num_layers=24, num_heads=16), **fields)


def titans_large(**fields: Any) -> TitansConfig:
    """1536 wide, 24 layers, 16 heads."""
    return dataclasses.replace(TitansConfig(d_model=1536, num_layers=24, num_heads=16), **fields)


def atlas_small(**fields: Any) -> AtlasConfig:
    """768 wide, 12 layers, 12 heads, a window of 64 and degree 2; `AtlasConfig.small` is the other implementation's small."""
    return dataclasses.replace(AtlasConfig(d_model=768, num_layers=12, num_heads=12), **fields)


def atlas_medium(**fields: Any) -> AtlasConfig:
    """`AtlasConfig.medium`."""
    return AtlasConfig.medium(**fields)


def atlas_large(**fields: Any) -> AtlasConfig:
    """`AtlasConfig.large`."""
    return AtlasConfig.large(**fields)
