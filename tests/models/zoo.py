"""Every preset as a model small enough to try everything on: two layers, windows, segments and chunks of 8, float64."""

from __future__ import annotations

import functools

import pytest
import torch

from helpers import randomise
from mnemos.models import MnemosForCausalLM, presets

VOCAB, WINDOW = 61, 8
NAMES = presets.names()
FAMILIES = ("titans-lmm", "titans-mag", "titans-mac", "omeganet", "atlas-mag", "deeptransformer", "deltanet")
OTHER_RETENTION = {  # presets, and the retention that they do not have
    f"{name} towards {place}": (name, retention)
    for place, retention, names in (("zero", "zero", FAMILIES[:-2]), ("the start", "start", FAMILIES[-2:]))
    for name in names
}
KINDS = ["titans-lmm", "atlas-mag", "titans-mal", "titans-mac", "qk-mag", "transformer"]  # one of every block
WITH_CONVOLUTION = {f"{name}, convolution": name for name in ("titans-mag", "titans-mal", "titans-mac", "qk-mag")}
each_block = pytest.mark.parametrize("name", [*KINDS, *WITH_CONVOLUTION])
HAS_MEMORY = [name for name in NAMES if presets.PRESETS[name].block not in ("attention", "swa")]


def small_config(name: str, **overrides):
    """Of a preset, of one of `OTHER_RETENTION`, or of one of `WITH_CONVOLUTION`, whose attention then has a convolution too."""
    name, retention = OTHER_RETENTION.get(name, (name, None))
    if name in WITH_CONVOLUTION:
        name, overrides = WITH_CONVOLUTION[name], dict(attention_conv_width=4) | overrides
    preset = presets.PRESETS[name]
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCAB)
    small |= dict(attention_window=WINDOW, segment_length=WINDOW)
    if preset.memory is not None:
        memory = dict(heads=2, chunk_size=8)
        memory |= {key: least for key, least in (("window", 3), ("key_dim", 4)) if key in preset.memory}
        small["memory"] = memory | ({"retention": retention} if retention else {})
    return presets.config(name, "nano", **small | overrides)


def make(name: str, **overrides) -> MnemosForCausalLM:
    """As a user gets it: freshly initialised."""
    torch.manual_seed(0)
    return MnemosForCausalLM(small_config(name, **overrides)).double().eval()


@functools.cache
def model_of(name: str) -> MnemosForCausalLM:
    """Every parameter moved off its start, as training would. Shared between tests: do not change it."""
    return randomise(make(name), scale=0.15)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(model: MnemosForCausalLM, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    """One forward without a cache."""
    with torch.no_grad():
        return model(ids, use_cache=False, **kwargs).logits
