"""The pages of a parquet column, by their headers alone: how large the largest is once it is unpacked.

A value lies within one page, so that no value is larger. Headers are structs of Thrift's compact protocol (PageHeader of the parquet
format): field 2 is the size unpacked, field 3 the size in the file.
"""

from __future__ import annotations

from typing import BinaryIO

HEADER_BYTES = (2**12, 2**24)  # what is read of a header, and what is read if that was not enough
MAX_DEPTH = 16
UNPACKED, PACKED = 2, 3


def largest_page(file: BinaryIO, start: int, stop: int) -> int:
    """Bytes of the largest page, unpacked, between two places of a file; ValueError where there are no pages."""
    largest = 0
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
        unpacked, packed = fields.get(UNPACKED, -1), fields.get(PACKED, -1)
        if unpacked < 0 or packed < 0:
            raise ValueError(f"there is no page header at byte {start}")
        largest = max(largest, unpacked)
        start += header.place + packed
    return largest


class _Header:
    """Bytes of a struct, read from the front; an IndexError where they end too early."""

    def __init__(self, raw: bytes):
        self.raw, self.place = raw, 0

    def struct(self, depth: int = 0) -> dict[int, int]:
        """The whole numbers among a struct's fields, by field; everything else is passed over."""
        if depth > MAX_DEPTH:
            raise ValueError("a page header is nested too deeply")
        found, field = {}, 0
        while (byte := self._byte()) != 0:
            field = field + (byte >> 4) if byte >> 4 else self._zigzag()
            value = self._value(byte & 15, depth)
            if value is not None:
                found[field] = value
        return found

    def _value(self, kind: int, depth: int) -> int | None:
        if kind in (4, 5, 6):  # whole numbers of 16, 32 and 64 bits
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
            self.struct(depth + 1)
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
