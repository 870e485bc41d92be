"""Recall over token ids: accuracy at the scored positions. MQAR, and functions shared by these tasks.

Shapes: N examples, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..choices import unknown
from ..data.tasks import IGNORED, MQAR_PRESETS, Examples, mqar

ProgressCallback = Callable[[int], object]


@torch.no_grad()
def accuracy(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    examples: Examples,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Score `examples`; logits_of maps ids (B, T) to logits (B, T, V).

    accuracy: over scored positions. exact: fraction of examples without a mistake. classwise: mean over labels of the accuracy, as MAD
    reports it (the published code uses the macro average: a label that is predicted but never a target counts as 0). loss: of scored
    positions, in nats.

    >>> always_3 = lambda ids: torch.nn.functional.one_hot(torch.full_like(ids, 3), 8).float()
    >>> accuracy(always_3, Examples(np.array([[1, 2], [5, 6]]), np.array([[-100, 3], [-100, 4]])))["accuracy"]
    0.5
    """
    total = int(examples.answers().sum())
    if total == 0:
        raise ValueError("the examples have no target: every label is -100")
    right, exact, loss = 0, 0, 0.0
    hits: dict[int, list[int]] = {}
    for start in range(0, len(examples.inputs), batch_size):
        ids = torch.from_numpy(examples.inputs[start : start + batch_size]).to(device)
        labels = torch.from_numpy(examples.labels[start : start + batch_size])
        asked = labels != IGNORED
        logits = logits_of(ids).float().cpu()[asked]  # scored positions, V
        wanted = labels[asked]
        said = logits.argmax(-1)
        correct = said == wanted
        loss += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").double())
        right += int(correct.sum())
        missed = torch.zeros_like(asked)
        missed[asked] = ~correct
        exact += int((~missed.any(1)).sum())
        for label in torch.cat([wanted, said]).unique().tolist():
            entry = hits.setdefault(label, [0, 0])
            entry[0] += int(correct[wanted == label].sum())
            entry[1] += int((wanted == label).sum())
        if progress is not None:
            progress(len(ids))
    return {
        "accuracy": right / total,
        "exact": exact / len(examples.inputs),
        "classwise": float(np.mean([good / max(count, 1) for good, count in hits.values()])),
        "loss": loss / total,
        "asked": total,
        "examples": len(examples.inputs),
    }


def logits_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A model's logits (B, T, V) as a function of ids (B, T)."""
    return lambda ids: model(input_ids=ids, use_cache=False).logits


def mqar_suite(
    model: Any,
    settings: Sequence[tuple[int, int]] | str = "based-test",
    vocab_size: int | None = None,
    examples: int | None = None,
    power: float = 0.01,
    fill: str = "random",
    batch_size: int = 64,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> list[dict[str, Any]]:
    """Accuracy on MQAR at each (pairs, length) of `settings`, or of one of `MQAR_PRESETS` by name, and chance, 1 / (V/2)."""
    if isinstance(settings, str):
        if settings not in MQAR_PRESETS:
            raise unknown("settings=", settings, MQAR_PRESETS)
        chosen = [(pairs, length, examples or count) for pairs, length, count in MQAR_PRESETS[settings]]
    else:
        chosen = [(pairs, length, examples or 1000) for pairs, length in settings]
    known = vocabulary_of(model)
    vocab_size = vocab_size or min(8192, known)
    if vocab_size > known:
        raise ValueError(f"vocab_size={vocab_size} is more than the model's {known}")
    keys = vocab_size // 2 - 1
    too_many = [pairs for pairs, *_ in chosen if pairs > keys]
    if too_many:  # before time is spent on the smaller ones
        fitting = [name for name, sizes in MQAR_PRESETS.items() if max(pairs for pairs, *_ in sizes) <= keys]
        advice = f"; the presets that fit are {', '.join(fitting)}" if fitting else ""
        raise ValueError(f"vocab_size={vocab_size} has {keys} keys, but num_kv_pairs={too_many[0]} are needed{advice}")
    rows = []
    for pairs, length, count in chosen:
        made = mqar(count, length, pairs, vocab_size, power, fill, seed)
        found = accuracy(logits_of(model), made, batch_size, device_of(model), progress)
        rows.append({"pairs": pairs, "length": length, "chance": 1 / (vocab_size - vocab_size // 2)} | found)
    return rows


def vocabulary_of(model: Any) -> int:
    return int(model.config.vocab_size)


def device_of(model: Any) -> torch.device:
    parameters = model.parameters() if hasattr(model, "parameters") else iter(())
    return next((p.device for p in parameters), torch.device("cpu"))
