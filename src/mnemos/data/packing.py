"""Packs documents into rows of T tokens. A row is a list of spans; no tokens are read yet.

`Stream`: concatenated documents, cut every T tokens. `Packed`: pieces of at most T tokens, several per row if they fit.
Both iterate over their documents endlessly, in an order fixed by a key and the epoch; their state is a few numbers.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

from .shuffle import mix, permute
from .splits import Documents

ORDER_CHUNK_ROWS = 256  # rows whose order is computed together
PACK_GROUP_PIECES = 1024  # pieces packed together


class Span(NamedTuple):
    """A range of tokens of a source; the labels of the first `ignored` tokens are masked."""

    source: int
    start: int
    length: int
    ignored: int = 0


class Row(NamedTuple):
    """Spans from left to right, then padding. continues: the row continues the row at this position of the previous batch."""

    spans: list[Span]
    continues: bool = False


class Stream:
    """Rows of T tokens of the concatenated documents; each epoch cuts at other positions and shuffles the rows."""

    def __init__(self, source: int, documents: Documents, bounds: np.ndarray, T: int, key: int):
        self.source, self.T, self.key = source, T, key
        starts, lengths = documents.starts, documents.lengths
        apart = np.ones(len(starts), bool)  # not adjacent to the previous document, or in another shard
        apart[1:] = (starts[1:] != starts[:-1] + lengths[:-1]) | np.isin(starts[1:], bounds)
        first = np.flatnonzero(apart)
        self.starts = starts[first]
        self.ends = np.add.reduceat(lengths, first).cumsum() if len(first) else lengths
        self.total = documents.tokens
        self.epoch = self.row = 0
        self._order: tuple[int, int, list[int]] = (-1, -1, [])

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "row": self.row}

    def load(self, state: dict[str, int]) -> None:
        self.epoch, self.row = state["epoch"], state["row"]

    def next(self) -> Row:
        phase = mix(self.key, self.epoch, 1) % min(self.T, self.total - self.T + 1)
        rows = (self.total - phase) // self.T
        if self.row >= rows:
            self.epoch, self.row = self.epoch + 1, 0
            return self.next()
        chunk = self.row // ORDER_CHUNK_ROWS
        if self._order[:2] != (self.epoch, chunk):
            places = np.arange(chunk * ORDER_CHUNK_ROWS, min(rows, (chunk + 1) * ORDER_CHUNK_ROWS))
            self._order = (self.epoch, chunk, permute(places, rows, mix(self.key, self.epoch)).tolist())
        offset = phase + self._order[2][self.row % ORDER_CHUNK_ROWS] * self.T
        self.row += 1
        return Row(self.spans(offset, self.T))

    def spans(self, offset: int, n: int) -> list[Span]:
        """The spans of the n tokens from `offset` on."""
        found, i = [], int(self.ends.searchsorted(offset, side="right"))
        while n and i < len(self.ends):
            left = int(self.ends[i]) - offset
            before = int(self.ends[i - 1]) if i else 0
            take = min(n, left)
            found.append(Span(self.source, int(self.starts[i]) + offset - before, take))
            offset, n, i = offset + take, n - take, i + 1
        return found

    def fixed(self, count: int) -> list[Row]:
        """At most `count` evenly spaced rows; the last one may be shorter."""
        rows = -(-self.total // self.T)
        count = min(count, rows)
        return [Row(self.spans(i * rows // count * self.T, self.T)) for i in range(count)]


class Packed:
    """Rows of documents; documents longer than T are cut into pieces, which repeat the last `overlap` tokens of the previous piece."""

    def __init__(self, source: int, documents: Documents, T: int, key: int, overlap: int = 0):
        self.source, self.T, self.key, self.overlap = source, T, key, overlap
        some = documents.lengths >= 2  # a single token has no target
        self.starts, self.lengths = documents.starts[some], documents.lengths[some]
        step = T - overlap
        over = self.lengths - T
        # without overlap the last piece is the remainder; with overlap the last window is full
        more = -(-over // step) if overlap else (over - 2) // T + 1
        self.ends = np.where(over > 0, 1 + np.maximum(more, 0), 1).cumsum()
        self.pieces = int(self.ends[-1]) if len(self.ends) else 0
        self.epoch = self.group = self.row = 0
        self._rows: tuple[int, int, list[Row]] = (-1, -1, [])

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "group": self.group, "row": self.row}

    def load(self, state: dict[str, int]) -> None:
        self.epoch, self.group, self.row = state["epoch"], state["group"], state["row"]

    def next(self) -> Row:
        if self._rows[:2] != (self.epoch, self.group):
            places = np.arange(self.group * PACK_GROUP_PIECES, min(self.pieces, (self.group + 1) * PACK_GROUP_PIECES))
            rows = self.pack(permute(places, self.pieces, mix(self.key, self.epoch)))
            order = permute(np.arange(len(rows)), len(rows), mix(self.key, self.epoch, self.group))
            self._rows = (self.epoch, self.group, [rows[i] for i in order])
        rows = self._rows[2]
        row = rows[self.row]
        self.row += 1
        if self.row == len(rows):
            self.row, self.group = 0, self.group + 1
            if self.group * PACK_GROUP_PIECES >= self.pieces:
                self.epoch, self.group = self.epoch + 1, 0
        return row

    def spans(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start, length and number of tokens shared with the previous piece, for each piece index."""
        document = self.ends.searchsorted(pieces, side="right")
        number = pieces - np.where(document > 0, self.ends[document - 1], 0)
        length = self.lengths[document]
        if not self.overlap:
            offset = number * self.T
            return self.starts[document] + offset, np.minimum(length - offset, self.T), np.zeros_like(offset)
        offset = np.minimum(number * (self.T - self.overlap), np.maximum(length - self.T, 0))
        before = np.where(number > 0, (number - 1) * (self.T - self.overlap) + self.T - offset, 0)
        return self.starts[document] + offset, np.minimum(length, self.T), before

    def pack(self, pieces: np.ndarray, once: bool = False) -> list[Row]:
        """Best-fit packing, longest piece first. once: a token shared by two windows has a label in the first one only."""
        starts, lengths, before = (column.tolist() for column in self.spans(pieces))
        rows: list[list[Span]] = []
        room: list[tuple[int, int]] = []  # (tokens left, row), sorted
        for i in sorted(range(len(starts)), key=lambda i: -lengths[i]):
            place = bisect.bisect_left(room, (lengths[i], -1))
            left, row = room.pop(place) if place < len(room) else (self.T, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(Span(self.source, starts[i], lengths[i], before[i] if once else 0))
            if left - lengths[i] >= 2:
                bisect.insort(room, (left - lengths[i], row))
        return [Row(spans) for spans in rows]

    def fixed(self, count: int) -> list[Row]:
        """At most `count` rows of evenly spaced pieces."""
        if not self.pieces:
            return []
        mean = max(1.0, float(np.minimum(self.lengths, self.T).mean()))
        wanted = min(self.pieces, int(count * self.T / mean) + 1)
        return self.pack(np.arange(wanted) * self.pieces // wanted, once=True)[:count]
