"""`MemoryAsContextTransformer` and its relatives: num_tokens, dim, depth, …, with `return_loss=True` and `.sample(...)`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..config import FIELDS, MEMORY_KEYWORDS, MnemosConfig
from ..keywords import Unsupported, accept, renamed
from . import unsupported
from .language_model import ForeignModel, extends
from .memory import OMEGA, translate_memory

NAMES = {  # ours -> theirs
    "vocab_size": "num_tokens",
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "segment_length": "segment_len",
    "attention_window": "window_size",
    "num_persistent_tokens": "num_persist_mem_tokens",
    "num_longterm_tokens": "num_longterm_mem_tokens",
    "num_attention_heads": "heads",
    "head_dim": "dim_head",
    "memory_layers": "neural_memory_layers",
    "intermediate_size": "ff_mult",
}
OTHER_NAMES = {ours: Unsupported(f"it is called {theirs} here") for ours, theirs in NAMES.items()}
OTHER_NAMES["intermediate_size"] = Unsupported("give ff_mult, three halves of intermediate_size / dim")
OTHER_NAMES["memory"] = Unsupported("it is called neural_memory_kwargs here")
OTHER_NAMES |= {
    name: Unsupported(f"give neural_memory_kwargs=dict({name.removeprefix('memory_')}=...)") for name in MEMORY_KEYWORDS
}
OTHER_NAMES |= {name: Unsupported("the class chooses the block of every layer") for name in ("layers", "qk_projection")}
OWN_FIELDS = tuple(name for name in FIELDS if name not in OTHER_NAMES)
NO_SEGMENTS = "only MemoryAsContextTransformer has segments and long-term tokens"


class Transformer(ForeignModel):
    """Translation of num_tokens, dim, depth, … for any block. Layers are counted from 1 in `neural_memory_layers`."""

    block = "lmm"
    without_effect: dict[str, str] = {}  # noqa: RUF012

    def __init__(
        self,
        config: MnemosConfig | None = None,
        *,
        num_tokens: int | None = None,
        dim: int | None = None,
        depth: int | None = None,
        segment_len: int | None = None,
        window_size: int | None = None,
        num_persist_mem_tokens: int | None = None,
        num_longterm_mem_tokens: int | None = None,
        neural_memory_layers: tuple[int, ...] | None = None,
        omega_window: int | None = None,
        use_omega_gate: bool | None = None,
        poly_degree: int | None = None,
        poly_mode: str | None = None,
        use_muon_optimizer: bool | None = None,
        heads: int | None = None,
        dim_head: int | None = None,
        ff_mult: float | None = None,
        neural_memory_kwargs: dict[str, Any] | None = None,
        **fields,
    ):
        given = {
            "num_tokens": num_tokens,
            "dim": dim,
            "depth": depth,
            "segment_len": segment_len,
            "window_size": window_size,
            "num_persist_mem_tokens": num_persist_mem_tokens,
            "num_longterm_mem_tokens": num_longterm_mem_tokens,
            "neural_memory_layers": neural_memory_layers,
            "heads": heads,
            "dim_head": dim_head,
            "ff_mult": ff_mult,
            "neural_memory_kwargs": neural_memory_kwargs,
        }
        memory = {
            "omega_window": omega_window,
            "use_omega_gate": use_omega_gate,
            "poly_degree": poly_degree,
            "poly_mode": poly_mode,
            "use_muon_optimizer": use_muon_optimizer,
        }
        given, memory = ({k: v for k, v in x.items() if v is not None} for x in (given, memory))
        if config is not None:  # from_pretrained
            if given or memory or fields:
                raise ValueError(f"{', '.join([*given, *memory, *fields])} cannot be given beside a config")
            super().__init__(config)
            return
        super().__init__(self._translate(given, memory, fields))

    def _translate(self, given: dict[str, Any], memory: dict[str, Any], fields: dict[str, Any]) -> MnemosConfig:
        owner = type(self).__name__
        known = [*NAMES.values(), "neural_memory_kwargs", *OWN_FIELDS, *OMEGA]
        fields = accept(owner, fields, known, unsupported.TRANSFORMER | OTHER_NAMES)
        if not {"num_tokens", "dim", "depth"} <= given.keys():
            raise ValueError(f"{owner} needs num_tokens, dim and depth")
        for name, reason in self.without_effect.items():
            if name in given and (name, given[name]) != ("num_longterm_mem_tokens", 0):
                raise ValueError(f"{owner} does not support {name}={given[name]!r}: {reason}")
        kwargs = given.pop("neural_memory_kwargs", {})
        if not isinstance(kwargs, dict):
            raise ValueError(f"neural_memory_kwargs={kwargs!r:.80} must be a dict")
        if self.block == "lmm":  # no attention: heads are the memory's
            own = {"heads": given.pop("heads", None), "dim_head": given.pop("dim_head", None)}
            memory |= {name: value for name, value in own.items() if value is not None}
        twice = sorted(memory.keys() & kwargs.keys())
        if twice:
            raise ValueError(f"{', '.join(twice)} is given twice, also in neural_memory_kwargs")
        choices = translate_memory(f"{owner}'s memory", given["dim"], memory | kwargs)
        if self.block != "lmm":
            given = {"heads": 8, "dim_head": 64} | given
        if "ff_mult" in given:
            given["ff_mult"] = _feedforward_size(given["dim"], given["ff_mult"])
        layers = given.get("neural_memory_layers")
        if layers is not None:
            if not all(type(i) is int and 1 <= i <= given["depth"] for i in layers):
                raise ValueError(f"neural_memory_layers={layers!r} must lie in 1..{given['depth']}")
            given["neural_memory_layers"] = [i - 1 for i in layers]
        ours = {name: given[theirs] for name, theirs in NAMES.items() if theirs in given}
        with renamed(NAMES | choices.sources):
            whole: dict[str, Any] = {"layers": self.block, "memory": choices.fields} | ours | fields
            return MnemosConfig(**whole)

    @extends(ForeignModel)
    def forward(self, input_ids: Tensor | None = None, *args, return_loss: bool = False, **kwargs):
        """As any model of ours; `return_loss=True` gives the loss of predicting every next token, alone."""
        if return_loss:
            if kwargs.get("return_surprises"):
                raise ValueError("return_loss=True returns the loss alone; give labels for a loss beside the surprises")
            return super().forward(input_ids, *args, labels=input_ids, return_logits=False, **kwargs).loss
        return super().forward(input_ids, *args, **kwargs)

    def sample(
        self,
        prompt: Tensor,
        seq_len: int,
        use_cache: bool = True,
        temperature: float = 1.5,
        min_p: float = 0.1,
        filter_kwargs: dict[str, float] | None = None,
        **options,
    ) -> Tensor:
        """A continuation of prompt (B, T) up to a total length of seq_len, without the prompt: (B, seq_len - T).

        filter_kwargs: min_p, top_k or top_p. options: keywords of transformers' `generate`."""
        for name in [name for name in options if name in unsupported.SAMPLE]:
            accept(f"{type(self).__name__}.sample", {name: options.pop(name)}, (), unsupported.SAMPLE)
        new = seq_len - prompt.shape[1]
        if new < 1:
            raise ValueError(f"seq_len={seq_len} counts the prompt too, which has {prompt.shape[1]} tokens already")
        filters = {"min_p": min_p} if filter_kwargs is None else filter_kwargs
        accept("filter_kwargs", filters, ("min_p", "top_k", "top_p"))
        how = {"do_sample": True, "temperature": temperature, **filters} if temperature else {"do_sample": False}
        tokens = self.generate(prompt, max_new_tokens=new, use_cache=use_cache, **how | options)
        return tokens[:, prompt.shape[1] :]


def _feedforward_size(dim: int, mult: float) -> int:
    if not isinstance(mult, int | float) or isinstance(mult, bool) or not mult > 0:
        raise ValueError(f"ff_mult={mult!r} must be a number > 0")
    return int(dim * mult * 2 / 3)


class MemoryAsContextTransformer(Transformer):
    """Titans' MAC; with the Omega options, Atlas' or OmegaNet's.

    >>> import torch
    >>> model = MemoryAsContextTransformer(num_tokens=256, dim=32, depth=1, segment_len=8, num_longterm_mem_tokens=2)
    >>> ids = torch.randint(0, 256, (1, 23))
    >>> loss = model(ids, return_loss=True)
    >>> model.sample(ids[:, :4], 10).shape
    torch.Size([1, 6])
    """

    block = "mac"
    without_effect = {"window_size": "MAC attends within segments of segment_len tokens"}  # noqa: RUF012


class MemoryAsGateTransformer(Transformer):
    """MAG: sliding-window attention and memory, joined by a gate."""

    block = "mag"
    without_effect = {"segment_len": NO_SEGMENTS, "num_longterm_mem_tokens": NO_SEGMENTS}  # noqa: RUF012


class MemoryAsLayerTransformer(Transformer):
    """MAL: memory, then sliding-window attention."""

    block = "mal"
    without_effect = MemoryAsGateTransformer.without_effect


class AtlasLMM(Transformer):
    """Memory alone; heads and dim_head are the memory's."""

    block = "lmm"
    without_effect = MemoryAsGateTransformer.without_effect | {"window_size": "there is no attention"}
