"""Sizes of the pages of a parquet column once unpacked, from their headers alone.

A value lies within one page, so no value is larger than its page. Headers are structs of Thrift's compact protocol (PageHeader in the
parquet format); only the fields named below are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

HEADER_BYTES = (2**12, 2**24)  # bytes read for a header, and bytes read if the first were too few
MAX_DEPTH = 16
TYPE, UNPACKED, PACKED = 1, 2, 3  # fields of a page header
PAGE_HEADER_FIELD = {0: 5, 2: 7, 3: 8}  # page type (data, dictionary, data v2) -> field that describes it
DICTIONARY, COUNT, ENCODING, DELTA_BYTE_ARRAY = 2, 1, {0: 2, 3: 4}, 7


class Page(NamedTuple):
    """bytes: size once unpacked. values: number of values, nulls included. expands: whether the values together can exceed the page."""

    bytes: int
    values: int
    expands: bool


def read_pages(file: BinaryIO, start: int, stop: int) -> list[Page]:
    """The pages between two offsets of a file, in order; ValueError if there are none."""
    pages = []
    while start < stop:
        for size in HEADER_BYTES:
            file.seek(start)
            header = _Header(file.read(size))
            try:
                fields = header.struct()
                break
            except IndexError:
                continue
        else:
            raise ValueError(f"there is no page header at byte {start}")
        kind, unpacked, packed = (fields.get(name, -1) for name in (TYPE, UNPACKED, PACKED))
        about = fields.get(PAGE_HEADER_FIELD.get(kind, -1), {})
        if not isinstance(about, dict) or min(unpacked, packed) < 0:
            raise ValueError(f"there is no page header at byte {start}")
        expands = kind == DICTIONARY or about.get(ENCODING.get(kind, -1)) == DELTA_BYTE_ARRAY
        pages.append(Page(unpacked, max(0, about.get(COUNT, 0)), expands))
        start += header.place + packed
    return pages


def bytes_of_rows(pages: Sequence[Page], rows: int) -> int:
    """Upper bound on the bytes of `rows` consecutive values: all pages they can touch, and copies of values in pages that expand.

    >>> bytes_of_rows([Page(100, 10, False)] * 9, 11), bytes_of_rows([Page(100, 10, True)], 11)
    (200, 1100)
    """
    worst = rows * max((page.bytes for page in pages if page.expands), default=0)
    plain = [page for page in pages if not page.expands]
    first = total = inside = 0  # inside: number of values between the first and the last page of a window
    for last, page in enumerate(plain):
        total += page.bytes
        inside += plain[last - 1].values if last > first + 1 else 0
        while last > first and inside > max(0, rows - 2):
            total -= plain[first].bytes
            first += 1
            inside -= plain[first].values if first < last else 0
        if last > first and rows == 1:
            total, first, inside = page.bytes, last, 0
        worst = max(worst, total)
    return worst


class _Header:
    """Parses a struct from bytes; raises an IndexError if they end too early."""

    def __init__(self, raw: bytes):
        self.raw, self.place = raw, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """The integers and structs among a struct's fields, by field id; other fields are skipped."""
        if depth > MAX_DEPTH:
            raise ValueError("a page header is nested too deeply")
        found: dict[int, Any] = {}
        field = 0
        while (byte := self._byte()) != 0:
            field = field + (byte >> 4) if byte >> 4 else self._zigzag()
            value = self._value(byte & 15, depth)
            if value is not None:
                found[field] = value
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (4, 5, 6):  # integers of 16, 32 and 64 bits
            return self._zigzag()
        if kind in (3, 7):  # a byte; a float of 64 bits
            self._skip(1 if kind == 3 else 8)
        elif kind == 8:  # bytes or text
            self._skip(self._varint())
        elif kind in (9, 10):  # a list or set
            byte = self._byte()
            count = byte >> 4 if byte >> 4 < 15 else self._varint()
            for _ in range(count):
                self._element(byte & 15, depth)
        elif kind == 12:
            return self.struct(depth + 1)
        elif kind not in (1, 2):  # true and false have no bytes
            raise ValueError(f"a page header has a field of unknown type {kind}")
        return None

    def _element(self, kind: int, depth: int) -> None:
        self._skip(1) if kind in (1, 2) else self._value(kind, depth + 1)
        if depth > MAX_DEPTH:
            raise ValueError("a page header is nested too deeply")

    def _byte(self) -> int:
        self.place += 1
        return self.raw[self.place - 1]

    def _skip(self, count: int) -> None:
        self.place += count
        if self.place > len(self.raw):
            raise IndexError

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a page header has a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
