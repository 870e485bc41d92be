"""Kind "recall": a model learns MQAR and is asked. Batches begin short and grow to the length that is tested.

Zoology trains each length apart, for 64 passes over 100,000 examples. Here the first tenth of the steps has an eighth of the pairs, in examples
as much shorter; the second a quarter, two more a half, and the rest all: the same task, learned in minutes on a processor's core. With
`fill: later` those shorter examples have nothing between their questions, and only the whole ones random words, as Zoology has them.
P pairs, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mnemos.data.tasks import mqar
from mnemos.eval.recall import accuracy, logits_of
from mnemos.models import MnemosForCausalLM
from mnemos.trials import train
from mnemos.trials.text import TEST_SEED

from .models import config_of, trial_config

LEAST = (2, 16)  # pairs and tokens of the shortest examples
UNTIL = ((0.1, 8), (0.2, 4), (0.4, 2))  # until this share of a training: examples so many times smaller


def stage(done: float, pairs: int, length: int) -> tuple[int, int]:
    """(P, T) of the examples when `done` of the training, from 0 to 1, is over: from short to long.

    >>> [stage(done, 16, 256) for done in (0, 0.1, 0.2, 0.4)]
    [(2, 32), (4, 64), (8, 128), (16, 256)]
    """
    part = next((part for until, part in UNTIL if done < until), 1)
    return max(LEAST[0], pairs // part), max(LEAST[1], length // part)


def fills(fill: str, done: float) -> str:
    """What stands between the questions when `done` of the training is over.

    >>> [fills("later", done) for done in (0, 0.39, 0.4, 1)], fills("zero", 1)
    (['zero', 'zero', 'random', 'random'], 'zero')
    """
    if fill != "later":
        return fill
    return "zero" if done < UNTIL[-1][0] else "random"


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """accuracy: the share of right answers at the cell's own pairs and length, and at each [pairs, length] of `also`."""
    steps, seed, vocab = cell["steps"], cell["seed"], cell["vocab_size"]
    fill = cell.get("fill", "random")

    def batch(step: int) -> tuple[Tensor, Tensor]:
        done = step / steps
        pairs, length = stage(done, cell["pairs"], cell["length"])
        rows, filled = max(1, cell["tokens"] // length), fills(fill, done)
        made = mqar(rows, length, pairs, vocab, fill=filled, seed=(seed + 1) * steps + step)
        ids, labels = made.for_language_model()
        return torch.from_numpy(ids), torch.from_numpy(labels)

    torch.manual_seed(seed)
    model = MnemosForCausalLM(config_of(cell, vocab_size=vocab))
    trained = train(model, trial_config(cell, batch))
    asked = {"accuracy": (cell["pairs"], cell["length"])}
    asked |= {f"accuracy@{pairs}x{length}": (pairs, length) for pairs, length in cell.get("also", [])}
    found = {}
    for name, (pairs, length) in asked.items():
        test = mqar(cell["examples"], length, pairs, vocab, fill=fills(fill, 1), seed=TEST_SEED)
        found[name] = accuracy(logits_of(model), test)["accuracy"]
    return found | trained
