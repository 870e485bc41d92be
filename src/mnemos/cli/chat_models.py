"""The model of `mnemos chat`: a folder, SmolLM2 with its adapter, or the demo's own model."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

GAME = """A game of facts with the demo's model: {size:,} parameters, trained on this
machine. It has no language: its only words are 32 people and 32 things.
Give it up to 8 facts (remember Alice is lamp), then ask (what is Alice?).
Answers come from a memory of fixed size. Asked about a person who was not
mentioned, it guesses."""

SMOLLM = """SmolLM2-135M-Instruct, which reads its last 256 tokens, with a memory of fixed size.
The memory keeps facts of one form: Anna's home city is Paris. My job is baker.
Ask for one by its words, now or thousands of tokens later: What is Anna's home city?"""


@dataclass
class ChatModel:
    """A model in evaluation mode with its tokenizer. about: printed at the start. is_game: it is the demo's model.

    temperature: of answers, unless the user sets another.
    """

    model: Any
    tokenizer: Any
    about: str
    is_game: bool = False
    temperature: float = 0.7


def open_chat_model(path: str | None, device: str = "cpu") -> ChatModel:
    """The model of a folder, or of `demo`; without one, SmolLM2 with its adapter if both are installed, else the demo's model."""
    if path == "demo" and not os.path.exists(path):
        return _game(device)
    if path is not None:
        return _from_folder(path, device)
    return _smollm(device) or _game(device)


def _from_folder(path: str, device: str) -> ChatModel:
    from ..attach import AttachedForCausalLM
    from ..eval.loading import load
    from ..models import MnemosForCausalLM

    model, tokenizer = load(path, device)
    if not isinstance(model, MnemosForCausalLM | AttachedForCausalLM):
        raise ValueError(
            f"{path} is a {type(model).__name__} without a memory: `mnemos attach {path} OUT` attaches one, then chat with OUT"
        )
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer, and its {model.config.vocab_size} tokens are not bytes")
    return ChatModel(model, tokenizer, f"{path}: {_size(model):,} parameters")


def _smollm(device: str) -> ChatModel | None:
    """SmolLM2 with its packaged adapter; None, and a sentence on stderr, if it is not installed."""
    from ..attach import load_adapter, smollm, smollm_adapter
    from ..attach.smollm import INSTALL, cache_folder, find_gguf

    try:
        if find_spec("peft") is None:
            raise ValueError("the adapter has LoRA maps, and peft is not installed")
        if not cache_folder().is_dir():
            find_gguf()
    except ValueError:
        print(f"SmolLM2 is not installed, so the demo's model answers; for SmolLM2: {INSTALL}", file=sys.stderr)
        return None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..train.distributed import open_device

    folder = smollm()
    base: Any = AutoModelForCausalLM.from_pretrained(folder)
    model = load_adapter(base, smollm_adapter()).to(open_device(device)).eval()
    return ChatModel(model, AutoTokenizer.from_pretrained(folder), SMOLLM, temperature=0.0)


def _game(device: str) -> ChatModel:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..demo.game import FactsTokenizer
    from ..demo.kept import is_kept, open_kept
    from ..train.distributed import open_device

    if is_kept():
        model = open_kept()
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            line = bar.add_task("training the demo's model, once", total=1.0, done="")
            model = open_kept(
                lambda done, curve: bar.update(line, completed=min(1.0, done), done=f"recall {curve.recent():.0%}")
            )
    model = model.to(open_device(device))
    return ChatModel(model, FactsTokenizer(), GAME.format(size=_size(model)), is_game=True)


def _size(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())
