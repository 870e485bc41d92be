"""Pads samples of different lengths into one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .labels import IGNORED


def collate(samples: Sequence[Mapping[str, Tensor]], pad_token_id: int = 0) -> dict[str, Tensor]:
    """Pad on the right: input_ids with `pad_token_id`, labels with -100, attention_mask with 0.

    samples: each with input_ids (T,) and optionally labels (T,), which default to the input_ids. Returns tensors (B, longest T).

    >>> batch = collate([{"input_ids": torch.tensor([5, 6, 7])}, {"input_ids": torch.tensor([8])}])
    >>> batch["labels"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6, 7], [8, -100, -100]], [[1, 1, 1], [1, 0, 0]])
    """
    if not samples:
        raise ValueError("samples is empty: a batch needs at least one")
    length = max(len(sample["input_ids"]) for sample in samples)
    batch = {
        "input_ids": torch.full((len(samples), length), pad_token_id),
        "labels": torch.full((len(samples), length), IGNORED),
        "attention_mask": torch.zeros(len(samples), length, dtype=torch.int64),
    }
    for i, sample in enumerate(samples):
        ids = sample["input_ids"]
        labels = sample.get("labels", ids)
        if len(labels) != len(ids):
            raise ValueError(f"sample {i} has {len(ids)} input_ids but {len(labels)} labels: the lengths must be equal")
        batch["input_ids"][i, : len(ids)] = ids
        batch["labels"][i, : len(ids)] = labels
        batch["attention_mask"][i, : len(ids)] = sample.get("attention_mask", torch.ones(len(ids)))
    return batch
