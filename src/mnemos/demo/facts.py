"""The demo's task: facts, then a text, then questions about the facts.

    facts      Alice lamp  Bruno key  ...        pairs of a person and a thing, one token each
        between    bytes of real text                the distance between facts and questions
    questions  Bruno ?  Alice ?  ...             the thing is the answer

Ids 0..255 are bytes, then come the people, then the things. Shapes: B batch rows, T tokens, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PEOPLE = (  # noqa: SIM905
    "Alice Bruno Clara David Elena Felix Grace Hugo Irene Jonas Karin Lucas Maria Nils Olga Pablo "
    "Quinn Rosa Simon Tara Ulric Vera Walter Xenia Yusuf Zoe Anton Berta Carlo Doris Emil Flora"
).split()
THINGS = (  # noqa: SIM905
    "lamp key rope drum coin book ring boat comb bell sword cup map flute hat mirror "
    "chair spoon knife candle kite glove ladder basket clock brush shield needle wheel arrow scarf stone"
).split()
VOCABULARY = 256 + len(PEOPLE) + len(THINGS)
CHANCE = 1 / len(THINGS)


def word(token: int) -> str:
    """A fact's token as a word.

    >>> word(256), word(256 + len(PEOPLE))
    ('Alice', 'lamp')
    """
    return (*PEOPLE, *THINGS)[token - 256]


@dataclass(frozen=True)
class Lesson:
    """A batch. ids (B, T); of_text and of_answer (B, T) mark the tokens to predict: those of the text, and the answers."""

    ids: Tensor
    of_text: Tensor
    of_answer: Tensor


def facts(rows: int, pairs: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Random people and their things, (B, P) each; no person is repeated in a row, things may be.

    >>> people, things = facts(2, 5, np.random.default_rng(0))
    >>> len(set(people[0].tolist())), int(things.min()) >= 256 + len(PEOPLE)
    (5, True)
    """
    if not 1 <= pairs <= len(PEOPLE):
        raise ValueError(f"pairs={pairs} must lie in 1..{len(PEOPLE)}")
    people = 256 + rng.random((rows, len(PEOPLE))).argsort(1)[:, :pairs]
    things = 256 + len(PEOPLE) + rng.integers(len(THINGS), size=(rows, pairs))
    return torch.from_numpy(people), torch.from_numpy(things)


def pair_ids(people: Tensor, things: Tensor) -> Tensor:
    """Pairs as tokens: (B, P) and (B, P) -> (B, 2P)."""
    return torch.stack([people, things], -1).flatten(1)


def excerpts(text: np.ndarray, rows: int, length: int, rng: np.random.Generator) -> Tensor:
    """Excerpts of a text (bytes) from random positions: (B, length)."""
    starts = rng.integers(len(text) - length + 1, size=rows)
    return torch.from_numpy(np.stack([text[i : i + length] for i in starts]).astype(np.int64))


def lesson(text: np.ndarray, rows: int, pairs: int, gap: int, rng: np.random.Generator) -> Lesson:
    """Facts, `gap` bytes of text, then every person again in another order, each followed by the answer.

    >>> lesson(np.zeros(100, np.uint8), rows=2, pairs=3, gap=10, rng=np.random.default_rng(0)).ids.shape
    torch.Size([2, 22])
    """
    people, things = facts(rows, pairs, rng)
    order = torch.from_numpy(rng.random((rows, pairs)).argsort(1))
    asked = pair_ids(people.gather(1, order), things.gather(1, order))
    ids = torch.cat([pair_ids(people, things), excerpts(text, rows, gap, rng), asked], 1)
    of_text, of_answer = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    of_text[:, 2 * pairs + 1 : 2 * pairs + gap] = True  # the first byte has no preceding text
    of_answer[:, 2 * pairs + gap + 1 :: 2] = True
    return Lesson(ids, of_text, of_answer)
