"""Generation from a past: the mask of the new tokens, and the record that `state_after` reads.

Shapes: B rows of the input; R rows of the output; T new columns; P columns of the past.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from .cache import MnemosCache

MAX_MASK_NUMEL = 2**28  # two gigabytes; a cache from a file may claim any length


def mask_of_new(cache: MnemosCache, new: Tensor | None, name: str, mask: Tensor | None) -> Tensor | None:
    """The mask (B, P + T) of new tokens (B, T, ...) behind `cache`, from one of T or P + T columns; None stays None."""
    if new is None or new.dim() < 2 or new.shape[1] == 0:
        raise ValueError(
            "past_key_values is given, so input_ids must hold the new tokens: (B, T) with at least one column"
        )
    B, T = new.shape[:2]
    if B % cache.batch:
        raise ValueError(f"past_key_values has {cache.batch} rows, but {name} has {B}; see cache.select and cache.fork")
    if mask is None:
        return None
    check_mask(mask, (B, T), cache.length)
    return with_past(mask, cache.length) if mask.shape[1] == T else mask


def check_mask(mask: Tensor, shape: tuple[int, int], past: int) -> None:
    """Refuse a mask that has neither the new columns nor the past's and the new ones."""
    if mask.dim() != 2 or mask.shape[0] != shape[0] or mask.shape[1] not in (shape[1], past + shape[1]):
        both = f" (the new tokens) or {(shape[0], past + shape[1])} (the past and the new tokens)" if past else ""
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, but {shape}{both} is expected")


def with_past(mask: Tensor, past: int) -> Tensor:
    """Mask of the new tokens (B, T) -> (B, P + T), as transformers expects it beside a cache."""
    if mask.shape[0] * past > MAX_MASK_NUMEL:
        raise ValueError(
            f"the cache has read {past} tokens, and generate keeps a mask of them all for each of its {mask.shape[0]} rows; "
            "call the model token by token instead"
        )
    return torch.cat([mask.new_ones(mask.shape[0], past), mask], dim=1)


class Record(StoppingCriteria):
    """What one `generate` read, and where its rows ended. It travels as a stopping criterion that never stops.

    past: the cache it began from. pieces: inputs and masks (or None), in the order read. columns: of the prompt in `sequences`.
    ends: (rows,) columns of each row that are no padding, -1 for a row that did not end by itself; None if none is padded.
    """

    def __init__(self):
        self.past: MnemosCache | None = None
        self.pieces: list[tuple[dict[str, Any], Tensor | None]] = []
        self.columns, self.length = 0, 0
        self.ends: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def add(self, columns: int, inputs: dict[str, Any]) -> None:
        """Add what the first call of the model gets; a prompt that is read in chunks has several."""
        if not self.pieces:
            self.past = inputs.get("past_key_values")
            self.length = 0 if self.past is None else self.past.length
        read = {name: inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None}
        new = next(iter(read.values())).shape[1]
        mask = inputs.get("attention_mask")
        self.pieces.append((read, None if mask is None else mask[:, -new:]))
        self.columns, self.length = self.columns + columns, self.length + new

    def lengths(self, outputs) -> Tensor | None:
        """Columns of each row of `outputs.sequences` (R,) that are no padding; None if none is padded."""
        columns = outputs.sequences.shape[1]
        if getattr(outputs, "beam_indices", None) is not None:
            return self.columns + (outputs.beam_indices >= 0).sum(1)
        if self.ends is None or not bool(((self.ends >= 0) & (self.ends < columns)).any()):
            return None
        return self.ends.where(self.ends >= 0, columns).clamp(max=columns)


class RecordedCriteria(StoppingCriteriaList):
    """Stopping criteria that note in `record` when a row ended."""

    record: Record

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        done = super().__call__(input_ids, scores, **kwargs)
        if input_ids.shape[0] > 1:
            ends = (
                self.record.ends if self.record.ends is not None else done.new_full(done.shape, -1, dtype=torch.int64)
            )
            self.record.ends = torch.where(done & (ends < 0), input_ids.shape[1], ends)
        return done


def recorded(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """The criteria without the `Record` among them, which notes where each row ends. Rows are padded only after an eos."""
    record = next((c for c in criteria if isinstance(c, Record)), None)
    if record is None:
        return criteria
    others = [c for c in criteria if c is not record]
    if not any(hasattr(c, "eos_token_id") for c in others):
        return StoppingCriteriaList(others)
    found = RecordedCriteria(others)
    found.record = record
    return found
