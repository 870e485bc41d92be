"""Changes to a file that somebody hostile, a broken disk or another version could have made. All draw from the Random they get."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from fuzz_files import ITEM_BYTES, NUMPY, Raw, Stored, assemble, dump, stored

WHOLE = (-(2**63), -(2**31), -60, -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 255, 256, 1000, 2**16, 2**20, 2**24)
WHOLE += (2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1)
FLOATS = (0.0, -0.0, 1e-45, -1e-39, 1.0, -1.0, 0.5, 1e4, 1e18, -1e30, 3e38, -3e38, 1e300, np.nan, np.inf, -np.inf)
WORDS = (
    "",
    "x",
    "lmm",
    "mag",
    "mal",
    "mac",
    "qk",
    "swa",
    "attention",
    "linear",
    "mlp",
    "gated_mlp",
    "gd",
    "muon",
    "l2",
)
WORDS += ("dot", "exp", "identity", "elementwise", "tensor", "monomials", "sketch", "token", "chunk", "before", "after")
WORDS += ("MemoryState", "AttentionCache", "SegmentCache", "QKCache", "FrozenCache", "RowCache", "cpp", "torch", "auto")
WORDS += ("float16", "float64", "bfloat16", "../../etc/passwd", "a\nb", "\u0000", "\ud800", "é" * 300, "[1]", "{}", "1")


def odd_json(rng: Random, old: Any = None) -> Any:
    """A JSON value of any kind, near `old` or far from it."""
    kind = rng.randrange(12)
    if kind <= 3 and isinstance(old, int | float) and not isinstance(old, bool):
        return rng.choice([old + 1, old - 1, -old, old * 2, old // 2, old * 1000, float(old), str(old)])
    if kind <= 5:
        return rng.choice(WHOLE)
    if kind == 6:
        return rng.choice([*FLOATS, 10**30, 2**63, 2**64])
    if kind <= 8:
        return rng.choice(WORDS)
    if kind == 9:
        return rng.choice([None, True, False])
    if kind == 10:
        return rng.choice([[], {}, [old], {"a": old}, [1, "mag"], [0, 1], list(range(300))])
    deep: Any = old if rng.random() < 0.5 else []
    for _ in range(rng.choice([2, 30, 1200])):
        deep = [deep] if rng.random() < 0.5 else {"k": deep}
    return deep


def change_json(rng: Random, value: Any) -> Any:
    """`value` with one place in it changed, removed, doubled or joined by an unknown name."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        what = rng.randrange(10)
        if what == 0:
            return {k: v for k, v in value.items() if k != key}
        if what == 1:
            return value | {rng.choice([key + "x", "junk", "", "persistent", "window", "dtype"]): value[key]}
        if what == 2:
            other = rng.choice(sorted(value))
            return value | {key: value[other], other: value[key]}
        return value | {key: change_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        what = rng.randrange(5)
        if what == 0:
            return value[:at] + value[at + 1 :]
        if what == 1:
            return value[: at + 1] + value[at:]
        return [*value[:at], change_json(rng, value[at]), *value[at + 1 :]]
    return odd_json(rng, value)


# Tensors ------------------------------------------------------------------------------------------------------------


def drop_tensor(rng: Random, raw: Raw) -> None:
    raw.tensors.pop(rng.choice(list(raw.tensors)))


def rename_tensor(rng: Random, raw: Raw) -> None:
    name = rng.choice(list(raw.tensors))
    new = rng.choice(
        [
            name + ".0",
            name[:-1],
            "",
            "conv",
            "weights.9",
            "0.memory.junk",
            name.replace("0", "1", 1),
            "é",
            "a\nb",
            "x" * 900,
        ]
    )
    raw.tensors[new] = raw.tensors.pop(name)


def copy_tensor(rng: Random, raw: Raw) -> None:
    names = list(raw.tensors)
    raw.tensors[rng.choice(names)] = raw.tensors[rng.choice(names)]


def add_tensor(rng: Random, raw: Raw) -> None:
    name = rng.choice(["conv", "junk", "momentum.0", "pairs.key", "0.memory.conv", "0.attention.key", "1.qk.gram"])
    raw.tensors[name] = raw.tensors[rng.choice(list(raw.tensors))]


def swap_tensors(rng: Random, raw: Raw) -> None:
    a, b = rng.choice(list(raw.tensors)), rng.choice(list(raw.tensors))
    raw.tensors[a], raw.tensors[b] = raw.tensors[b], raw.tensors[a]


def set_numbers(rng: Random, raw: Raw) -> None:
    """One number, some, or all of a tensor."""
    names = list(raw.tensors)
    whole = [name for name in names if raw.tensors[name].dtype in ("I64", "I32")]
    name = rng.choice(whole if whole and rng.random() < 0.5 else names)
    x = raw.tensors[name]
    array = x.array.copy()
    if not array.size:
        return
    value = rng.choice(FLOATS if x.is_floating else WHOLE)
    flat = array.reshape(-1)
    with np.errstate(all="ignore"):
        filled = np.asarray(value).astype(array.dtype)
    many = rng.choice([1, 1, 3, array.size])
    for at in range(array.size) if many == array.size else [rng.randrange(array.size) for _ in range(many)]:
        flat[at] = filled
    raw.tensors[name] = stored(array, x.dtype)


def change_dtype(rng: Random, raw: Raw) -> None:
    """Converted numbers of another type, or the same bytes under another type of the same width."""
    names = list(raw.tensors)
    if rng.random() < 0.3:  # all floating tensors alike
        dtype = rng.choice(["F64", "F32", "F16", "BF16"])
        for name in names:
            if raw.tensors[name].is_floating:
                raw.tensors[name] = stored(raw.tensors[name].array, dtype)
        return
    name = rng.choice(names)
    x = raw.tensors[name]
    if rng.random() < 0.3:
        alike = [d for d, size in ITEM_BYTES.items() if size == ITEM_BYTES[x.dtype] and d != x.dtype]
        raw.replace(name, dtype=rng.choice(alike))
    else:
        raw.tensors[name] = stored(x.array, rng.choice([*NUMPY, "BF16", "F8_E4M3"]))


def change_shape(rng: Random, raw: Raw) -> None:
    """Another shape of the same size."""
    name = rng.choice(list(raw.tensors))
    shape = list(raw.tensors[name].shape)
    what = rng.randrange(6)
    if what == 0 and len(shape) > 1:
        a, b = rng.sample(range(len(shape)), 2)
        shape[a], shape[b] = shape[b], shape[a]
    elif what == 1:
        shape.insert(rng.randrange(len(shape) + 1), 1)
    elif what == 2 and len(shape) > 1:
        at = rng.randrange(len(shape) - 1)
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    elif what == 3 and shape:
        a, b = rng.randrange(len(shape)), rng.randrange(len(shape))
        if shape[a] % 2 == 0:
            shape[a] //= 2
            shape[b] *= 2
    elif what == 4:
        shape = [int(np.prod(shape))]
    else:
        shape = shape[::-1]
    raw.replace(name, shape=tuple(shape))


def resized(x: Stored, axis: int, size: int) -> Stored:
    """`x` cut, or filled up by repeating, to `size` along `axis`."""
    if axis >= len(x.shape) or np.prod([size if i == axis else n for i, n in enumerate(x.shape)]) > 2**16:
        return x
    if x.dtype not in ITEM_BYTES or not x.shape[axis]:
        shape = tuple(size if i == axis else n for i, n in enumerate(x.shape))
        return Stored(x.dtype, shape, bytes(int(np.prod(shape)) * ITEM_BYTES[x.dtype]))
    raw = np.frombuffer(x.data, f"V{ITEM_BYTES[x.dtype]}").reshape(x.shape)
    taken = np.take(raw, np.arange(size) % x.shape[axis], axis)
    return Stored(x.dtype, tuple(taken.shape), np.ascontiguousarray(taken).tobytes())


def resize_tensor(rng: Random, raw: Raw) -> None:
    name = rng.choice(list(raw.tensors))
    x = raw.tensors[name]
    if x.shape:
        axis = rng.randrange(len(x.shape))
        raw.tensors[name] = resized(x, axis, rng.choice([0, 1, 2, 3, x.shape[axis] + 1, x.shape[axis] * 2, 40]))


def resize_all(rng: Random, raw: Raw) -> None:
    """Rows, heads or a width changed wherever they occur: as consistent as a file of another layer."""
    names = list(raw.tensors)
    sizes = sorted({n for x in raw.tensors.values() for n in x.shape})
    if not sizes:
        return
    old, new = rng.choice(sizes), rng.choice([0, 1, 2, 3, 4, 8])
    prefix = rng.choice(["", "0.", "1.", "weights", "0.memory", "0.attention"])
    axes = rng.choice([(0,), (1,), (2,), (0, 1, 2, 3), (1, 2)])
    for name in names:
        if name.startswith(prefix):
            for axis, n in enumerate(raw.tensors[name].shape):
                if n == old and axis in axes:
                    raw.tensors[name] = resized(raw.tensors[name], axis, new)


def change_rows(rng: Random, raw: Raw) -> None:
    """Another number of rows, in every tensor but perhaps one."""
    size, kept = rng.choice([0, 1, 2, 3, 5]), rng.choice([None, *raw.tensors])
    for name, x in list(raw.tensors.items()):
        if name != kept and x.shape:
            raw.tensors[name] = resized(x, 0, size)


def change_metadata(rng: Random, raw: Raw) -> None:
    """A place inside a JSON string of the metadata, or a string itself."""
    if not raw.metadata:
        return
    name = rng.choice(sorted(raw.metadata))
    what = rng.randrange(10)
    if what == 0:
        del raw.metadata[name]
    elif what == 1:
        raw.metadata[name] = rng.choice(["", "x", "null", "[]", "{}", "NaN", "1e999", "[" * 5000, '"' * 3, "9" * 5000])
    else:
        try:
            raw.metadata[name] = dump(change_json(rng, json.loads(raw.metadata[name])))
        except (ValueError, RecursionError):
            raw.metadata[name] = dump(odd_json(rng, raw.metadata[name]))[:10000]


TENSOR_CHANGES: list[Callable[[Random, Raw], None]] = [
    drop_tensor,
    rename_tensor,
    copy_tensor,
    add_tensor,
    swap_tensors,
    set_numbers,
    set_numbers,
    set_numbers,
    change_dtype,
    change_dtype,
    change_shape,
    resize_tensor,
    resize_all,
    resize_all,
    change_rows,
    change_metadata,
    change_metadata,
    change_metadata,
    change_metadata,
]


# Whole files --------------------------------------------------------------------------------------------------------


def lie_in_header(rng: Random, raw: Raw) -> bytes:
    """A file whose header does not describe its bytes: offsets, shapes, types, doubled names, its own length."""
    head, body = raw.header()
    names = [name for name in head if name != "__metadata__"]
    what, length = rng.randrange(8), None
    if names and what <= 2:
        head[rng.choice(names)]["data_offsets"][rng.randrange(2)] = rng.choice([*WHOLE, len(body), len(body) + 1])
    elif names and what == 3:
        name = rng.choice(names)
        head[name] = change_json(rng, head[name])
    elif names and what == 4:
        shape = head[rng.choice(names)]["shape"]
        shape[rng.randrange(len(shape) + 1) :] = [rng.choice(WHOLE)]
    elif names and what == 5:
        text, name = dump(head), rng.choice(names)
        twice = f"{text[:-1]}, {json.dumps(name)}: {dump(head[rng.choice(names)])}}}"
        return assemble(twice, body)
    elif what == 6:
        length = rng.choice([*WHOLE, len(body), 7, 9, 100, 2**64 - 1])
    else:
        head = change_json(rng, head)
        return assemble(dump(head), body)
    return assemble(head, body, length)


def change_bytes(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    """Bits flipped, bytes set, cut, inserted, doubled, or joined with another file's, wherever they are."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        size = max(1, len(data))
        # the header is where a change tells; half of the places are in it
        at = rng.randrange(size) if rng.random() < 0.5 else rng.randrange(min(size, 4000))
        what, span = rng.randrange(8), rng.choice([1, 1, 2, 8, 64, 1000])
        if what <= 1:
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)] if at < len(data) else []) + data[at + 1 :]
        elif what == 2:
            data = data[:at] + bytes([rng.choice([0, 0xFF, 0x7F, 0x80, 0x2D, 0x30, 0x39, 0x22])]) + data[at + 1 :]
        elif what == 3:
            data = data[:at]
        elif what == 4:
            data = data[:at] + rng.randbytes(span) + data[at:]
        elif what == 5:
            data = data[:at] + data[at + span :]
        elif what == 6:
            data = data[:at] + data[at : at + span] + data[at:]
        else:
            other = rng.choice(others)
            data = data[:at] + other[rng.choice([at, rng.randrange(len(other) + 1)]) :]
    return data


def mutated(rng: Random, raw: Raw, others: list[Raw], whole: Callable[[Raw], bytes]) -> bytes:
    """A mutated safetensors file; `whole` writes an unchanged one."""
    kind = rng.random()
    if kind < 0.15:
        return change_bytes(rng, whole(raw), [whole(rng.choice(others))])
    raw = raw.copy()
    if kind < 0.22:  # a tensor or a header of another file
        other = rng.choice(others)
        if rng.random() < 0.5:
            raw.metadata = dict(other.metadata)
        else:
            name = rng.choice(list(other.tensors))
            raw.tensors[name] = other.tensors[name]
    else:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if raw.tensors:
                rng.choice(TENSOR_CHANGES)(rng, raw)
    return lie_in_header(rng, raw) if kind > 0.85 else whole(raw)


def mutated_text(rng: Random, text: str, others: list[str]) -> bytes:
    """A mutated JSON file: its values, or its bytes."""
    if rng.random() < 0.2:
        return change_bytes(rng, text.encode(), [x.encode() for x in others])
    value = json.loads(text)
    for _ in range(rng.choice([1, 1, 2])):
        value = change_json(rng, value)
    return dump(value).encode("utf-8", errors="surrogatepass")
