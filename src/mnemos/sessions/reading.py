"""Reading tokens from a state on, for models of the package and attached models.

Shapes: B batch rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def read_tokens(model: Any, cache: Any, ids: Tensor, is_own: bool = False) -> tuple[Tensor, Any]:
    """Logits (B, V) after new tokens (B, T), and the new cache. is_own: no other object holds the cache, so it may be changed.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("deltanet", "nano")).eval()
    >>> logits, cache = read_tokens(model, None, torch.tensor([[1, 2, 3]]))
    >>> logits.shape, cache.get_seq_length()
    (torch.Size([1, 256]), 3)
    """
    if cache is not None:
        if not getattr(cache, "advances_in_place", False):
            cache.inplace = is_own
        elif not is_own:
            cache = cache.clone()
    found = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return found.logits[:, -1], found.past_key_values
