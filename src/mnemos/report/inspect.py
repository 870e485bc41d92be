"""Inspection of a model's memory while it reads a text, token by token, and the page that shows it.

Shapes: T tokens, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attach import AttachedForCausalLM
from ..data.tasks.text import encode
from ..memory.freeze import frozen_memory, has_memory
from ..models import MnemosForCausalLM
from ..train.hooks import AnyModel, memory_off
from .diagnostics import dying
from .page import pack, pack_indices, render
from .texts import token_texts
from .watching import LayerTrace, watch

MAX_TOKENS = 2000
MOST_TOKENS = 20_000
PER_HEAD = 3_000_000  # above this size, a page shows only means over heads
LARGEST_GATE = 64  # above this number of gates per token, only their mean is shown


@dataclass
class Inspection:
    """The result of `inspect`.

    tokens: the text that each token adds. loss: (T,) nats, NaN for the first token, which has no prediction. frozen, off: the same with
    memories kept at their initial weights, and with memory off; None if the model has no memory, or no attention beside it.
    layers: see `watching.LayerTrace`. cut: whether the text was longer.
    """

    name: str
    about: str
    tokens: list[str]
    loss: Tensor
    frozen: Tensor | None
    off: Tensor | None
    layers: list[LayerTrace]
    persistent: int
    gate_mode: str
    cut: bool
    notes: list[str] = field(default_factory=list)

    def perplexities(self) -> dict[str, float]:
        """Perplexity of the text: with test-time learning ("learning"), without ("frozen"), and with memory off ("off")."""
        named = {"learning": self.loss, "frozen": self.frozen, "off": self.off}
        return {k: math.exp(min(20.0, x[1:].mean().item())) for k, x in named.items() if x is not None}

    def routing(self) -> list[dict[str, Any]]:
        """Routing of tokens, by layer: the mean of every value, the fraction of gates near 0 and 1, and the vitality of the memory."""
        rows = []
        for layer in self.layers:
            row: dict[str, Any] = {"layer": layer.index, "kind": layer.kind}
            row |= {name: x.mean().item() for name, x in layer.values.items()} | layer.vitality
            if "route" in layer.values:
                g = layer.values["route"]
                row |= {
                    "to_attention": (g < 0.1).float().mean().item(),
                    "to_memory": (g > 0.9).float().mean().item(),
                    "spread": g.std(correction=0).item(),
                }
            rows.append(row)
        return rows

    def warnings(self) -> list[str]:
        """A sentence for each layer whose memory has stopped learning."""
        rows = self.routing()
        return [finding.sentence() for row in rows for finding in dying(str(row["layer"]), row)]


@torch.no_grad()
def inspect(
    model: AnyModel,
    tokenizer: Any,
    text: str,
    max_tokens: int = MAX_TOKENS,
    name: str = "model",
    about: str = "",
) -> Inspection:
    """Read the first `max_tokens` tokens of a text, and record every layer.

    >>> from mnemos.data import open_tokenizer
    >>> from mnemos.models import presets
    >>> model = MnemosForCausalLM(presets.config("titans-mag", "nano", num_hidden_layers=2))
    >>> seen = inspect(model, open_tokenizer("bytes"), "so it goes, and so it went")
    >>> len(seen.tokens), seen.layers[1].values["surprise"].shape
    (26, torch.Size([26, 4]))
    """
    if not isinstance(model, MnemosForCausalLM | AttachedForCausalLM):
        raise ValueError(
            f"model is a {type(model).__name__}, but only a MnemosForCausalLM or an attached model has memories to look into"
        )
    if type(max_tokens) is not int or not 2 <= max_tokens <= MOST_TOKENS:
        raise ValueError(f"max_tokens={max_tokens!r} must be a whole number from 2 to {MOST_TOKENS:,}")
    if tokenizer is None:
        raise ValueError("tokenizer is None: the model has none, and reading a text needs one")
    whole = encode(tokenizer, text)
    kept = [int(i) for i in whole[:max_tokens]]
    if len(kept) < 2:
        raise ValueError(f"text has {len(kept)} tokens, but at least 2 are needed")
    if max(kept) >= model.config.vocab_size:
        raise ValueError(f"the text has token {max(kept)}, but the model's vocab_size is {model.config.vocab_size}")
    training, ids = model.training, torch.tensor([kept], device=model.device)
    model.eval()
    try:
        logits, layers = watch(model, ids)
        frozen = off = None
        if has_memory(model):
            with frozen_memory(model):
                frozen = _loss(model(ids, use_cache=False).logits[0].float(), ids[0])
        if model.config.is_hybrid:
            with memory_off(model):
                off = _loss(model(ids, use_cache=False).logits[0].float(), ids[0])
    finally:
        model.train(training)
    return Inspection(
        name=name,
        about=about or describe(model),
        tokens=token_texts(tokenizer, kept),
        loss=_loss(logits, ids[0]),
        frozen=frozen,
        off=off,
        layers=layers,
        persistent=model.config.num_persistent_tokens,
        gate_mode=model.config.gate_mode,
        cut=len(whole) > len(kept),
    )


def describe(model: AnyModel) -> str:
    """A one-line description of a model."""
    config = model.config
    kinds = list(dict.fromkeys(config.blocks))
    size = sum(p.numel() for p in model.parameters())
    text = f"{size:,} parameters, {len(config.blocks)} layers ({', '.join(kinds)})"
    if not config.has_memory:
        return text
    spec = config.memory_config.spec
    return f"{text}; memory: {spec.structure}, rule {spec.rule}, window {spec.window}, chunk {spec.chunk_size}"


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    """(T, V), (T,) -> (T,): nats of each token given those before it; NaN for the first."""
    rest = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    return torch.cat([rest.new_full((1,), math.nan), rest]).cpu()


def inspect_page(seen: Sequence[Inspection], title: str = "mnemos inspect") -> str:
    """The page of one inspection, or of two side by side: one self-contained HTML file.

    >>> from mnemos.data import open_tokenizer
    >>> from mnemos.models import presets
    >>> model = MnemosForCausalLM(presets.config("titans-lmm", "nano", num_hidden_layers=1))
    >>> page = inspect_page([inspect(model, open_tokenizer("bytes"), "a <b> c")])
    >>> page.startswith("<!doctype html>"), "<b>" in page
    (True, False)
    """
    if not 1 <= len(seen) <= 2:
        raise ValueError(f"seen has {len(seen)} inspections, but a page shows one or two")
    return render(title, "inspect", {"panels": [_panel(x) for x in seen]})


def _panel(seen: Inspection) -> dict[str, Any]:
    """An inspection as data for the page's script."""
    numbers = sum(x.numel() for layer in seen.layers for x in layer.values.values())
    numbers += sum(2 * layer.reads.weight.numel() for layer in seen.layers if layer.reads)
    by_head = numbers <= PER_HEAD
    notes = list(seen.notes)
    if seen.cut:
        notes.append(f"The text is longer: its first {len(seen.tokens):,} tokens are shown (max_tokens).")
    if not by_head:
        notes.append("The model is large: numbers are means over heads.")
    notes += seen.warnings()
    values = {"loss": seen.loss}
    if seen.frozen is not None:
        values["writing"] = seen.frozen - seen.loss
    if seen.off is not None:
        values["memory"] = seen.off - seen.loss
    return {
        "name": seen.name,
        "about": seen.about,
        "notes": notes,
        "tokens": seen.tokens,
        "persistent": seen.persistent,
        "gateMode": seen.gate_mode,
        "perplexity": seen.perplexities(),
        "values": {name: pack(x.unsqueeze(0)) for name, x in values.items()},
        "routing": seen.routing(),
        "layers": [_layer(layer, by_head) for layer in seen.layers],
    }


def _layer(layer: LayerTrace, by_head: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": layer.index,
        "kind": layer.kind,
        "rule": layer.rule,
        "commit": layer.commit,
        "values": {name: pack(_rows(x.mT, by_head)) for name, x in layer.values.items()},
        "moments": layer.moments,
        "maps": [],
    }
    if layer.reads is not None:
        rows = slice(0, None if by_head else 1)
        reads = layer.reads
        found["reads"] = {
            "token": pack_indices(reads.token[rows]),
            "weight": pack(reads.weight[rows]),
            "own": pack(reads.own[rows]),
        }
    for spectrum in layer.spectra:
        series = {"norm": spectrum.norm, "moved": spectrum.moved, "rank": spectrum.rank}
        entry: dict[str, Any] = {"name": spectrum.name, "shape": spectrum.shape}
        entry |= {key: pack(_rows(x.mT, by_head)) for key, x in series.items() if x is not None}
        if spectrum.values is not None:
            entry["values"] = pack(_rows(spectrum.values.permute(1, 2, 0), by_head))  # 1+H k N
        found["maps"].append(entry)
    return found


def _rows(x: Tensor, by_head: bool) -> Tensor:
    """(H, ...) -> (1+H, ...): the mean over heads, then each head; or only the mean."""
    mean = x.mean(0, keepdim=True)
    return torch.cat([mean, x]) if by_head and 1 < len(x) <= LARGEST_GATE else mean
