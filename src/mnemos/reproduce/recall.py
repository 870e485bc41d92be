"""Kind "recall": a model learns MQAR and is asked. Batches begin short and grow to the length that is tested.

Zoology trains each length apart, for 64 passes over 100,000 examples. Here a quarter of the steps each has an eighth, a quarter, a half and
all of the pairs, in examples as much shorter: the same task, learned in minutes on a processor's core. P pairs, T tokens, V vocabulary.
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


def stages(pairs: int, length: int) -> list[tuple[int, int]]:
    """(P, T) of the parts of a training, from short to long.

    >>> stages(16, 256)
    [(2, 32), (4, 64), (8, 128), (16, 256)]
    """
    return [(max(LEAST[0], pairs // part), max(LEAST[1], length // part)) for part in (8, 4, 2, 1)]


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """accuracy: the share of right answers at the cell's own pairs and length, and at each [pairs, length] of `also`."""
    parts, steps, seed, vocab = stages(cell["pairs"], cell["length"]), cell["steps"], cell["seed"], cell["vocab_size"]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        pairs, length = parts[step * len(parts) // steps]
        made = mqar(max(1, cell["tokens"] // length), length, pairs, vocab, seed=(seed + 1) * steps + step)
        ids, labels = made.for_language_model()
        return torch.from_numpy(ids), torch.from_numpy(labels)

    torch.manual_seed(seed)
    model = MnemosForCausalLM(config_of(cell, vocab_size=vocab))
    trained = train(model, Course(steps, cell["lr"], batch))
    asked = {"accuracy": (cell["pairs"], cell["length"])}
    asked |= {f"accuracy@{pairs}x{length}": (pairs, length) for pairs, length in cell.get("also", [])}
    found = {
        name: accuracy(logits_of(model), mqar(cell["examples"], length, pairs, vocab, seed=TEST_SEED))["accuracy"]
        for name, (pairs, length) in asked.items()
    }
    return found | trained
