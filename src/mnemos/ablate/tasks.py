"""Tasks of the ablations: MQAR, five tasks of MAD, and text.

Shapes: B batch rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.tasks import MAD_TASKS, Examples, mad, mqar
from ..eval.recall import accuracy, logits_of
from ..trials import text
from ..trials.text import TEST_SEED


@dataclass(frozen=True)
class Task:
    """vocab_size: of the model. train(seed, rows, T): inputs and labels (B, T) in the convention of transformers' models.
    score(model, examples, T): one number. higher: whether a higher score is better. chance: the score of guessing, if known."""

    name: str
    about: str
    unit: str
    higher: bool
    vocab_size: Callable[[dict[str, Any]], int]
    train: Callable[[dict[str, Any], int, int], tuple[Tensor, Tensor]]
    score: Callable[[dict[str, Any], Any, int], float]
    chance: Callable[[dict[str, Any]], float | None]


def _tensors(examples: Examples) -> tuple[Tensor, Tensor]:
    inputs, labels = examples.for_language_model()
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def _mqar() -> Task:
    def make(chosen: dict[str, Any], count: int, seed: int) -> Examples:
        return mqar(count, chosen["length"], chosen["pairs"], chosen["vocab_size"], seed=seed)

    return Task(
        "mqar",
        "multi-query associative recall, as in Zoology",
        "accuracy",
        True,
        lambda chosen: chosen["vocab_size"],
        lambda chosen, seed, rows: _tensors(make(chosen, rows, seed)),
        lambda chosen, model, count: accuracy(logits_of(model), make(chosen, count, TEST_SEED))["accuracy"],
        lambda chosen: 1 / (chosen["vocab_size"] - chosen["vocab_size"] // 2),
    )


def _mad(name: str) -> Task:
    known = MAD_TASKS[name]
    training = {"training": True} if "recall" in name else {}  # MAD trains these tasks on every next token

    def make(chosen: dict[str, Any], count: int, seed: int, **more) -> Examples:
        return mad(name, count, seed, length=chosen["length"], **more)

    return Task(
        name,
        f"MAD's {name.replace('-', ' ')}",
        "accuracy",
        True,
        lambda chosen: known.baseline["vocab_size"],
        lambda chosen, seed, rows: _tensors(make(chosen, rows, seed, **training)),
        lambda chosen, model, count: accuracy(logits_of(model), make(chosen, count, TEST_SEED))["accuracy"],
        lambda chosen: None,
    )


def _text() -> Task:
    def corpus(chosen: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        parts = text.documents_corpus(tuple(chosen.get("data") or ("embedded",)))
        if min(map(len, parts)) <= chosen["length"]:
            raise ValueError(
                f"the text has {len(parts[0]):,} bytes for training and {len(parts[1]):,} held out, "
                f"but both parts must be longer than length={chosen['length']}"
            )
        return parts

    def train(chosen: dict[str, Any], seed: int, rows: int) -> tuple[Tensor, Tensor]:
        ids = text.rows(corpus(chosen)[0], rows, chosen["length"], seed)
        return ids, ids

    return Task(
        "text",
        "bytes of the text of --data; by default Python's own documentation",
        "bits per byte",
        False,
        lambda chosen: 256,
        train,
        lambda chosen, model, count: text.bits(model, text.rows(corpus(chosen)[1], count, chosen["length"], TEST_SEED)),
        lambda chosen: None,
    )


TASKS: dict[str, Task] = {
    task.name: task for task in (_mqar(), *(_mad(name) for name in MAD_TASKS if name != "compression"), _text())
}
