"""Checks of the inputs of a language model: token ids, embeddings, masks and labels.

Shapes: B batch, T time, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .loss import IGNORED

WHOLE = (torch.int64, torch.int32)


def embed(embedding: nn.Embedding, input_ids: Tensor) -> Tensor:
    """embedding(input_ids): (B, T) -> (B, T, D). Ids are checked only if that fails: a check before it would slow down decoding."""
    try:
        x = embedding(input_ids)
        if input_ids.is_meta and not x.is_meta:
            raise ValueError("input_ids are on the meta device, which has no values: move them to the model's device")
        return x
    except (IndexError, RuntimeError, TypeError):
        check_ids(input_ids, embedding.num_embeddings)
        raise


def check_ids(input_ids: Any, vocab_size: int, name: str = "input_ids") -> None:
    """Raise a ValueError for anything that is not a tensor (B, T) of token ids 0 .. vocab_size - 1."""
    if not isinstance(input_ids, Tensor):
        kind = type(input_ids).__name__
        how = "[tokenizer.encode(text)]" if isinstance(input_ids, str) else "[[1, 2, 3]]"
        raise ValueError(f"{name} is a {kind}, but a tensor of token ids (B, T) is expected: torch.tensor({how})")
    if input_ids.dtype not in WHOLE:
        raise ValueError(f"{name} has type {input_ids.dtype}, but token ids are torch.int64: use {name}.long()")
    if input_ids.dim() != 2:
        raise ValueError(f"{name} has {input_ids.dim()} dimensions, but (B, T) is expected")
    if input_ids.device.type == "cpu" and input_ids.numel():
        _check_range(input_ids, (input_ids < 0) | (input_ids >= vocab_size), vocab_size, name)


def check_embeds(x: Any, weight: Tensor) -> None:
    """Raise a ValueError for embeddings that do not fit a model with the embedding `weight` (V, D)."""
    wanted = f"a floating-point tensor (B, T, {weight.shape[1]})"
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = f"has type {x.dtype}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        raise ValueError(f"inputs_embeds {kind}, but {wanted} is expected: token ids go in as input_ids")
    if x.dim() == 3 and x.shape[2] != weight.shape[1]:
        raise ValueError(f"inputs_embeds has shape {tuple(x.shape)}, but {wanted} is expected")
    if x.dim() == 3 and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"inputs_embeds has type {x.dtype}, but the model's weights are {weight.dtype}; convert one, or use torch.autocast"
        )


def check_labels(labels: Any, shape: tuple[int, ...], vocab_size: int) -> None:
    """Raise a ValueError for labels that are not token ids or -100, of the tokens' shape (B, T)."""
    if not isinstance(labels, Tensor) or labels.dtype not in WHOLE:
        kind = f"have type {labels.dtype}" if isinstance(labels, Tensor) else f"are a {type(labels).__name__}"
        raise ValueError(
            f"labels {kind}, but a tensor of token ids {shape} is expected, with -100 for tokens without one"
        )
    if tuple(labels.shape) != shape:
        raise ValueError(f"labels have shape {tuple(labels.shape)}, but {shape} is expected, as of the tokens")
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = ((labels < 0) & (labels != IGNORED)) | (labels >= vocab_size)
        _check_range(labels, wrong, vocab_size, "labels", f", or {IGNORED} for tokens without a label")


def check_tensors(**given: Any) -> None:
    """Raise a ValueError for an argument that is neither a tensor nor None."""
    for name, x in given.items():
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}, but must be a tensor: torch.tensor(...)")


def _check_range(ids: Tensor, wrong: Tensor, vocab_size: int, name: str, others: str = "") -> None:
    if not wrong.any():
        return
    row, column = wrong.nonzero()[0].tolist()
    raise ValueError(
        f"token {ids[row, column].item()} in batch row {row}, position {column} of {name} is outside the model's vocabulary, "
        f"0 .. {vocab_size - 1}{others}: use the tokenizer that the model was trained with"
    )


class CheckedInputs:
    """Checks the ids of `generate` before transformers does."""

    def generate(self, inputs: Tensor | None = None, *args, **kwargs):
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        if ids is not None:
            check_ids(ids, self.config.vocab_size)  # ty: ignore[missing-attribute]
            if not ids.numel() and kwargs.get("inputs_embeds") is None:
                raise ValueError(f"input_ids has shape {tuple(ids.shape)}: give at least one sequence of one token")
        return super().generate(inputs, *args, **kwargs)  # ty: ignore[missing-attribute]
