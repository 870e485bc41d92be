"""Kind "recall": a model learns MQAR and is asked. Batches begin short and grow to the length that is tested.

Zoology trains each length apart, for 64 passes over 100,000 examples. Here the first tenth of the steps has an eighth of the pairs, in examples
as much shorter; the second a quarter, two more a half, and the rest all: the same task, learned in minutes on a processor's core.
P pairs, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.tasks import mqar
from ..eval.recall import accuracy, logits_of
from ..models import MnemosForCausalLM
from ..trials import Course, train
from ..trials.text import TEST_SEED
from .models import config_of

LEAST = (2, 16)  # pairs and tokens of the shortest examples
UNTIL = ((0.1, 8), (0.2, 4), (0.4, 2))  # until this share of a training: examples so many times smaller


def stage(done: float, pairs: int, length: int) -> tuple[int, int]:
    """(P, T) of the examples when `done` of the training, from 0 to 1, is over: from short to long.

    >>> [stage(done, 16, 256) for done in (0, 0.1, 0.2, 0.4)]
    [(2, 32), (4, 64), (8, 128), (16, 256)]
    """
    part = next((part for until, part in UNTIL if done < until), 1)
    return max(LEAST[0], pairs // part), max(LEAST[1], length // part)


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """accuracy: the share of right answers at the cell's own pairs and length, and at each [pairs, length] of `also`."""
    steps, seed, vocab = cell["steps"], cell["seed"], cell["vocab_size"]
    fill = cell.get("fill", "random")

    def batch(step: int) -> tuple[Tensor, Tensor]:
        pairs, length = stage(step / steps, cell["pairs"], cell["length"])
        made = mqar(max(1, cell["tokens"] // length), length, pairs, vocab, fill=fill, seed=(seed + 1) * steps + step)
        ids, labels = made.for_language_model()
        return torch.from_numpy(ids), torch.from_numpy(labels)

    torch.manual_seed(seed)
    model = MnemosForCausalLM(config_of(cell, vocab_size=vocab))
    trained = train(model, Course(steps, cell["lr"], batch))
    asked = {"accuracy": (cell["pairs"], cell["length"])}
    asked |= {f"accuracy@{pairs}x{length}": (pairs, length) for pairs, length in cell.get("also", [])}
    found = {
        name: accuracy(logits_of(model), mqar(cell["examples"], length, pairs, vocab, fill=fill, seed=TEST_SEED))[
            "accuracy"
        ]
        for name, (pairs, length) in asked.items()
    }
    return found | trained
