"""Measurements of the demo: recall by distance with the bytes of the state, a saved and loaded state, bits per byte of text.

Shapes: B batch rows, P pairs, T tokens.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import MnemosCache, MnemosForCausalLM
from .facts import excerpts, facts, lesson, pair_ids, word

READ_TOKENS = 1024  # tokens per call while a long text is read
EXCERPT_CHARACTERS = 220  # of the beginning and of the end of a text that is shown
Advance = Callable[[int], object]


@dataclass(frozen=True)
class Asked:
    """Answers (B, P) at one distance and the correct ones; bytes of one sequence's state; seconds of reading so far; text: that of the first sequence."""

    distance: int
    people: Tensor
    right: Tensor
    answers: Tensor
    state_bytes: int
    seconds: float
    text: str = ""

    @property
    def recall(self) -> float:
        return (self.answers == self.right).double().mean().item()

    def examples(self) -> list[tuple[str, str, str]]:
        """Person, thing, and the model's answer, for the first sequence."""
        rows = zip(self.people[0].tolist(), self.right[0].tolist(), self.answers[0].tolist())
        return [(word(person), word(thing), said(answer)) for person, thing, answer in rows]


def said(token: int) -> str:
    """A displayable form of a token: a word of the facts, or a byte."""
    return word(token) if token >= 256 else repr(chr(token))


@torch.no_grad()
def ask(model: MnemosForCausalLM, cache: MnemosCache, people: Tensor) -> Tensor:
    """Query every sequence, each question from the same state: people (B, P) -> answers (B, P). One copy of the state at a time."""
    columns = people.split(1, 1)
    return torch.stack([model(x, past_key_values=cache.fork(1)).logits[:, -1].argmax(-1) for x in columns], 1)


@torch.no_grad()
def recall_by_distance(
    model: MnemosForCausalLM,
    text: np.ndarray,
    distances: Sequence[int],
    rows: int,
    pairs: int,
    seed: int,
    advance: Advance | None = None,
) -> Iterator[tuple[Asked, MnemosCache]]:
    """Read each sequence's facts, then text; query after each of `distances` tokens. Yields the answers and the cache at that position.

    Queries do not change the cache. A text that ends starts over.
    """
    rng = np.random.default_rng(seed)
    people, things = facts(rows, pairs, rng)
    between = excerpts(np.resize(text, max(len(text), max(distances))), rows, max(distances), rng)
    begin = time.perf_counter()
    cache, done = model.state(pair_ids(people, things)), 0
    for distance in sorted(distances):
        while done < distance:
            piece = between[:, done : min(done + READ_TOKENS, distance)]
            cache, done = model.state(piece, cache), done + piece.shape[1]
            if advance is not None:
                advance(piece.numel())
        paused = time.perf_counter()
        answers = ask(model, cache, people)
        excerpt = shortened(bytes(between[0, :distance].tolist()).decode(errors="replace"))
        yield Asked(distance, people, things, answers, cache.nbytes // rows, paused - begin, excerpt), cache
        begin += time.perf_counter() - paused  # queries do not count as reading


@dataclass(frozen=True)
class Kept:
    """Effect of saving and loading: recall before and after, and the largest difference of any logit."""

    path: Path
    file_bytes: int
    before: float
    after: float
    largest_difference: float


@torch.no_grad()
def save_and_load(model: MnemosForCausalLM, cache: MnemosCache, asked: Asked, path: str | os.PathLike) -> Kept:
    """Save a state to a file, load it into another cache, and ask both the same questions."""
    path = Path(path)
    cache.save(path)
    loaded = MnemosCache.load(path, model.config)
    B, P = asked.people.shape
    questions = asked.people.reshape(B * P, 1)
    first, second = (model(questions, past_key_values=c.fork(P)).logits[:, -1] for c in (cache, loaded))
    recalls = [(x.argmax(-1).view(B, P) == asked.right).double().mean().item() for x in (first, second)]
    difference = (first - second).abs().max().item()
    return Kept(path, path.stat().st_size, recalls[0], recalls[1], difference)


@torch.no_grad()
def bits_per_byte(model: Any, text: np.ndarray, rows: int, pairs: int, length: int, seed: int) -> float:
    """Bits per byte of excerpts of a text after facts, as in training; facts and questions do not count."""
    made, total, count = lesson(text, rows, pairs, length, np.random.default_rng(seed)), 0.0, 0
    for ids, chosen in zip(made.ids.split(16), made.of_text.split(16)):
        predicted = model(ids, use_cache=False).logits[:, :-1][chosen[:, 1:]]
        total += float(F.cross_entropy(predicted, ids[:, 1:][chosen[:, 1:]], reduction="sum"))
        count += len(predicted)
    return total / count / math.log(2)


def shortened(text: str, edge: int = EXCERPT_CHARACTERS) -> str:
    """A text without its middle, in one line.

    >>> shortened("to be,  or not", 100), shortened("0123456789", 2)
    ('to be, or not', '01 … 89')
    """
    if len(text) > 2 * edge + 3:
        text = f"{text[:edge]} … {text[-edge:]}"
    return " ".join(text.split())
