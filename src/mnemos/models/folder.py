"""Checks of the folder of a saved model: readable files, and weights that are complete, finite and fit the config."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..memory.files import LONGEST_NAME, one_line
from ..memory.files import check_names as printable_names
from .config import LIMITS

INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
WHOLE = ("max_length", "min_length", "max_new_tokens", "min_new_tokens", "num_beams", "num_return_sequences", "top_k")
NUMBERS = (*WHOLE, "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty")
FLAGS = ("do_sample", "use_cache", "early_stopping", "renormalize_logits", "remove_invalid_values", "low_memory")
FLAGS += ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate")
NOTES = ("transformers_version", "_from_model_config")
MAX_ROWS = 1024  # most beams or sequences that a file may set
LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
ALLOW = "allow_missing=True (--allow-missing) opens it all the same"
Shapes = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape and safetensors' name of the dtype


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as wrong:
        raise ValueError(f"{path} cannot be read: {wrong.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as wrong:
        raise ValueError(f"{path} is not valid JSON: {wrong}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a JSON {type(found).__name__}, but an object {{...}} is expected")
    return found


def check_files(folder: Path) -> None:
    """Raise a ValueError for JSON files and weight files that cannot be read, or that lie outside the folder."""
    if (folder / "config.json").is_file():
        kind = read_object(folder / "config.json").get("model_type")
        if kind != "mnemos":
            raise ValueError(f"{folder / 'config.json'} is of a model of type {kind!r:.60}, but 'mnemos' is expected")
    if (folder / "generation_config.json").is_file():
        _check_generation(folder / "generation_config.json")
    if (folder / "model.safetensors").is_file():
        read_shapes([folder / "model.safetensors"])
    elif (folder / INDEX).is_file():
        _check_index(folder / INDEX)


def check_depth(folder: Path, depth: Any = None) -> None:
    """Raise a ValueError if the weights have fewer layers than the config: thousands of layers take minutes to build.

    depth: number of layers; None takes that of config.json.
    """
    names: Iterable[str] = ()
    if (folder / "model.safetensors").is_file():
        names = read_shapes([folder / "model.safetensors"])
    elif (folder / INDEX).is_file():
        names = read_object(folder / INDEX)["weight_map"]
    if depth is None and (folder / "config.json").is_file():
        depth = read_object(folder / "config.json").get("num_hidden_layers")
    found = {place[1] for name in names if (place := LAYER.match(name))}
    if names and isinstance(depth, int) and len(found) < depth <= LIMITS["num_hidden_layers"]:
        raise ValueError(f"{folder} lacks {depth - len(found)} of the {depth} layers of its config; {ALLOW}")


def check_inside(folder: Path, files: Iterable[str | os.PathLike]) -> None:
    """Raise a ValueError for files outside the folder."""
    for file in files:
        if not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder)):
            raise ValueError(f"{folder} names the weights {os.fspath(file)!r:.120}, but a file inside it is expected")


def _check_index(path: Path) -> None:
    index = read_object(path)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not isinstance(index.get("metadata"), dict):
        raise ValueError(f"{path} lacks weight_map or metadata, which name the file of each tensor")
    for name in places.values():
        is_name = isinstance(name, str) and len(name) <= LONGEST_NAME and Path(name).name == name
        if not is_name or not name.endswith(".safetensors"):
            raise ValueError(f"{path} names the file {name!r:.80}, but a .safetensors file beside it is expected")
        if not (path.parent / name).is_file():
            raise ValueError(f"{path} names {name}, which is missing")


def _check_generation(path: Path) -> None:
    """Allow numbers, flags and token ids; other fields of a generation config may be set by the caller, not by a file."""
    given = read_object(path)
    for name, value in given.items():
        if value is None or (name in NOTES and isinstance(value, str | bool)):
            continue
        several = value if name in TOKEN_IDS and isinstance(value, list) else [value]
        kinds = int if name in WHOLE + TOKEN_IDS else int | float
        if name in FLAGS:
            right = isinstance(value, bool)
        elif name in NUMBERS + TOKEN_IDS:
            right = all(isinstance(x, kinds) and not isinstance(x, bool) for x in several)
        else:
            raise ValueError(f"{path} sets {name!r:.60}, which a file may not set: remove it and give it to generate()")
        if not right:
            expected = "True or False" if name in FLAGS else "a number"
            raise ValueError(f"{path} has {name}={value!r:.60}, but {expected} is expected")
        if name in ("num_beams", "num_return_sequences") and not 1 <= value <= MAX_ROWS:
            raise ValueError(f"{path} has {name}={value!r:.60}, but 1..{MAX_ROWS} is expected")


def read_shapes(files: Iterable[str | os.PathLike]) -> Shapes:
    """Shape and dtype of every tensor in safetensors files, from their headers alone."""
    found = {}
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_slice(name)
                    found[name] = (tuple(tensor.get_shape()), tensor.get_dtype())
        except (SafetensorError, OSError, ValueError, RuntimeError) as broken:
            raise ValueError(f"{path} is damaged or cut off: {one_line(broken)}") from None
        printable_names(path, found)
    return found


def check_shapes(where: str, expected: Mapping[str, tuple[int, ...]], found: Shapes, allow_missing: bool) -> None:
    """Raise a ValueError for tensors of another shape or dtype, and for missing and unexpected ones unless allow_missing."""
    for name, (shape, dtype) in found.items():
        if name in expected and shape != expected[name]:
            raise ValueError(f"{where}: tensor {name} has shape {shape}, but its config makes it {expected[name]}")
        if name in expected and dtype not in FLOATS:
            raise ValueError(f"{where}: tensor {name} is stored as {dtype}, but one of {', '.join(FLOATS)} is expected")
    if not allow_missing:
        check_names(where, expected.keys() - found.keys(), found.keys() - expected.keys())


def check_names(where: str, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise a ValueError if any tensor is missing or unexpected."""
    if missing := sorted(missing):
        raise ValueError(f"{where} lacks {_some(missing)} of its config; {ALLOW}")
    if unexpected := sorted(unexpected):
        raise ValueError(f"{where} has {_some(unexpected)} that its config does not have; {ALLOW}")


def check_finite(where: str, model: nn.Module) -> None:
    """Raise a ValueError for weights with NaN or infinity."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_floating_point() and not x.is_meta and not bool(torch.isfinite(x).all()):
            count = int((~torch.isfinite(x)).sum())
            raise ValueError(f"{where}: tensor {name} has {count:,} of {x.numel():,} values that are not finite")


def expected_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a model by its name in a file; tied tensors once."""
    tied = _tied(model)
    return {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in tied}


def _tied(model: Any) -> Iterable[str]:
    """Names of tensors that are tied to others."""
    return (model._tied_weights_keys or ()) if model.config.tie_word_embeddings else ()


def own_names(model: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by their names in `model`: a `MnemosModel` may be opened from the file of a language model, and the other way round.

    Tied copies are left out, and so is the head if `model` has none.
    """
    prefix, known, tied = "model.", model.state_dict().keys(), _tied(model)
    is_headless = not hasattr(model, "lm_head")
    renamed = {}
    for name, value in found.items():
        own = next((n for n in (name, prefix + name, name.removeprefix(prefix)) if n in known), name)
        if own not in tied and not (is_headless and own.startswith("lm_head.")):
            renamed[own] = value
    return renamed


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of a floating-point dtype.

    >>> dtype_name(torch.float32)
    'F32'
    """
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    return names.get(dtype, str(dtype))


def _some(names: list[str]) -> str:
    if len(names) == 1:
        return f"the tensor {names[0]}"
    return f"{len(names)} tensors ({', '.join(f'{name:.60}' for name in names[:3])}{', ...' if len(names) > 3 else ''})"
