"""The hash of a model, by which a session is bound to the model that it was made with."""

from __future__ import annotations

import hashlib
import json
import weakref
from typing import Any

import torch
from torch import Tensor

UNUSED_KEYS = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "backend")
_known: weakref.WeakKeyDictionary[Any, tuple[tuple, str]] = weakref.WeakKeyDictionary()


def model_hash(model: Any) -> str:
    """SHA-256 of the config and of all weights of a model, bit by bit; of an attached model: base and memories.

    It is computed once per model, and again after its weights were replaced or changed in place (except through `.data`).

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("deltanet", "nano"))
    >>> before = model_hash(model)
    >>> with torch.no_grad():
    ...     _ = model.lm_head.weight.zero_()
    >>> len(before), model_hash(model) == before
    (64, False)
    """
    tensors = sorted(model.state_dict().items())
    versions = tuple((name, x.data_ptr(), 0 if x.is_inference() else x._version, x.dtype) for name, x in tensors)
    known = _known.get(model)
    if known is None or known[0] != versions:
        known = _known[model] = versions, _hash(model.config.to_dict(), tensors)
    return known[1]


def _hash(config: dict[str, Any], tensors: list[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256(json.dumps(_defining(config), sort_keys=True, default=str).encode())
    for name, x in tensors:
        digest.update(f"\n{name}:{tuple(x.shape)}:{x.dtype}\n".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _defining(value: Any) -> Any:
    """A config without the keys that make no difference to a state, at any depth."""
    if not isinstance(value, dict):
        return value
    kept = {str(k): v for k, v in value.items() if not str(k).startswith("_") and k not in UNUSED_KEYS}
    return {k: _defining(v) for k, v in kept.items()}
