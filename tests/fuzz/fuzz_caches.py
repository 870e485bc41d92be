"""Caches of models with every kind of block, their files mutated, and decoding from what was loaded."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from fuzz_files import parse, to_bytes
from fuzz_mutations import mutated
from fuzz_states import WINDOWED
from fuzz_target import Mismatch, Target, check_finite, check_numbers, check_positions

from mnemos.models import MnemosCache, MnemosConfig, MnemosForCausalLM
from mnemos.models.cache_io import to_tensors

VOCAB = 61
MODELS: dict[str, dict[str, Any]] = {
    "lmm": dict(layers="lmm", memory=dict(heads=4)),
    "lmm-no-conv": dict(layers="lmm", memory=dict(heads=2, conv_width=0)),
    "mag": dict(layers="mag", num_persistent_tokens=2),
    "mal": dict(layers="mal", num_key_value_heads=1),
    "mac": dict(layers="mac", num_longterm_tokens=1, num_persistent_tokens=1),
    "swa": dict(layers="swa", num_persistent_tokens=1),
    "attention": dict(layers="attention"),
    "swa-conv": dict(layers=["swa", "attention"], attention_conv_width=4, num_persistent_tokens=1),
    "mac-conv": dict(layers=["mac", "mag"], attention_conv_width=3, num_longterm_tokens=1),
    "qk": dict(layers="qk", qk_projection=dict(window=3)),
    "qk-gram": dict(layers=["qk", "lmm"]),
    "exp": dict(layers="lmm", memory=dict(heads=2, features="exp", expansion=1.0)),
    "muon": dict(layers="mag", memory=dict(heads=2, rule="muon", window=2)),
    "start": dict(layers="mag", memory=dict(heads=2, retention="start")),
    "mac-start": dict(layers="mac", memory=dict(heads=2, retention="start")),
    "mixed": dict(layers=["mag", "swa", "attention"], num_hidden_layers=3),
    "windowed": dict(layers=["lmm", "mac"], memory=dict(WINDOWED, window=3)),
    "windowed-start": dict(layers="mag", memory=dict(WINDOWED, window=2, retention="start", muon_scale="nuclear")),
}


def tiny_model(name: str, seed: int) -> MnemosForCausalLM:
    fields = dict(vocab_size=VOCAB, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    fields |= dict(attention_window=4, segment_length=4) | MODELS[name]
    if name not in ("swa", "attention", "swa-conv", "qk"):
        fields["memory"] = dict(heads=2, chunk_size=4) | (fields.get("memory") or {})
    torch.manual_seed(seed)
    return MnemosForCausalLM(MnemosConfig(**fields)).eval()


def tensors_of(cache: MnemosCache) -> dict[str, torch.Tensor]:
    return {
        f"{i}.{name}.{key}": x
        for i, layer in enumerate(cache.layers)
        for name, state in layer.items()
        for key, x in to_tensors(state)[0].items()
    }


def form_of(cache: MnemosCache) -> dict:
    """Shapes without rows, but for what grows with the tokens read, and settings."""
    form = {}
    for i, layer in enumerate(cache.layers):
        for name, state in layer.items():
            tensors, settings = to_tensors(state)
            form[f"{i}.{name}"] = {key: value for key, value in settings.items() if key not in ("inplace", "spare")}
            for key, x in tensors.items():
                grows = key.startswith("pairs.") or getattr(state, "window", 1) is None
                form[f"{i}.{name}.{key}"] = (tuple(x.shape[2 if grows else 1 :]), x.is_floating_point())
    return form


def in_float64(model: MnemosForCausalLM, ids: torch.Tensor, cache: MnemosCache | None) -> list[torch.Tensor]:
    """Logits of the model in float64, and the numbers of its cache before and after."""
    before = [] if cache is None else list(tensors_of(cache).values())
    past = None if cache is None else cache.to(torch.float64)
    out = copy.deepcopy(model).double()(ids, past_key_values=past, use_cache=True)
    return [out.logits, *before, *tensors_of(out.past_key_values).values()]


class Caches(Target):
    """`MnemosCache.load`, then forwards of one token and of five, `select`, `fork`, `stack`, `clone` and `generate`."""

    kind = "cache"

    def build(self) -> None:
        self.models = [tiny_model(name, i) for i, name in enumerate(MODELS)]
        self.files, self.owner, self.forms = [], [], []
        for i, model in enumerate(self.models):
            for length, batch in ((1, 1), (3, 2), (9, 1)):
                ids = torch.randint(VOCAB, (batch, length))
                cache = model.state(ids)
                self.files.append(self.saved(cache.save))
                self.owner.append(i)
            self.forms.append(form_of(cache))
        self.raws = [parse(data) for data in self.files]

    def mutate(self, rng: Random, folder: Path) -> None:
        self.chosen = rng.randrange(len(self.raws))
        raw = self.raws[self.chosen]
        data = to_bytes(raw) if rng.random() < 0.02 else mutated(rng, raw, self.raws, to_bytes)
        (folder / "cache").write_bytes(data)

    def use(self, rng: Random, folder: Path) -> None:
        chosen = self.owner[self.chosen] if rng.random() < 0.9 else rng.randrange(len(self.models))
        model = self.models[chosen]
        cache = MnemosCache.load(folder / "cache", model.config if rng.random() < 0.5 else None)
        self.step("loaded")
        kept = tensors_of(cache)
        check_numbers(kept.values())
        check_positions(kept)
        forked = MnemosCache.stack([cache, cache.clone()]).select([0, cache.batch]).fork(1)
        if forked.batch != 2 or cache.nbytes < 1 or cache.get_seq_length() < 0:
            raise Mismatch(f"stack and select of a cache gave {forked.batch} rows, length {cache.get_seq_length()}")
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        ids = torch.randint(VOCAB, (cache.batch, 8), generator=generator)
        kept = {name: x.clone() for name, x in kept.items()}
        with torch.enable_grad() if rng.random() < 0.05 else torch.no_grad():
            self.decode(rng, model, cache, ids, kept)
        own, found = self.forms[chosen], form_of(cache)
        if found != own:
            wrong = [name for name, form in own.items() if found.get(name) != form]
            raise Mismatch(f"the model took a cache of another form: {', '.join(wrong)[:200]}")

    def decode(self, rng: Random, model, cache: MnemosCache, ids: torch.Tensor, kept: dict) -> None:
        positions = {name: x for name, x in kept.items() if name.endswith(".position") and ".frozen." not in name}
        lengths, t, now = rng.choice([[1, 1, 1], [1, 5], [5, 1], [1]]), 0, cache
        for length in lengths:
            now.inplace = t > 0 and rng.random() < 0.5 and not torch.is_grad_enabled()
            out = model(ids[:, t : t + length], past_key_values=now, use_cache=True)
            self.step("used")
            now, t = out.past_key_values, t + length
            check_finite(out.logits, partial(in_float64, model, ids[:, :t], cache))
        after = tensors_of(now)
        wrong = [name for name, x in positions.items() if not torch.equal(after[name], x + t)]
        if wrong or now.get_seq_length() != cache.get_seq_length() + t:
            raise Mismatch(f"positions after {t} tokens are wrong: {', '.join(wrong)[:200] or now.get_seq_length()}")
        for name, x in tensors_of(cache).items():
            if not torch.equal(x, kept[name]):
                raise Mismatch(f"the cache that was given was changed: {name}")
        if rng.random() < 0.05 and not torch.is_grad_enabled():
            made = model.generate(ids[:, :2], past_key_values=cache, max_new_tokens=2, do_sample=False)
            if made.shape[1] > 4:
                raise Mismatch(f"generate gave {tuple(made.shape)}")
