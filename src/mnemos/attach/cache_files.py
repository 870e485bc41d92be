"""Files of `AttachedCache`: safetensors whose header binds them to a base and its memories; checked before anything is used.

Shapes: B rows, H key-value heads, D head dim, P columns read so far.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..memory.files import one_line, read_tensors, write_tensors
from ..memory.state import state_from_tensors
from ..memory.state_validation import MAX_POSITION, check_floats, check_position, check_shapes
from .architectures import key_value_shape
from .cache import AttachedCache
from .identity import base_hash, memory_hash

if TYPE_CHECKING:
    from .model import AttachedForCausalLM

FORMAT = "mnemos.attached-cache/1"


def write_cache(path: str | os.PathLike, cache: AttachedCache, model: AttachedForCausalLM) -> None:
    """Write the cache of a model; whole or not at all."""
    tensors, header = cache_contents(cache)
    write_tensors(path, tensors, _identity(model) | {"format": FORMAT} | header)


def cache_contents(cache: AttachedCache) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a cache and the header that describes them, without the identity of its model."""
    if not isinstance(cache, AttachedCache) or cache.position is None:
        raise ValueError(
            "a state is an AttachedCache that has read at least one token, as model.state(input_ids) returns it"
        )
    return cache.tensors(), {"length": str(cache.length), "memory_layers": json.dumps(sorted(cache.memory))}


def _identity(model: AttachedForCausalLM) -> dict[str, str]:
    base = model.base.config
    sizes = {"model_type": base.model_type, "layers": base.num_hidden_layers, "hidden_size": base.hidden_size}
    sizes |= {"key_value_shape": list(key_value_shape(base))}
    found = {"attach": model.attach_config.to_json(), "base": json.dumps(sizes, sort_keys=True)}
    return found | {"base_hash": base_hash(model.base), "memory_hash": memory_hash(model.memories)}


def read_cache(path: str | os.PathLike, model: AttachedForCausalLM) -> AttachedCache:
    """Read a file of `write_cache` for a model; raises a ValueError if it does not fit it exactly."""
    tensors, header = read_tensors(path, "state of an attached model", FORMAT, "cpu")
    words = {
        "attach": "an AttachConfig",
        "base": "a base model",
        "base_hash": "base weights",
        "memory_hash": "memories",
    }
    for name, value in _identity(model).items():
        if header.get(name) != value:
            raise ValueError(f"{path} belongs to a model with {words[name]} other than those of this one")
    return cache_from_contents(path, tensors, header, model)


def cache_from_contents(
    path: str | os.PathLike, tensors: dict[str, Tensor], header: dict[str, str], model: AttachedForCausalLM
) -> AttachedCache:
    """The inverse of `cache_contents`, after all checks but that of the model's identity. path: the name of the file in errors."""
    try:
        length, layers = json.loads(header["length"]), json.loads(header["memory_layers"])
        if type(length) is not int or not 1 <= length <= MAX_POSITION:
            raise ValueError(f"length={length!r:.40}")
        if not isinstance(layers, list) or any(type(i) is not int for i in layers):
            raise ValueError(f"memory_layers={layers!r:.40}")
    except (KeyError, TypeError, ValueError, RecursionError) as broken:
        raise ValueError(f"{path} has a broken header: {one_line(broken)}") from None
    expected = [int(i) for i in model.memories]
    if layers not in ([], sorted(expected)):
        raise ValueError(
            f"{path} has memories of layers {str(layers)[:60]}, but those of {sorted(expected)} are expected"
        )
    position = tensors.get("position")
    check_position(path, position)
    assert position is not None
    if int(position.max()) > length:
        raise ValueError(f"{path} does not fit its own header: length={length} of rows at {position.tolist()[:8]}")
    cache = model.new_cache()
    _fill_attention(path, cache, tensors, length, model)
    memory = model.attach_config.memory_config(model.base.config.hidden_size)
    width, channels = memory.conv_width, memory.conv_channels
    for i in layers:
        own = {k.removeprefix(f"memory.{i}."): tensors.pop(k) for k in list(tensors) if k.startswith(f"memory.{i}.")}
        where = f"{path}, memory of layer {i},"
        state = state_from_tensors(where, memory.spec, own, memory.head_count, (width - 1, channels) if width else None)
        if state.batch != len(position) or bool((state.position > position).any()):
            raise ValueError(f"{path} does not fit its own header: the memory of layer {i} is at another position")
        cache.memory[i] = state
    cache.position, cache.length = tensors.pop("position"), length
    if tensors:
        raise ValueError(f"{path} does not fit its own header: {min(tensors):.60} belongs to no layer")
    return cache.to(model.device)


def _fill_attention(path, cache: AttachedCache, tensors: dict[str, Tensor], length: int, model) -> None:
    """Keys, values and mask of the file, each of the shape that the config gives it."""
    rows, (heads, dim) = len(tensors["position"]), key_value_shape(model.base.config)
    expected, found = {}, {}
    for i, layer in enumerate(cache.layers):
        if model.limits is not None:
            columns = sum(model.limits[i][:2])
        else:
            own = getattr(layer, "sliding_window", None)
            columns = length if own is None else min(length, own - 1)
        for name in (f"attention.{i}.key", f"attention.{i}.value"):
            expected[name] = (rows, heads, columns, dim)
    found = {name: tensors.pop(name) for name in list(tensors) if name.startswith("attention.")}
    check_shapes(path, found, expected)
    check_floats(path, found)
    if len({x.dtype for x in found.values()}) > 1:
        raise ValueError(f"{path} mixes number types in attention")
    mask = tensors.pop("mask", None)
    if mask is not None:
        if model.limits is not None or mask.dtype != torch.bool or tuple(mask.shape) != (rows, length):
            raise ValueError(f"{path} does not fit its own header: mask is {tuple(mask.shape)} of {mask.dtype}")
        cache.mask = mask
    for i, layer in enumerate(cache.layers):
        key, value = found[f"attention.{i}.key"], found[f"attention.{i}.value"]
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
