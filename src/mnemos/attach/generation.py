"""Generation of an attached model: `generate` on a copy of the cache, `state`, `state_after`, and files of states.

Shapes: B rows of the input; T new columns; P columns in the cache.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..models.generation import MnemosGenerationMixin, Record, mask_of_new
from .cache import AttachedCache
from .cache_files import read_cache, write_cache

if TYPE_CHECKING:
    from .model import AttachedForCausalLM


class AttachedGenerationMixin(MnemosGenerationMixin):
    """transformers' generation, with an `AttachedCache` that a later call can resume from."""

    cache_class = AttachedCache

    def _read(
        self, input_ids: Tensor | None, cache, mask: Tensor | None, embeds: Tensor | None = None
    ) -> AttachedCache:
        cache = None if cache is None else cache.clone()
        inputs: dict[str, Any] = {"past_key_values": cache, "inputs_embeds": embeds, "use_cache": True}
        if mask is not None or (cache is not None and cache.mask is not None):  # positions as `generate` counts them
            tokens: Any = input_ids if embeds is None else embeds[..., 0]
            valid = torch.ones_like(tokens) if mask is None else mask[:, -tokens.shape[1] :]
            before = 0 if cache is None else cache.position.unsqueeze(1)
            inputs["position_ids"] = (before + valid.long().cumsum(1) - 1).clamp(min=0)
        return self(input_ids, mask, logits_to_keep=1, **inputs).past_key_values  # ty: ignore[not-callable]

    def generate(self, inputs: Tensor | None = None, *args, **kwargs):
        """transformers' `generate`. With `past_key_values`, the input (B, T) holds the new tokens alone, and an attention_mask has their
        columns (B, T), or those of the cache too (B, P + T). The cache given stays as it is.

        `state_after(outputs)` returns the cache after exactly the tokens of `outputs.sequences`.
        """
        cache = kwargs.get("past_key_values")
        if isinstance(cache, AttachedCache):
            cache = kwargs["past_key_values"] = cache.clone()
            name = "inputs_embeds" if kwargs.get("inputs_embeds") is not None else "input_ids"
            new = inputs if inputs is not None else kwargs.get(name)
            mask = mask_of_new(cache, new, name, kwargs.get("attention_mask"))
            kwargs["attention_mask"] = None if mask is None else _with_valid_past(mask, cache)
        return super().generate(inputs, *args, **kwargs)

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args, record: Record | None = None, **kwargs):
        """The record keeps a copy of the cache that generation starts from, which later steps change."""
        found = super().prepare_inputs_for_generation(input_ids, *args, record=record, **kwargs)
        if record is not None and len(record.pieces) == 1 and record.past is found.get("past_key_values"):
            record.past = None if record.past is None or not record.past.length else record.past.clone()
        return found

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs):
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        cache = model_kwargs.get("past_key_values")
        return _with_valid_past(mask, cache) if isinstance(cache, AttachedCache) else mask

    def save_state(self: AttachedForCausalLM, cache: AttachedCache, path: str | os.PathLike) -> None:
        """Write a cache as a safetensors file, with the configs and the hashes of base and memories in its header; atomic."""
        write_cache(path, cache, self)

    def load_state(self: AttachedForCausalLM, path: str | os.PathLike) -> AttachedCache:
        """Read a file that `save_state` wrote. Raises a ValueError for a file of another base, of other memories, or a damaged one."""
        return read_cache(path, self)


def _with_valid_past(mask: Tensor, cache: AttachedCache) -> Tensor:
    """A mask (B, P + T) with the columns of the cache as they were read."""
    if cache.mask is None:
        return mask
    past = cache.mask.repeat_interleave(mask.shape[0] // cache.batch, 0)
    return torch.cat([past.to(mask), mask[:, cache.length :]], dim=1)
