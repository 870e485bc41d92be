"""Distillation in training: the divergence of a model with memories from its own base with full context.

Shapes: B batch, T time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..models.loss import IGNORED
from .base_config import DistillConfig

if TYPE_CHECKING:
    from ..attach import AttachedForCausalLM


class Distillation:
    """The term that a step adds to the loss. `options`: keywords of the student's call, whose output the term compares."""

    def __init__(self, model: AttachedForCausalLM, config: DistillConfig):
        self.model, self.config = model, config
        self.options: dict[str, Any] = {"return_logits": True, "output_hidden_states": config.hidden > 0}

    def __call__(self, outputs: Any, batch: dict[str, Tensor], items: float) -> Tensor:
        """This batch's share of the mean over the `items` predicted tokens of a step.

        The teacher runs after the student: under FSDP the whole model must be called first.
        """
        from ..attach import distillation_loss, teach

        config = self.config
        inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
        teacher = teach(self.model, **inputs, hidden_states=config.hidden > 0)
        mask = predicting(batch)
        loss = distillation_loss(outputs, teacher, mask, config.temperature, config.logits, config.hidden)
        return loss * (mask.sum() / items)


def predicting(batch: dict[str, Tensor]) -> Tensor:
    """The tokens whose next token is in the loss, (B, T) bool: as many as `losses.predicted_tokens` counts.

    >>> ids = torch.zeros(1, 4, dtype=torch.long)
    >>> predicting({"labels": ids, "position_ids": torch.tensor([[0, 1, 0, 1]])}).tolist()
    [[True, False, True, False]]
    """
    found = torch.zeros_like(batch["labels"], dtype=torch.bool)
    found[:, :-1] = batch["labels"][:, 1:] != IGNORED
    if "position_ids" in batch:
        found[:, :-1] &= batch["position_ids"][:, 1:] != 0
    return found
