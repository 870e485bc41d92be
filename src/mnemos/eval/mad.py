"""The six MAD tasks: scores of models trained on them, and the decoder of the compression task.

Shapes: B batch rows, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..choices import unknown
from ..data.tasks import MAD_TASKS, mad
from ..nn.norm import RMSNorm
from .recall import ProgressCallback, accuracy, device_of, logits_of, vocabulary_of


class MADDecoder(nn.Module):
    """Decodes all tokens from the hidden state after the last one: a small MLP maps this state plus a position embedding to the token at
    that position; ids (B, T) -> logits (B, T, V). MAD's compression task trains and scores this; both MLP layers have width D, as in MAD.
    (Differences: MAD's benchmark uses LayerNorm and does not normalise the state before the position is added. An odd D ends in 0.)

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> decoder = MADDecoder(MnemosForCausalLM(presets.config("titans-lmm", vocab_size=16)))
    >>> decoder(torch.tensor([[1, 2, 15]])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(self, model: Any):
        super().__init__()
        D = model.config.hidden_size
        self.model, self.config = model, model.config
        self.mlp = nn.Sequential(RMSNorm(D), nn.Linear(D, D), nn.GELU(), RMSNorm(D), nn.Linear(D, D), nn.GELU())
        self.unembed = nn.Sequential(RMSNorm(D), nn.Linear(D, model.config.vocab_size))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        places = sinusoids(input_ids.shape[1], hidden.shape[-1]).to(hidden)
        return self.unembed(self.mlp(hidden[:, -1:] + places))  # B T V


def sinusoids(length: int, dim: int) -> Tensor:
    """Sinusoidal position embeddings: (length, dim)."""
    rates = torch.exp(-math.log(10000.0) * torch.arange((dim + 1) // 2) / max(1, (dim + 1) // 2 - 1))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :dim]


def mad_score(
    model: Any,
    task: str,
    examples: int | None = None,
    batch_size: int = 64,
    seed: int = 1,
    progress: ProgressCallback | None = None,
    **settings,
) -> dict[str, Any]:
    """A model's score on one MAD task, at its baseline or with changed `settings`. Compression needs a `MADDecoder`.

    The model must have been trained on the task, on examples of another seed; for `memorization` with the same `map_seed`.
    """
    if task not in MAD_TASKS:
        raise unknown("task", task, MAD_TASKS)
    known = MAD_TASKS[task]
    chosen = known.baseline | settings
    if chosen["vocab_size"] > vocabulary_of(model):
        raise ValueError(f"{task} has vocab_size={chosen['vocab_size']}, but the model has {vocabulary_of(model)}")
    made = mad(task, examples or known.test_examples, seed, **settings)
    if task == "compression" and not isinstance(model, MADDecoder):
        raise ValueError(
            "compression is decoded from the last token only: train and give a mnemos.eval.mad.MADDecoder(model)"
        )
    score = model if task == "compression" else logits_of(model)
    return {"task": task, "settings": chosen} | accuracy(score, made, batch_size, device_of(model), progress)
