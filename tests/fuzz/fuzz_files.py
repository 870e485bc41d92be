"""A safetensors file taken apart, so that its header, its shapes and its numbers can be changed one by one and put together again."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
NUMPY |= {"U64": "<u8", "U32": "<u4", "U16": "<u2", "BOOL": "?"}


@dataclass(frozen=True)
class Stored:
    """One tensor as the file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def array(self) -> np.ndarray:
        """The numbers; bfloat16 as float32, eight-bit floats as bytes."""
        if self.dtype == "BF16":
            wide = np.frombuffer(self.data, "<u2").astype("<u4") << 16
            return wide.view("<f4").reshape(self.shape)
        return np.frombuffer(self.data, NUMPY.get(self.dtype, "u1")).reshape(self.shape)

    @property
    def is_floating(self) -> bool:
        return self.dtype in ("F64", "F32", "F16", "BF16")


def stored(array: np.ndarray, dtype: str) -> Stored:
    """These numbers as a tensor of `dtype`, converted as far as numpy can."""
    with np.errstate(all="ignore"):
        if dtype == "BF16":
            raw = (array.astype("<f4").view("<u4") >> 16).astype("<u2")
        elif dtype in NUMPY:
            raw = array.astype(NUMPY[dtype])
        else:
            raw = array.astype("<f4").view("u1").reshape(-1)[: array.size]
    return Stored(dtype, tuple(array.shape), np.ascontiguousarray(raw).tobytes())


@dataclass
class Raw:
    """Tensors by name, and the strings of `__metadata__`."""

    tensors: dict[str, Stored]
    metadata: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Raw:
        return Raw(dict(self.tensors), dict(self.metadata))

    def header(self) -> tuple[dict, bytes]:
        """The header that fits the tensors, and their bytes."""
        head: dict = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        offset, parts = 0, []
        for name, x in self.tensors.items():
            head[name] = {
                "dtype": x.dtype,
                "shape": list(x.shape),
                "data_offsets": [offset, offset + len(x.data)],
            }
            offset += len(x.data)
            parts.append(x.data)
        return head, b"".join(parts)

    def replace(self, name: str, **changes) -> None:
        self.tensors[name] = dataclasses.replace(self.tensors[name], **changes)


def parse(data: bytes) -> Raw:
    """The parts of a sound file."""
    (size,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + size])
    metadata = head.pop("__metadata__", {})
    body = data[8 + size :]
    tensors = {
        name: Stored(x["dtype"], tuple(x["shape"]), body[slice(*x["data_offsets"])])
        for name, x in sorted(head.items(), key=lambda item: item[1]["data_offsets"])
    }
    return Raw(tensors, dict(sorted(metadata.items())))  # safetensors writes them in any order


def dump(value: Any) -> str:
    """JSON as Python writes it; in place of a value nested too deep for that, lists nested as deep."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "[" * 3000 + "]" * 3000


def assemble(header: dict | str, body: bytes, length: int | None = None) -> bytes:
    """A file of this header and body; `length` is what its first eight bytes claim."""
    text = header if isinstance(header, str) else dump(header)
    raw = text.encode("utf-8", errors="surrogatepass")
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw) if length is None else length % 2**64) + raw + body


def to_bytes(raw: Raw) -> bytes:
    return assemble(*raw.header())
