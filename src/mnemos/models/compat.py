"""Other implementations' names and keywords for our models: their snippets run by changing the import. Only arguments are translated.

`MemoryAs…Transformer`, `AtlasLMM`: num_tokens, dim, depth, …, with `return_loss=True` and `.sample(...)`. `TitansLM`, `Atlas`, `OmegaNet`,
`DeepTransformer`: a `TitansConfig` or `AtlasConfig`, with either family of keywords. `NeuralMemory`: both signatures.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import memory as engine
from .config import MnemosConfig
from .model import MnemosForCausalLM

POLY_MODES = {"off": "identity", "elementwise": "elementwise", "tensor": "tensor", "polysketch": "sketch"}
LIFTED = {2: 16, 3: 8, 4: 6}  # key dims whose monomials of that degree are a few hundred


class NeuralMemory(engine.NeuralMemory):
    """`NeuralMemory(dim=384, chunk_size=64)`, or `NeuralMemory(d_model=512, d_key=64, d_value=64, num_memory_layers=2, ...)`.

    >>> memory = NeuralMemory(d_model=64, d_key=16, d_value=16, num_memory_layers=2, use_momentum=True, use_forget_gate=True)
    >>> y, state = memory(torch.randn(1, 9, 64))
    >>> y, state = memory(torch.randn(1, 9, 64), memory_state=state)
    """

    def __init__(
        self,
        dim: int | None = None,
        *,
        d_model: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        num_memory_layers: int | None = None,
        use_momentum: bool | None = None,
        use_forget_gate: bool | None = None,
        omega_window: int | None = None,
        use_omega_gate: bool | None = None,
        poly_mode: str | None = None,
        poly_degree: int | None = None,
        use_muon_optimizer: bool | None = None,
        **fields,
    ):
        width = d_model if dim is None else dim
        if width is None or None not in (dim, d_model):
            raise ValueError("give the width as dim or as d_model")
        if d_value is not None:
            fields.setdefault("heads", max(1, width // d_value))
        renamed = {
            "key_dim": d_key,
            "value_dim": d_value,
            "depth": num_memory_layers,
            "momentum": use_momentum,
            "retain": use_forget_gate,
        }
        options = _omega(omega_window, use_omega_gate, poly_mode, poly_degree, use_muon_optimizer)
        super().__init__(width, **{k: v for k, v in renamed.items() if v is not None} | options | fields)

    def forward(self, x: Tensor, state=None, *args, memory_state=None, **kwargs):
        return super().forward(x, state if memory_state is None else memory_state, *args, **kwargs)


class _Transformer(MnemosForCausalLM):
    """What num_tokens, dim, depth, … mean, whatever the block. Layers are counted from 1 in `neural_memory_layers`."""

    block = "lmm"

    def __init__(
        self,
        config: MnemosConfig | None = None,
        *,
        num_tokens: int | None = None,
        dim: int | None = None,
        depth: int | None = None,
        segment_len: int = 64,
        window_size: int = 64,
        num_persist_mem_tokens: int = 0,
        num_longterm_mem_tokens: int = 0,
        neural_memory_layers: tuple[int, ...] | None = None,
        omega_window: int | None = None,
        use_omega_gate: bool | None = None,
        poly_degree: int | None = None,
        poly_mode: str | None = None,
        use_muon_optimizer: bool | None = None,
        heads: int = 8,
        dim_head: int = 64,
        neural_memory_kwargs: dict[str, Any] | None = None,
        **fields,
    ):
        if config is not None:  # from_pretrained
            super().__init__(config)
            return
        if None in (num_tokens, dim, depth):
            raise ValueError(f"{type(self).__name__} needs num_tokens, dim and depth")
        options = _omega(omega_window, use_omega_gate, poly_mode, poly_degree, use_muon_optimizer)
        choices: dict[str, Any] = {
            "vocab_size": num_tokens,
            "hidden_size": dim,
            "num_hidden_layers": depth,
            "layers": self.block,
            "segment_length": segment_len,
            "attention_window": window_size,
            "num_persistent_tokens": num_persist_mem_tokens,
            "num_longterm_tokens": num_longterm_mem_tokens,
            "num_attention_heads": heads,
            "head_dim": dim_head,
            "memory_layers": None if neural_memory_layers is None else [i - 1 for i in neural_memory_layers],
            "memory": options | (neural_memory_kwargs or {}),
        }
        super().__init__(MnemosConfig(**choices | fields))

    def forward(self, input_ids: Tensor | None = None, *args, return_loss: bool = False, **kwargs):
        """As any model of ours; `return_loss=True` gives the loss of predicting every next token, alone."""
        if return_loss:
            return super().forward(input_ids, *args, labels=input_ids, return_logits=False, **kwargs).loss
        return super().forward(input_ids, *args, **kwargs)

    def sample(
        self,
        prompt: Tensor,
        seq_len: int,
        use_cache: bool = True,
        temperature: float = 1.5,
        min_p: float = 0.1,
        **options,
    ) -> Tensor:
        """A continuation of prompt (B, T) up to a total length of seq_len, without the prompt: (B, seq_len - T)."""
        new = seq_len - prompt.shape[1]
        if new < 1:
            raise ValueError(f"seq_len={seq_len} counts the prompt too, which has {prompt.shape[1]} tokens already")
        how = {"do_sample": True, "temperature": temperature, "min_p": min_p} if temperature else {"do_sample": False}
        tokens = self.generate(prompt, max_new_tokens=new, use_cache=use_cache, **how | options)
        return tokens[:, prompt.shape[1] :]


class MemoryAsContextTransformer(_Transformer):
    """Titans' MAC; with the Omega options, Atlas' or OmegaNet's.

    >>> model = MemoryAsContextTransformer(num_tokens=256, dim=32, depth=1, segment_len=8, num_longterm_mem_tokens=2)
    >>> ids = torch.randint(0, 256, (1, 23))
    >>> loss = model(ids, return_loss=True)
    >>> model.sample(ids[:, :4], 10).shape
    torch.Size([1, 6])
    """

    block = "mac"


class MemoryAsGateTransformer(_Transformer):
    """MAG: sliding-window attention and memory, joined by a gate."""

    block = "mag"


class MemoryAsLayerTransformer(_Transformer):
    """MAL: memory, then sliding-window attention."""

    block = "mal"


class AtlasLMM(_Transformer):
    """Memory alone."""

    block = "lmm"


@dataclass
class TitansConfig:
    """d_model, num_layers, variant ("MAC", "MAG" or "MAL"), vocab_size, …; chunk_size is MAC's segment."""

    d_model: int = 512
    num_layers: int = 12
    variant: str = "MAG"
    vocab_size: int = 32000
    num_heads: int = 8
    d_head: int | None = None
    chunk_size: int = 512
    window_size: int = 512
    num_persistent_tokens: int = 8
    num_memory_layers: int = 2
    use_momentum: bool = True
    use_forget_gate: bool = True
    dropout: float = 0.0
    init_std: float = 0.02

    def translated(self, **overrides) -> MnemosConfig:
        """The same as a `MnemosConfig`."""
        if self.variant.lower() not in ("mac", "mag", "mal", "lmm"):
            raise ValueError(f"variant={self.variant!r} is unknown; choose one of MAC, MAG, MAL, LMM")
        fields: dict[str, Any] = {
            "layers": self.variant.lower(),
            "hidden_size": self.d_model,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "num_attention_heads": self.num_heads,
            "head_dim": self.d_head,
            "segment_length": self.chunk_size,
            "attention_window": self.window_size,
            "num_persistent_tokens": self.num_persistent_tokens,
            "dropout": self.dropout,
            "initializer_range": self.init_std,
            "memory": {
                "heads": self.num_heads,
                "depth": self.num_memory_layers,
                "momentum": self.use_momentum,
                "retain": self.use_forget_gate,
            },
        }
        return MnemosConfig(**fields | overrides)


@dataclass
class AtlasConfig:
    """d_model, num_layers, context_window, polynomial_degree, vocab_size, …; hidden_size and context_window_size say the same.

    >>> AtlasConfig(hidden_size=64, num_layers=2, context_window_size=8, vocab_size=100).translated().memory["window"]
    8
    """

    d_model: int | None = None
    num_layers: int = 12
    context_window: int | None = None
    polynomial_degree: int = 2
    vocab_size: int = 32000
    hidden_size: int | None = None
    context_window_size: int | None = None
    memory_depth: int = 2
    use_muon_optimizer: bool = True
    use_momentum: bool = True
    num_heads: int | None = None
    num_persistent_tokens: int = 0
    window_size: int = 512
    variant: str = "LMM"
    dropout: float = 0.0

    def __post_init__(self):
        if self.d_model is not None and self.hidden_size is not None:
            raise ValueError("d_model and hidden_size are the same: give one")
        if self.context_window is not None and self.context_window_size is not None:
            raise ValueError("context_window and context_window_size are the same: give one")

    def translated(self, **overrides) -> MnemosConfig:
        """The same as a `MnemosConfig`. polynomial_degree 1, use_muon_optimizer False, memory_depth 1 and a window of 1 are ablations."""
        width = self.d_model or self.hidden_size or 512
        heads = self.num_heads or max(1, width // 64)
        memory: dict[str, Any] = {
            "heads": heads,
            "structure": "mlp" if self.memory_depth > 1 else "linear",
            "depth": self.memory_depth,
            "rule": "muon" if self.use_muon_optimizer else "gd",
            "momentum": self.use_momentum,
            "window": self.context_window or self.context_window_size or 64,
            "gate": "token",
        }
        if self.polynomial_degree > 1:
            key = LIFTED.get(self.polynomial_degree, 4)
            memory |= {"features": "monomials", "degree": self.polynomial_degree, "key_dim": key}
        fields: dict[str, Any] = {
            "layers": self.variant.lower(),
            "hidden_size": width,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "num_attention_heads": heads,
            "attention_window": self.window_size,
            "num_persistent_tokens": self.num_persistent_tokens,
            "dropout": self.dropout,
        }
        memory |= overrides.pop("memory", {})
        fields["memory"] = memory
        return MnemosConfig(**fields | overrides)


class _FromConfig(MnemosForCausalLM):
    """A model from a `TitansConfig` or `AtlasConfig`; its outputs are ours, and `memory_states` is the cache."""

    def __init__(self, config: TitansConfig | AtlasConfig | MnemosConfig):
        super().__init__(config if isinstance(config, MnemosConfig) else self.translate(config))

    @classmethod
    def translate(cls, config: TitansConfig | AtlasConfig) -> MnemosConfig:
        return config.translated()

    def forward(self, *args, memory_states=None, **kwargs):
        if memory_states is not None:
            kwargs["past_key_values"] = memory_states
        out = super().forward(*args, **kwargs)
        if not isinstance(out, tuple) and out.past_key_values is not None:
            out["memory_states"] = out.past_key_values
        return out


class TitansLM(_FromConfig):
    """Titans' MAC, MAG or MAL.

    >>> model = TitansLM(TitansConfig(d_model=64, num_layers=1, vocab_size=50, num_heads=2), variant="MAG")
    >>> ids = torch.randint(0, 50, (1, 7))
    >>> sorted(model.eval()(input_ids=ids, labels=ids).keys())
    ['logits', 'loss', 'memory_states', 'past_key_values']
    """

    def __init__(self, config: TitansConfig | MnemosConfig, variant: str | None = None):
        if variant is not None and isinstance(config, TitansConfig):
            if config.variant.lower() not in (variant.lower(), TitansConfig.variant.lower()):
                raise ValueError(f"variant={variant!r}, but the config says {config.variant!r}")
            config = dataclasses.replace(config, variant=variant)
        super().__init__(config)


class Atlas(_FromConfig):
    """Omega rule, polynomial features, Muon."""


class OmegaNet(_FromConfig):
    """Omega rule and polynomial features under gradient descent."""

    @classmethod
    def translate(cls, config: TitansConfig | AtlasConfig) -> MnemosConfig:
        return dataclasses.replace(_atlas(config), use_muon_optimizer=False, use_momentum=False).translated()


class DeepTransformer(_FromConfig):
    """Deep Hebbian memory over the kernel of softmax attention."""

    @classmethod
    def translate(cls, config: TitansConfig | AtlasConfig) -> MnemosConfig:
        plain = dataclasses.replace(_atlas(config), use_muon_optimizer=False, use_momentum=False, polynomial_degree=1)
        kernel = {"features": "exp", "objective": "dot", "window": 1, "gate": "none", "retain": False}
        return plain.translated(memory=kernel)


def _atlas(config: TitansConfig | AtlasConfig) -> AtlasConfig:
    if not isinstance(config, AtlasConfig):
        raise ValueError(f"config is a {type(config).__name__}, but must be an AtlasConfig")
    return config


class PolynomialFeatures(nn.Module):
    """All monomials of x (..., input_dim) up to `degree`: -> (..., C(input_dim + degree, degree)).

    >>> PolynomialFeatures(input_dim=64, degree=2)(torch.randn(3, 64)).shape
    torch.Size([3, 2145])
    """

    def __init__(self, input_dim: int, degree: int = 2):
        super().__init__()
        spec = engine.MemorySpec(
            key_dim=input_dim, value_dim=1, structure="linear", features="monomials", degree=degree
        )
        self.map = engine.make_features(spec, heads=1) or nn.Identity()
        self.output_dim = spec.lifted_dim

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x.reshape(1, -1, 1, x.shape[-1])).reshape(*x.shape[:-1], -1)


class PolynomialFeatureMap(nn.Module):
    """Element-wise powers side by side, [a_1 x, a_2 x², …], a_i learned from 1/i! on: (..., input_dim) -> (..., degree * input_dim).

    >>> PolynomialFeatureMap(input_dim=64, degree=5)(torch.randn(3, 64)).shape
    torch.Size([3, 320])
    """

    def __init__(self, input_dim: int, degree: int = 3):
        super().__init__()
        self.output_dim = input_dim * degree
        self.coefficients = nn.Parameter(torch.tensor([1.0 / math.factorial(i) for i in range(1, degree + 1)]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([a * x**i for i, a in enumerate(self.coefficients, start=1)], dim=-1)


class DeepMemoryModule(engine.NeuralMemory):
    """A memory of `num_layers` maps, `hidden_dim` wide over all heads.

    >>> y, state = DeepMemoryModule(input_dim=64, hidden_dim=32, num_layers=3)(torch.randn(1, 9, 64))
    """

    def __init__(self, input_dim: int, hidden_dim: int = 512, num_layers: int = 2, **fields):
        super().__init__(input_dim, structure="mlp", depth=num_layers, expansion=hidden_dim / input_dim, **fields)


def titans_small(**fields: Any) -> TitansConfig:
    return dataclasses.replace(TitansConfig(d_model=768, num_layers=12, num_heads=12), **fields)


def titans_medium(**fields: Any) -> TitansConfig:
    return dataclasses.replace(TitansConfig(d_model=1024, num_layers=24, num_heads=16), **fields)


def titans_large(**fields: Any) -> TitansConfig:
    return dataclasses.replace(TitansConfig(d_model=1536, num_layers=24, num_heads=16), **fields)


def atlas_small(**fields: Any) -> AtlasConfig:
    return dataclasses.replace(AtlasConfig(d_model=768, num_layers=12, num_heads=12), **fields)


def _omega(window, gate, mode, degree, muon) -> dict[str, Any]:
    """The Omega options as choices of a memory; None leaves Titans' own."""
    if mode is not None and mode not in POLY_MODES:
        raise ValueError(f"poly_mode={mode!r} is unknown; choose one of {', '.join(POLY_MODES)}")
    choices: dict[str, Any] = {}
    if window is not None:
        choices["window"] = window
    if gate is not None:
        choices["gate"] = "token" if gate else "none"
    if muon is not None:
        choices["rule"] = "muon" if muon else "gd"
    if mode not in (None, "off") and degree != 1:
        choices |= {"features": POLY_MODES[mode], "degree": degree or 2}
    return choices
