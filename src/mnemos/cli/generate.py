"""`mnemos generate`: text from a run, or from an exported folder."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import tyro


def generate(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    /,
    prompt: str = "The ",
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    samples: int = 1,
    seed: int | None = None,
    checkpoint: str = "best",
    device: str = "cpu",
    stream: bool = True,
    allow_missing: bool = False,
) -> None:
    """Continue a prompt.

    Args:
        model: a run's folder (runs/x), or a folder that `mnemos export` wrote.
        prompt: what to continue; - reads it from standard input.
        max_tokens: tokens to add, at most.
        temperature: 0 takes the likeliest token each time.
        top_k: draw from so many tokens; 0 from all.
        top_p: draw from the likeliest tokens that together have this probability.
        samples: how many continuations.
        seed: for the same text again.
        checkpoint: best, last, or a step of the run.
        device: where to compute.
        stream: print text as it comes (one sample).
        allow_missing: open weights that lack tensors, which are then initialised as in a new model.
    """
    import torch

    from ..train.distributed import open_device

    for said, right, wanted in (
        (f"{max_tokens=}", max_tokens >= 1, "at least 1"),
        (f"{temperature=}", temperature >= 0, "0 or more"),
        (f"{top_k=}", top_k >= 0, "0 or more"),
        (f"{top_p=}", 0 < top_p <= 1, "above 0 and at most 1"),
        (f"{samples=}", samples >= 1, "at least 1"),
        (f"{seed=}", seed is None or 0 <= seed < 2**63, "from 0 to 2**63 - 1"),
    ):
        if not right:
            raise ValueError(f"{said} must be {wanted}")
    place = open_device(device)
    prompt = _standard_input() if prompt == "-" else prompt
    if not prompt:
        raise ValueError("prompt is empty: give at least one character")
    language, tokenizer = _open(model, checkpoint, allow_missing)
    language = language.to(place)
    if seed is not None:
        torch.manual_seed(seed)
    encoded = tokenizer.encode(prompt)
    if not encoded:
        raise ValueError(f"prompt {prompt!r:.40} has no token: give another")
    ids = torch.tensor([encoded], device=place).expand(samples, -1)
    drawn = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        if temperature > 0
        else {"do_sample": False}
    )
    choices = drawn | {"max_new_tokens": max_tokens, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    if stream and samples == 1:
        language.generate(ids, streamer=Streamer(tokenizer), **choices)
        return
    rows = language.generate(ids, **choices)
    for row in rows.tolist():
        print(tokenizer.decode(row))


def _standard_input() -> str:
    """All of it, as UTF-8, without the line break at its end."""
    text = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    return text.removesuffix("\n").removesuffix("\r")


def _open(model: str, checkpoint: str, allow_missing: bool):
    """A model in evaluation mode, and its tokenizer."""
    from pathlib import Path

    path = Path(model)
    if os.path.exists(path / "config.yaml"):  # unlike Path.exists, not an error for a name that is too long
        from ..train.runs import load_model, load_tokenizer

        return load_model(path, checkpoint, allow_missing=allow_missing), load_tokenizer(path)
    if os.path.exists(path / "config.json"):
        from ..eval.loading import load
        from ..models.folder import check_files

        check_files(path)
        language, tokenizer = load(path, allow_missing=allow_missing)
        if tokenizer is None:
            raise ValueError(f"{model} has no tokenizer, and its {language.config.vocab_size} tokens are not bytes")
        return language, tokenizer
    inside = sorted(p.parent for p in path.glob("*/config.yaml")) if os.path.isdir(path) else []
    if inside:
        raise ValueError(f"{model} holds runs, but is none: choose one of {', '.join(map(str, inside))}")
    raise ValueError(f"{model:.200} is neither a run (config.yaml) nor an exported model (config.json)")


class Streamer:
    """Prints what `generate` makes, as soon as its characters are whole."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids, self.shown = tokenizer, [], 0

    def put(self, value) -> None:
        self.ids += value.flatten().tolist()
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\ufffd"):  # the middle of a character
            print(text[self.shown :], end="", flush=True)
            self.shown = len(text)

    def end(self) -> None:
        print(self.tokenizer.decode(self.ids)[self.shown :], flush=True)
