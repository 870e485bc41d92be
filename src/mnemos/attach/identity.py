"""Hashes of weights, by which files of memories and states are bound to the model that they were made with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LORA = ".lora_"
WRAPPED = ".base_layer."


def weights_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of tensors and their names, each rounded to bfloat16: float32 and bfloat16 copies of weights have one hash.

    >>> x = torch.randn(3)
    >>> weights_hash([("a", x)]) == weights_hash([("a", x.bfloat16())])
    True
    """
    digest = hashlib.sha256()
    for name, x in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name}:{tuple(x.shape)}\n".encode())
        x = x.detach().to(torch.bfloat16) if x.is_floating_point() else x.detach()
        digest.update(x.cpu().contiguous().view(torch.uint8).reshape(-1).numpy())
    return digest.hexdigest()


def base_hash(base: PreTrainedModel) -> str:
    """The hash of a base model's weights, without LoRA maps that were added to it."""
    named = base.state_dict(keep_vars=True).items()
    return weights_hash((name.replace(WRAPPED, "."), x) for name, x in named if LORA not in name)


def memory_hash(memories: nn.Module) -> str:
    """The hash of the weights of memories."""
    return weights_hash(memories.state_dict().items())
