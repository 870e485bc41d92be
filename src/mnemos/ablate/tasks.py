"""What an ablation is trained and scored on: MQAR, five tasks of MAD, and the embedded text.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.embedded import documents
from ..data.tasks import MAD_TASKS, Examples, mad, mqar
from ..eval.recall import accuracy, logits_of

TEST_SEED = 2**31  # no training batch has it
TEXT_CHARACTERS = 2**20


@dataclass(frozen=True)
class Task:
    """vocab_size: of the model. train(seed, rows, T): inputs and labels (B, T) as transformers' models take them.
    score(model, examples, T): one number; `higher` is better, or lower. chance: what guessing scores, where that is known."""

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
        "multi-query associative recall, as Zoology has it",
        "accuracy",
        True,
        lambda chosen: chosen["vocab_size"],
        lambda chosen, seed, rows: _tensors(make(chosen, rows, seed)),
        lambda chosen, model, count: accuracy(logits_of(model), make(chosen, count, TEST_SEED))["accuracy"],
        lambda chosen: 1 / (chosen["vocab_size"] - chosen["vocab_size"] // 2),
    )


def _mad(name: str) -> Task:
    known = MAD_TASKS[name]
    training = {"training": True} if "recall" in name else {}  # MAD asks these for every next token while it trains

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


@functools.cache
def _text() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and bytes held out."""
    text = np.frombuffer("".join(documents(TEXT_CHARACTERS)).encode(), np.uint8).astype(np.int64)
    border = len(text) * 19 // 20
    return text[:border], text[border:]


def _rows(text: np.ndarray, length: int, rows: int, seed: int) -> Tensor:
    starts = np.random.default_rng(seed).integers(len(text) - length, size=rows)
    return torch.from_numpy(np.stack([text[i : i + length] for i in starts]))


@torch.no_grad()
def _bits_per_byte(model: Any, ids: Tensor, batch: int = 16) -> float:
    losses = [model(rows, labels=rows, use_cache=False).loss.double() * len(rows) for rows in ids.split(batch)]
    return float(sum(losses) / len(ids) / math.log(2))


def _embedded() -> Task:
    def train(chosen: dict[str, Any], seed: int, rows: int) -> tuple[Tensor, Tensor]:
        ids = _rows(_text()[0], chosen["length"], rows, seed)
        return ids, ids

    return Task(
        "text",
        "bytes of the text that is on every machine",
        "bits per byte",
        False,
        lambda chosen: 256,
        train,
        lambda chosen, model, count: _bits_per_byte(model, _rows(_text()[1], chosen["length"], count, TEST_SEED)),
        lambda chosen: None,
    )


TASKS: dict[str, Task] = {
    task.name: task for task in (_mqar(), *(_mad(name) for name in MAD_TASKS if name != "compression"), _embedded())
}
