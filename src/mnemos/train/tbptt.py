"""Truncated backpropagation through time: batch rows continue with the detached memory state of the previous batch.

Shapes: b batch rows of this process; row i of process r of w is row i·w + r of the global batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.cache import MnemosCache


class CarriedState:
    """The cache after the last batch, detached. Rows that begin a new document restart from the initial state, inside the graph of the step."""

    def __init__(self) -> None:
        self.cache: MnemosCache | None = None

    def before(self, call, batch: dict[str, Tensor]) -> MnemosCache | None:
        """The initial cache of a batch; None before the first one.

        A row that begins a new document needs the initial state: the cache after one masked token.
        It is computed in every step, used or not, so that all processes run the same operations.
        """
        if self.cache is None:
            return None
        nothing = batch["input_ids"].new_zeros(1, 1)
        fresh = call(input_ids=nothing, attention_mask=nothing, use_cache=True, return_logits=False).past_key_values
        goes_on = batch["continues"].tolist() if "continues" in batch else [True] * self.cache.batch
        rows = [i if on else self.cache.batch for i, on in enumerate(goes_on)]
        return MnemosCache.stack([self.cache, fresh]).select(rows)

    def after(self, cache: MnemosCache | None) -> None:
        self.cache = None if cache is None else cache.detach()

    def drop(self) -> None:
        self.cache = None

    def save(self, path: Path) -> None:
        assert self.cache is not None
        self.cache.save(path)

    def load(self, folder: Path, rank: int, size: int, saved_size: int, config: Any, device: torch.device) -> None:
        """Load this process's rows from the files that `saved_size` processes wrote."""
        names = [folder / f"carried-{r}.safetensors" for r in range(saved_size)]
        if not all(name.exists() for name in names):
            self.cache = None
            return
        if size == saved_size:
            self.cache = MnemosCache.load(names[rank], config, device).with_any_start()  # training has moved W0
            return
        parts = [MnemosCache.load(name, config, device).with_any_start() for name in names]
        each = parts[0].batch
        mine = range(rank, each * saved_size, size)
        self.cache = MnemosCache.stack(parts).select([(row % saved_size) * each + row // saved_size for row in mine])
