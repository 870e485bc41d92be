"""Kind "needle": facts are told, text is read, facts are asked for: learned at short distances, tested at long ones.

The lesson is the demo's (`demo.facts`): people and their things in front of bytes of real text. Only the answers are learned; the text is
what has to be read past. Distances grow over the training, for what is told through much text at once is not learned in minutes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mnemos.demo.facts import CHANCE, VOCABULARY, lesson
from mnemos.demo.measure import recall_by_distance
from mnemos.models import MnemosForCausalLM
from mnemos.trials import train
from mnemos.trials.text import corpus

from .models import config_of, trial_config

NEAR = 8  # tokens of text between facts and questions, at most, while the task is new
BEGIN, END = 0.15, 0.4  # shares of the steps between which the distance grows, by the same factor at each


def longest(step: int, steps: int, most: int) -> int:
    """The largest distance at a step: near, then growing geometrically to `most`.

    >>> [longest(t, 1000, 800) for t in (0, 150, 275, 400, 999)]
    [8, 8, 80, 800, 800]
    """
    done = min(1.0, max(0.0, (step / steps - BEGIN) / (END - BEGIN)))
    return round(NEAR * (most / NEAR) ** done)


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """recall@<distance> of every distance in `distances` (up to `longest`, if given), after learning from distances up to `train_distance`."""
    learn, held_out = corpus(cell["corpus"])
    steps, seed = cell["steps"], cell["seed"]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng((seed + 1) * steps + step)
        most = longest(step, steps, cell["train_distance"])
        pairs, gap = int(rng.integers(2, cell["pairs"] + 1)), int(rng.integers(2, most + 1))
        made = lesson(learn, max(2, min(64, cell["tokens"] // (gap + 4 * pairs))), pairs, gap, rng)
        return made.ids, made.ids.masked_fill(~made.of_answer, -100)

    torch.manual_seed(seed)
    model = MnemosForCausalLM(config_of(cell, vocab_size=VOCABULARY))
    found = train(model, trial_config(cell, batch))
    distances = [x for x in cell["distances"] if x <= cell.get("longest", x)]
    readings = recall_by_distance(model, held_out, distances, cell["examples"], cell["pairs"], seed=10_000)
    for asked, _ in readings:
        found[f"recall@{asked.distance}"] = asked.recall
    return found | {"chance": CHANCE}
