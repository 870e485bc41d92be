"""Kind "story": facts lie scattered in a long text, and the last one about a person counts, as in BABILong's qa1.

Sentences are those of `data.tasks.story`, a token per word ("Mary went to the office ."); the text around them is bytes of a corpus. Two of
the people are asked for at the end ("Where is Mary ? office"); with `asides`, what is learned from has a question after every second fact
too, as bAbI has. Only answers are learned. Texts grow over the training as in `needle`.
Shapes: B rows, T tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mnemos.data.tasks import story
from mnemos.data.tasks.babilong import PLACES, WALKERS, WALKS
from mnemos.models import MnemosForCausalLM
from mnemos.trials import train
from mnemos.trials.text import TEST_SEED, corpus

from .models import config_of, trial_config
from .needle import longest

WORDS = tuple(dict.fromkeys((*WALKERS, *PLACES, *" ".join(WALKS).split(), "the", ".", "Where", "is", "?")))
VOCABULARY = 256 + len(WORDS)
QUESTIONS = 2
ASKED = 5 * QUESTIONS  # tokens of the questions and their answers
ROOM = 10 * 7 + 5 * 5 + ASKED  # tokens that the longest story needs, ten sentences of up to seven, and its questions
MARK = 256 + WORDS.index("?")  # what an answer follows
PIECE = 1024  # tokens per call while a long text is read


def spell(sentence: str) -> list[int]:
    """Ids of the words of a sentence.

    >>> [WORDS[i - 256] for i in spell("Mary went to the office.")]
    ['Mary', 'went', 'to', 'the', 'office', '.']
    """
    return [256 + WORDS.index(word) for word in sentence.replace(".", " .").replace("?", " ?").split()]


def tell(text: np.ndarray, length: int, seed: int, number: int, asides: bool = False) -> np.ndarray:
    """Row `number` of a seed: `length` ids, a story scattered over bytes of the text, then two questions with their answers.

    asides: there is also a question after every second fact, about somebody who was in one.

    >>> row = tell(np.zeros(500, np.uint8), 100, seed=0, number=0)
    >>> len(row), [WORDS[i - 256] for i in row[-5:-1]][:2]
    (100, ['Where', 'is'])
    """
    rng = np.random.default_rng((seed, number))
    while True:
        facts = story("qa1", int(rng.integers(2**31))).facts
        place = {fact.split()[0]: fact.split()[-1] for fact in facts}  # later ones replace earlier ones
        if len(place) >= QUESTIONS:
            break
    asked = rng.permutation(sorted(place))[:QUESTIONS]
    end = [i for who in asked for i in _question(who, place)]
    sentences, known = [], {}
    for count, fact in enumerate(facts, 1):
        known[fact.split()[0]] = fact.split()[-1]
        sentences.append(spell(fact))
        if asides and count % 2 == 0:
            sentences.append(_question(rng.choice(sorted(known)), known))
    room = length - len(end) - sum(map(len, sentences))
    begin = int(rng.integers(len(text) - room + 1)) if len(text) > room else 0
    filler = np.resize(text[begin:], room).astype(np.int64)
    cuts = np.sort(rng.integers(room + 1, size=len(sentences)))
    pieces = [part for piece, fact in zip(np.split(filler, cuts), sentences) for part in (piece, fact)]
    return np.concatenate([*pieces, filler[cuts[-1] :], end]).astype(np.int64)


def _question(who: str, place: dict[str, str]) -> list[int]:
    return [*spell(f"Where is {who}?"), *spell(place[who])[:1]]


def labelled(ids: Tensor) -> Tensor:
    """Labels of rows of `tell`: the answers alone."""
    after = torch.roll(ids, 1, 1) == MARK
    return ids.masked_fill(~after, -100)


@torch.no_grad()
def accuracy(model: MnemosForCausalLM, ids: Tensor) -> float:
    """The share of right answers, of all that a model might say; rows are read in pieces, through the state."""
    head, questions, cache = ids[:, :-ASKED], ids[:, -ASKED:], None
    for piece in head.split(PIECE, 1):
        cache = model.state(piece, cache)
    said = model(questions, past_key_values=cache, use_cache=True).logits[:, 3::5].argmax(-1)
    return (said == questions[:, 4::5]).double().mean().item()


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """accuracy@<length> of every length in `lengths` (up to `longest`, if given), after learning from texts of up to `train_length` tokens."""
    learn, held_out = corpus(cell["corpus"])
    steps, seed = cell["steps"], cell["seed"]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        length = ROOM + longest(step, steps, cell["train_length"] - ROOM)
        rows = max(2, cell["tokens"] // length)
        ids = torch.from_numpy(
            np.stack([tell(learn, length, (seed + 1) * steps + step, i, cell["asides"]) for i in range(rows)])
        )
        return ids, labelled(ids)

    torch.manual_seed(seed)
    model = MnemosForCausalLM(config_of(cell, vocab_size=VOCABULARY))
    found = train(model, trial_config(cell, batch))
    for length in (x for x in cell["lengths"] if x <= cell.get("longest", x)):
        rows = [tell(held_out, length, TEST_SEED, i) for i in range(cell["examples"])]
        found[f"accuracy@{length}"] = accuracy(model, torch.from_numpy(np.stack(rows)))
    return found | {"chance": 1 / len(PLACES)}
