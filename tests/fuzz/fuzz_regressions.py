"""Files that once crashed, hung, or were mishandled, by name: `python tests/fuzz/run.py --kind cache --named persistent-minus-60`.

Each is used in several ways (`PLANS`), as the target's own random plan has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_caches import MODELS
from fuzz_files import Raw, assemble, stored, to_bytes
from fuzz_models import CHOSEN
from fuzz_mutations import resized
from fuzz_states import LAYERS

PLANS = 8
FILES_PER_LAYER, FILES_PER_MODEL = 4, 3  # of the targets' corpora
Change = Callable[[Raw], Any]


def numbers(name: str, value: float, dtype: str | None = None) -> Change:
    """Every number of the tensors whose names end so."""

    def change(raw: Raw) -> None:
        for key, x in raw.tensors.items():
            if key.endswith(name):
                raw.tensors[key] = stored(np.full(x.shape, value, x.array.dtype), dtype or x.dtype)

    return change


def retyped(name: str, dtype: str) -> Change:
    """The same numbers as another type."""

    def change(raw: Raw) -> None:
        for key, x in raw.tensors.items():
            if key.endswith(name):
                raw.tensors[key] = stored(x.array, dtype)

    return change


def heads(count: int, prefix: str = "") -> Change:
    """A file of a memory with so many heads."""

    def change(raw: Raw) -> None:
        for key, x in raw.tensors.items():
            axis = 1 if key.removeprefix(prefix).startswith(("weights", "momentum", "anchor")) else 2
            if key.startswith(prefix) and not key.endswith(("position", "conv")):
                raw.tensors[key] = resized(x, axis, count)

    return change


def setting(where: str, path: list, value: Any) -> Change:
    """One place of a JSON string of the header; Ellipsis as a value removes it."""

    def change(raw: Raw) -> None:
        tree = json.loads(raw.metadata[where])
        raw.metadata[where] = json.dumps(changed(tree, path, value))

    return change


def changed(tree: Any, path: list, value: Any) -> Any:
    if not path:
        return value
    if len(path) == 1 and value is Ellipsis:
        return {k: v for k, v in tree.items() if k != path[0]}
    return tree | {path[0]: changed(tree[path[0]], path[1:], value)}


def dropped(name: str) -> Change:
    return lambda raw: raw.tensors.pop(name)


def claims(name: str, **fields: Any) -> Callable[[Raw], bytes]:
    """A file whose header says something else of one tensor."""

    def change(raw: Raw) -> bytes:
        head, body = raw.header()
        head[name] |= fields
        return assemble(head, body)

    return change


STATES: dict[str, tuple[str, Change]] = {
    "position-negative": ("no-conv", numbers("position", -1)),
    "position-largest": ("no-conv", numbers("position", 2**63 - 1)),
    "position-int32": ("no-conv", retyped("position", "I32")),
    "position-float32": ("no-conv", retyped("position", "F32")),
    "position-uint64": ("exp", retyped("position", "U64")),
    "one-head-for-four": ("no-conv", heads(1)),
    "four-heads-for-one": ("one-head", heads(4)),
    "four-heads-for-two-with-conv": ("mlp", heads(4)),
    "weights-nan": ("mlp", numbers("weights.0", np.nan)),
    "momentum-infinite": ("mlp", numbers("momentum.1", np.inf)),
    "conv-nan": ("mlp", numbers("conv", np.nan)),
    "conv-of-other-width": (
        "mlp",
        lambda raw: raw.tensors.update(conv=resized(raw.tensors["conv"], 2, 5)),
    ),
    "conv-missing": ("mlp", dropped("conv")),
    "dtype-of-two-lines": ("mlp", claims("weights.0", dtype="a\nb")),
    "name-of-two-lines": ("mlp", lambda raw: raw.tensors.update({"a\nb": raw.tensors["conv"]})),
    "weights-of-eight-bits": ("mlp", retyped("weights.0", "F8_E4M3")),
    "shape-beyond-all-strides": ("mlp", claims("conv", shape=[2**62, 2**40, 0])),
    "spec-of-wide-chunks": ("mlp", setting("spec", ["chunk_size"], 2**20)),
    "spec-of-wide-window": ("mlp", setting("spec", ["window"], 2**20)),
}

CACHES: dict[str, tuple[str, Change]] = {
    "position-negative": ("swa", numbers("position", -1)),
    "position-largest": ("swa", numbers("position", 2**63 - 1)),
    "position-int32": ("swa", retyped("position", "I32")),
    "position-float32": ("mag", retyped("position", "F32")),
    "position-uint32": ("attention", retyped("position", "U32")),
    "position-beyond-the-slots": ("attention", numbers("position", 2**32)),
    "position-of-one-part": ("mag", numbers("attention.position", 5)),
    "segment-position-largest": ("mac", numbers("position", 2**63 - 1)),
    "persistent-minus-60": ("mag", setting("states", ["0.attention", "persistent"], -60)),
    "persistent-3": ("mag", setting("states", ["0.attention", "persistent"], 3)),
    "persistent-true": ("mag", setting("states", ["0.attention", "persistent"], True)),
    "window-1000": ("mag", setting("states", ["0.attention", "window"], 1000)),
    "window-none": ("swa", setting("states", ["0.attention", "window"], None)),
    "window-word": ("swa", setting("states", ["0.attention", "window"], "4")),
    "segment-length-2": ("mac", setting("states", ["0.attention", "segment_len"], 2)),
    "spare-1000": ("attention", setting("states", ["0.attention", "spare"], 1000)),
    "one-head-for-four": ("lmm", heads(1, "0.memory.")),
    "one-slot": (
        "swa",
        lambda raw: raw.tensors.update(
            {name: resized(raw.tensors[name], 1, 1) for name in ("0.attention.key", "0.attention.value")}
        ),
    ),
    "keys-of-other-heads": (
        "mag",
        lambda raw: raw.tensors.update({"0.attention.key": resized(raw.tensors["0.attention.key"], 2, 1)}),
    ),
    "values-of-bytes": ("swa", retyped("attention.value", "U8")),
    "tail-of-other-width": (
        "swa-conv",
        lambda raw: raw.tensors.update({"0.attention.conv": resized(raw.tensors["0.attention.conv"], 1, 2)}),
    ),
    "tail-missing": ("swa-conv", dropped("1.attention.conv")),
    "tail-nan": ("mac-conv", numbers("attention.conv", np.nan)),
    "tail-in-double": ("mac-conv", retyped("attention.conv", "F64")),
    "config-of-wide-convolution": ("swa-conv", setting("config", ["attention_conv_width"], 2**20)),
    "config-without-convolution": ("swa-conv", setting("config", ["attention_conv_width"], 0)),
    "frozen-of-other-size": (
        "mac",
        lambda raw: raw.tensors.update({"0.frozen.weights": resized(raw.tensors["0.frozen.weights"], 1, 512)}),
    ),
    "gram-in-double": ("qk-gram", retyped("gram", "F64")),
    "keys-nan": ("swa", numbers("attention.key", np.nan)),
    "state-missing": ("mag", setting("states", ["0.attention"], ...)),
    "layer-missing": ("swa", setting("states", ["0.attention"], ...)),
    "states-missing": ("swa", setting("states", [], {})),
    "kind-of-another": ("swa", setting("states", ["0.attention", "kind"], "QKCache")),
    "kind-of-two-lines": ("swa", setting("states", ["0.attention"], "a\nb")),
    "length-of-two-lines": ("swa", lambda raw: raw.metadata.update(length='"a\\nb"')),
    "config-of-number-dtype": ("swa", setting("config", ["dtype"], 1e-45)),
    "length-negative": ("swa", lambda raw: raw.metadata.update(length="-9")),
    "length-largest": ("swa", lambda raw: raw.metadata.update(length=str(2**40))),
    "config-of-long-message": ("swa", setting("config", ["dropout"], list(range(300)))),
    "config-of-another-width": ("lmm", setting("config", ["hidden_size"], 16)),
    "config-of-many-layers": ("swa", setting("config", ["num_hidden_layers"], 2**31)),
    "config-without-layers": ("swa", setting("config", ["layers"], [])),
}

MODEL_FILES: dict[str, tuple[str, str, Any]] = {
    "weights-cut": ("mag", "model.safetensors", lambda data: data[: len(data) // 2]),
    "weights-empty": ("mag", "model.safetensors", lambda data: b""),
    "weights-header-cut": ("mag", "model.safetensors", lambda data: data[:40]),
    "config-number-for-memory": ("mag", "config.json", {"memory": 1.0}),
    "config-list": ("mag", "config.json", lambda data: b"[1]"),
    "config-nested-deep": ("mag", "config.json", lambda data: b"[" * 5000 + b"]" * 5000),
    "config-of-many-layers": ("mag", "config.json", {"num_hidden_layers": 2**31}),
    "config-of-thousands-of-layers": ("mac", "config.json", {"num_hidden_layers": 4000}),
    "config-of-large-vocabulary": ("mag", "config.json", {"vocab_size": 2**40}),
    "config-of-small-vocabulary": ("mag", "config.json", {"vocab_size": 3}),
    "config-of-wide-feedforward": ("mag", "config.json", {"intermediate_size": 2**40}),
    "config-of-many-persistent-tokens": ("mag", "config.json", {"num_persistent_tokens": 2**40}),
    "config-of-long-window": ("mag", "config.json", {"attention_window": 2**40}),
    "config-of-unknown-dtype": ("mag", "config.json", {"dtype": "5.23.0"}),
    "config-of-number-dtype": ("mag", "config.json", {"dtype": 1.5}),
    "config-of-unknown-type": ("mag", "config.json", {"model_type": 2}),
    "config-without-layers": ("mag", "config.json", {"layers": []}),
    "config-of-memory-layers-word": ("mag", "config.json", {"memory_layers": "01"}),
    "tokenizer-number": ("mag", "tokenizer.json", lambda data: b"3"),
    "tokenizer-list": ("mag", "tokenizer.json", lambda data: b"[]"),
    "tokenizer-without-model": ("mag", "tokenizer.json", {"model": None}),
    "tokenizer-config-number": ("mag", "tokenizer_config.json", lambda data: b"3"),
    "config-of-long-message": ("mag", "config.json", {"gate_init": list(range(300))}),
    "tokenizer-config-list": ("mag", "tokenizer_config.json", lambda data: b"[]"),
    "generation-config-number": ("mag", "generation_config.json", lambda data: b"3"),
    "generation-config-of-number-dtype": ("mag", "generation_config.json", {"dtype": 3}),
    "config-of-many-memory-layers": ("mag", "config.json", {"memory_layers": list(range(300))}),
    "generation-config-words": ("mag", "generation_config.json", {"max_new_tokens": "x", "eos_token_id": "y"}),
}
MODEL_WEIGHTS: dict[str, tuple[str, Change]] = {
    "tensor-missing": ("mag", dropped("model.norm.weight")),
    "tensor-nan": ("mag", numbers("model.norm.weight", np.nan)),
    "tensor-of-other-shape": (
        "mag",
        lambda raw: raw.tensors.update({"model.norm.weight": resized(raw.tensors["model.norm.weight"], 0, 5)}),
    ),
    "tensor-of-whole-numbers": ("mag", retyped("model.norm.weight", "I64")),
    "tensor-of-two-lines": ("mag", lambda raw: raw.tensors.update({"a\nb": raw.tensors["model.norm.weight"]})),
    "tensor-unknown": ("mag", lambda raw: raw.tensors.update(junk=raw.tensors["model.norm.weight"])),
}
NAMED = {"state": tuple(STATES), "cache": tuple(CACHES), "model": (*MODEL_FILES, *MODEL_WEIGHTS)}


def write_named(target, name: str, folder: Path) -> None:
    """The named file, as `target.mutate` would have written it."""
    if target.kind == "model":
        _write_model(target, name, folder)
        return
    owner, change = (STATES if target.kind == "state" else CACHES)[name]
    per_owner = FILES_PER_LAYER if target.kind == "state" else FILES_PER_MODEL
    target.chosen = list(LAYERS if target.kind == "state" else MODELS).index(owner) * per_owner + 1
    raw = target.raws[target.chosen].copy()
    made = change(raw)
    (folder / target.kind).write_bytes(made if isinstance(made, bytes) else to_bytes(raw))


def _write_model(target, name: str, folder: Path) -> None:
    if name in MODEL_FILES:
        owner, file, change = MODEL_FILES[name]
    else:
        owner, file, change = MODEL_WEIGHTS[name][0], "model.safetensors", MODEL_WEIGHTS[name][1]
    chosen = CHOSEN.index(owner)
    files = dict(target.folders[chosen])
    if name in MODEL_WEIGHTS:
        raw = target.raws[chosen].copy()
        change(raw)
        files[file] = to_bytes(raw)
    elif isinstance(change, dict):
        files[file] = json.dumps(json.loads(files[file]) | change).encode()
    else:
        files[file] = change(files[file])
    for key, data in files.items():
        (folder / key).write_bytes(data)
