"""`TitansLM`, `Atlas`, `OmegaNet` and `DeepTransformer`, and the methods that all models of other names share."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Generator
from typing import Any

from torch import Tensor, nn
from transformers.utils import TransformersKwargs

from ...memory import NeuralMemory, Trace
from ...memory.gating import Gating
from ..config import MnemosConfig
from ..gate import Gate
from ..keywords import accept, strict
from ..model import MnemosForCausalLM
from . import unsupported
from .configs import AtlasConfig, ForeignConfig, TitansConfig, monomials
from .memory import Surprises

CALL = (  # keywords that transformers itself passes to a model, beside the arguments of `MnemosForCausalLM.forward`
    *(name for name in inspect.signature(MnemosForCausalLM.forward).parameters if name not in ("self", "kwargs")),
    *TransformersKwargs.__annotations__,
    *("return_dict", "cache_position", "token_type_ids", "is_first_iteration", "next_sequence_length"),
)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")


def extends(base):
    """Give a `forward` with *args and **kwargs the signature of `base`'s, and its own keywords: transformers' Trainer looks for labels."""

    def decorate(forward):
        *parameters, kwargs = inspect.signature(base.forward).parameters.values()
        names = {parameter.name for parameter in parameters}
        own = inspect.signature(forward).parameters.values()
        parameters += [p for p in own if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in names]
        forward.__signature__ = inspect.Signature([*parameters, kwargs])
        return forward

    return decorate


class ForeignModel(MnemosForCausalLM):
    """Base of all models of other names: checked keywords, `return_surprises`, and sampling if its options are given."""

    @extends(MnemosForCausalLM)
    def forward(self, input_ids: Tensor | None = None, *args, return_surprises: bool = False, **kwargs):
        """As any model of ours. `return_surprises=True` adds `surprises`: for each layer its memory's `Surprises`, or None."""
        kwargs = accept(f"{type(self).__name__}.forward", kwargs, CALL, unsupported.MODEL_CALL)
        if not return_surprises:
            return super().forward(input_ids, *args, **kwargs)
        if len(args) > 1 or kwargs.get("position_ids") is not None or kwargs.get("cu_seqlens") is not None:
            raise ValueError(
                "return_surprises needs whole sequences, and cannot be combined with position_ids or cu_seqlens"
            )
        mask = args[0] if args else kwargs.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            raise ValueError("return_surprises needs whole sequences without padding; read them one by one")
        begins = kwargs.get("past_key_values") is None
        with traced(self) as traces:
            out = super().forward(input_ids, *args, **kwargs)
        skip = self.config.num_persistent_tokens if begins else 0
        out["surprises"] = [Surprises.of(layer, skip) if layer else None for layer in traces]
        return out

    def generate(self, inputs: Tensor | None = None, *args, **kwargs):
        """transformers' `generate`. temperature, top_k, top_p, min_p or typical_p switch sampling on; temperature=0 is greedy."""
        given = {name: kwargs.pop(name) for name in SAMPLING if name in kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        if given and "do_sample" not in kwargs:
            kwargs["do_sample"] = given.get("temperature") != 0
        if kwargs.get("do_sample") and self.generation_config.top_k is None:
            given.setdefault("top_k", 0)  # transformers' own default keeps 50 tokens
        if given.get("temperature") == 0 and not kwargs.get("do_sample"):
            given = {}
        return super().generate(inputs, *args, **kwargs, **given)


@contextlib.contextmanager
def traced(model: MnemosForCausalLM) -> Generator[list[list[Trace]]]:
    """Every call of a memory inside records its trace: a list for each layer."""
    traces: list[list[Trace]] = [[] for _ in model.model.layers]
    hooks = []

    def listen(memory: NeuralMemory, record: list[Trace]) -> None:
        def before(module, args, kwargs):
            return args, {**kwargs, "trace": True}

        def after(module, args, output):
            record.append(output[2])
            return output[:2]

        hooks.append(memory.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(memory.register_forward_hook(after))

    try:
        for record, block in zip(traces, model.model.layers):
            for module in block.modules():
                if isinstance(module, NeuralMemory):
                    listen(module, record)
        yield traces
    finally:
        for hook in hooks:
            hook.remove()


class FromConfig(ForeignModel):
    """A model from a `TitansConfig` or `AtlasConfig`. Its outputs are ours, in training too, and `memory_states` is the cache."""

    def __init__(self, config: ForeignConfig | MnemosConfig):
        if isinstance(config, MnemosConfig):  # from_pretrained
            super().__init__(config)
            return
        super().__init__(self.translate(config))
        self.draw_maps()

    @classmethod
    def translate(cls, config: ForeignConfig) -> MnemosConfig:
        return atlas_config(cls, config).translated()

    def draw_maps(self) -> None:
        """Initialise all linear maps with the standard deviation of the embeddings. Gates keep their own initialisation."""
        gates = {id(part) for gate in self.modules() if isinstance(gate, Gating | Gate) for part in gate.modules()}
        for module in self.modules():
            if isinstance(module, nn.Linear) and id(module) not in gates:
                nn.init.normal_(module.weight, std=self.config.initializer_range)

    @extends(ForeignModel)
    def forward(self, *args, memory_states=None, **kwargs):
        """As any model of ours; logits and memory_states are returned while training too. memory_states: as an earlier call returned."""
        if memory_states is not None:
            if kwargs.get("past_key_values") is not None:
                raise ValueError("memory_states and past_key_values are the same: give one")
            kwargs["past_key_values"] = memory_states
        if self.training and kwargs.get("use_cache") is None:
            kwargs["use_cache"] = self.config.use_cache
        if kwargs.get("return_logits") is None:
            kwargs["return_logits"] = True
        out = super().forward(*args, **kwargs)
        if not isinstance(out, tuple) and out.past_key_values is not None:
            out["memory_states"] = out.past_key_values
        return out

    def generate(self, inputs: Tensor | None = None, *args, **kwargs):
        """`max_new_tokens` is 100 if no length is given."""
        lengths = ("max_new_tokens", "max_length", "generation_config", "max_time", "stopping_criteria")
        settings = self.generation_config
        given = any(name in kwargs for name in lengths) or settings.max_new_tokens or settings.max_length
        if not args and not given:
            kwargs["max_new_tokens"] = 100
        return super().generate(inputs, *args, **kwargs)


class TitansLM(FromConfig):
    """Titans' MAC, MAG, MAL or LMM, by the config or `variant`; with an `AtlasConfig`, of Atlas' memory.

    >>> import torch
    >>> model = TitansLM(TitansConfig(d_model=64, num_layers=1, vocab_size=50, num_heads=2), variant="MAG")
    >>> ids = torch.randint(0, 50, (1, 7))
    >>> sorted(model(input_ids=ids, labels=ids).keys())
    ['logits', 'loss', 'memory_states', 'past_key_values']
    """

    @strict()
    def __init__(self, config: TitansConfig | AtlasConfig | MnemosConfig, variant: str | None = None):
        if variant is not None:
            given = config.layers if isinstance(config, MnemosConfig) else getattr(config, "variant", None)
            if given is not None and str(variant).lower() != (given.lower() if isinstance(given, str) else given):
                raise ValueError(f"variant={variant!r}, but the config has {given!r}")
            if isinstance(config, ForeignConfig):
                config = dataclasses.replace(config, variant=variant)
        super().__init__(config)

    @classmethod
    def translate(cls, config: ForeignConfig) -> MnemosConfig:
        if not isinstance(config, ForeignConfig):
            raise ValueError(
                f"config is a {type(config).__name__}, but TitansLM needs a TitansConfig, an AtlasConfig or a MnemosConfig"
            )
        return config.translated()


class Atlas(FromConfig):
    """Omega rule, polynomial features, Muon."""

    @strict()
    def __init__(self, config: AtlasConfig | MnemosConfig):
        super().__init__(config)


class OmegaNet(FromConfig):
    """Omega rule and polynomial features under gradient descent; without momentum, unless use_momentum=True."""

    @strict()
    def __init__(self, config: AtlasConfig | MnemosConfig):
        super().__init__(config)

    @classmethod
    def translate(cls, config: ForeignConfig) -> MnemosConfig:
        config = atlas_config(cls, config)
        momentum = bool(config.use_momentum)
        plain = without(config, "OmegaNet has no Muon", "muon_momentum", "muon_nesterov", use_muon_optimizer=False)
        if not momentum:
            plain = without(plain, "OmegaNet has no momentum unless use_momentum=True", "momentum_beta")
        return dataclasses.replace(plain, use_momentum=momentum).translated()


class DeepTransformer(FromConfig):
    """Deep Hebbian memory over the kernel of softmax attention, or over its Taylor series up to `taylor_expansion_order`."""

    @strict()
    def __init__(self, config: AtlasConfig | MnemosConfig):
        super().__init__(config)

    @classmethod
    def translate(cls, config: ForeignConfig) -> MnemosConfig:
        config = atlas_config(cls, config)
        order = config.taylor_expansion_order
        if order is not None and (type(order) is not int or order < 1):
            raise ValueError(f"taylor_expansion_order={order!r} must be a whole number >= 1")
        plain = without(
            dataclasses.replace(config, taylor_expansion_order=None),
            "DeepTransformer has no window, polynomial features, momentum, forgetting or Muon",
            "muon_momentum",
            "muon_nesterov",
            "momentum_beta",
            "context_window",
            "context_window_size",
            "learnable_decay_weights",
            "use_polynomial_features",
            "polynomial_degree",
            use_muon_optimizer=False,
            use_momentum=False,
            use_forget_gate=False,
        )
        kernel = {"features": "exp"} if order is None else monomials(order)
        memory = {"objective": "dot", "window": 1, "gate": "none", "retain": False, "momentum": False}
        rate = {} if config.learning_rate_inner is None else {"lr_init": config.learning_rate_inner}
        plain = dataclasses.replace(plain, polynomial_degree=1, learning_rate_inner=None)
        return plain.translated(memory=memory | kernel | rate)


def atlas_config(owner: type, config: Any) -> AtlasConfig:
    if not isinstance(config, AtlasConfig):
        raise ValueError(f"config is a {type(config).__name__}, but {owner.__name__} needs an AtlasConfig")
    return config


def without(config: AtlasConfig, reason: str, *names: str, **switches: bool) -> AtlasConfig:
    """`config` with the fields `names` left to us and `switches` set; a warning names those that were given otherwise."""
    dropped = [name for name in names if getattr(config, name) is not None]
    dropped += [name for name, value in switches.items() if getattr(config, name) not in (None, value)]
    if dropped:
        given = ", ".join(f"{name}={getattr(config, name)!r}" for name in dropped)
        warnings.warn(f"{reason}: {given} has no effect", stacklevel=6)
    changes: dict[str, Any] = dict.fromkeys(names, None) | switches
    return dataclasses.replace(config, **changes)
