"""Model folders: config, weights, tokenizer and generation settings mutated, then opened, run and made to generate."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from random import Random

import torch
from fuzz_caches import in_float64, tiny_model
from fuzz_files import parse, to_bytes
from fuzz_mutations import mutated, mutated_text
from fuzz_target import Target, check_finite

from mnemos.eval.loading import load
from mnemos.models import MnemosForCausalLM

CHOSEN = ("lmm", "mag", "mac", "attention", "qk-gram")


def word_tokenizer(size: int) -> dict[str, str]:
    """The files of a tokenizer of single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<unk>": 0, "<eos>": 1} | {chr(97 + i % 26) * (1 + i // 26): i + 2 for i in range(size - 2)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<eos>"])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(config)}


class Models(Target):
    """`from_pretrained` or the loader of the commands, a forward, and `generate` of two tokens."""

    kind = "model"

    def build(self) -> None:
        from transformers.utils import logging

        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        self.folders: list[dict[str, bytes]] = []
        for i, name in enumerate(CHOSEN):
            model = tiny_model(name, i)
            place = tempfile.mkdtemp()
            model.save_pretrained(place)
            files = {x.name: x.read_bytes() for x in Path(place).iterdir()}
            shutil.rmtree(place)
            self.folders.append(files | {k: v.encode() for k, v in word_tokenizer(61).items()})
        self.raws = [parse(files["model.safetensors"]) for files in self.folders]

    def mutate(self, rng: Random, folder: Path) -> None:
        for old in folder.iterdir():
            old.unlink()
        chosen = rng.randrange(len(self.folders))
        files = dict(self.folders[chosen])
        for _ in range(rng.choice([1, 1, 1, 2])):
            name = rng.choice([*files, "model.safetensors", "config.json", "config.json"])
            if name == "model.safetensors":
                files[name] = mutated(rng, self.raws[chosen], self.raws, to_bytes)
            elif rng.random() < 0.04:
                files.pop(name, None)
            else:
                others = [f[name].decode() for f in self.folders]
                files[name] = mutated_text(rng, self.folders[chosen][name].decode(), others)
        for name, data in files.items():
            (folder / name).write_bytes(data)

    def use(self, rng: Random, folder: Path) -> None:
        tokenizer = None
        if rng.random() < 0.5:
            model, tokenizer = load(folder)
        else:
            model = MnemosForCausalLM.from_pretrained(folder).eval()
        self.step("loaded")
        ids = [1, 2, 3]
        if tokenizer is not None:
            ids = (tokenizer.encode("a bb c ee") or ids)[:8]
            tokenizer.decode(ids)
        prompt = torch.tensor([ids])
        with torch.no_grad():
            logits = model(prompt).logits
            self.step("used")
            check_finite(logits, lambda: [*model.parameters(), *in_float64(model, prompt, None)])
            model.generate(prompt, max_new_tokens=2, do_sample=False)
