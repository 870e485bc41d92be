"""`mnemos generate`: generates text with a run or an exported model."""

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
        model: folder of a run (runs/x), or a folder written by `mnemos export`.
        prompt: text to continue; - reads it from standard input.
        max_tokens: largest number of tokens to generate.
        temperature: sampling temperature; 0 for greedy decoding.
        top_k: sample from this many of the likeliest tokens; 0 for all.
        top_p: sample from the likeliest tokens with this total probability.
        samples: number of continuations.
        seed: random seed, for reproducible text.
        checkpoint: best, last, or a step of the run.
        device: torch device.
        stream: print text as it is generated (one sample).
        allow_missing: initialise tensors that the weights lack as in a new model, instead of raising an error.
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
    """Standard input as UTF-8, without the final line break."""
    text = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    return text.removesuffix("\n").removesuffix("\r")


def _open(model: str, checkpoint: str, allow_missing: bool):
    """A model in evaluation mode, and its tokenizer."""
    from pathlib import Path

    path = Path(model)
    if os.path.exists(path / "config.yaml"):  # unlike Path.exists, no error for a name that is too long
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
        raise ValueError(f"{model} is a folder of runs, not a run: choose one of {', '.join(map(str, inside))}")
    raise ValueError(f"{model:.200} is neither a run (config.yaml) nor an exported model (config.json)")


class Streamer:
    """Prints generated text as soon as its characters are complete."""

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
