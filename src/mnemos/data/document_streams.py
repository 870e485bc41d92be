"""Rows that continue from batch to batch: B lanes, each reading long documents in sequence, for models that carry their memory state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .packing import ORDER_CHUNK_ROWS, Row, Span
from .shuffle import mix, permute
from .splits import Documents


class Chapters:
    """The documents of a source, divided if longer than a lane's share, in an order fixed by a key and the epoch."""

    def __init__(self, source: int, documents: Documents, size: int, key: int):
        self.source, self.size, self.key = source, size, key
        some = documents.lengths >= 2
        self.starts, self.lengths = documents.starts[some], documents.lengths[some]
        self.ends = (-(-self.lengths // size)).cumsum()
        self.count = int(self.ends[-1]) if len(self.ends) else 0
        self._order: tuple[int, int, list[int]] = (-1, -1, [])

    def get(self, number: int) -> tuple[int, int]:
        """Start and length of chapter `number`, counted over all epochs."""
        epoch, place = divmod(number, self.count)
        chunk = place // ORDER_CHUNK_ROWS
        if self._order[:2] != (epoch, chunk):
            places = np.arange(chunk * ORDER_CHUNK_ROWS, min(self.count, (chunk + 1) * ORDER_CHUNK_ROWS))
            self._order = (epoch, chunk, permute(places, self.count, mix(self.key, epoch)).tolist())
        piece = self._order[2][place % ORDER_CHUNK_ROWS]
        document = int(self.ends.searchsorted(piece, side="right"))
        offset = (piece - (int(self.ends[document - 1]) if document else 0)) * self.size
        return int(self.starts[document]) + offset, min(self.size, int(self.lengths[document]) - offset)


class Lanes:
    """B rows of T tokens at a time.

    apart: a row never holds two documents (the rest is padding), and a new document does not continue the previous row; else the
    documents of a lane are concatenated, and every row but the first continues. endless: start over after the last document.
    """

    def __init__(
        self,
        documents: Sequence[Documents],
        weights: Sequence[float],
        B: int,
        T: int,
        key: int,
        apart: bool,
        endless: bool,
    ):
        self.chapters = [
            Chapters(i, part, max(T, -(-part.tokens // B)), mix(key, i)) for i, part in enumerate(documents)
        ]
        self.weights, self.B, self.T, self.apart, self.endless = weights, B, T, apart, endless
        self.taken = [0] * len(documents)  # chapters
        self.tokens = [0] * len(documents)
        self.lanes = [[-1, 0, 0] for _ in range(B)]  # source, position, tokens left
        self.begun = [0] * B

    def state(self) -> dict[str, list]:
        return {
            "taken": list(self.taken),
            "tokens": list(self.tokens),
            "lanes": [list(lane) for lane in self.lanes],
            "begun": list(self.begun),
        }

    def load(self, state: dict[str, list]) -> None:
        self.taken, self.tokens = list(state["taken"]), list(state["tokens"])
        self.lanes, self.begun = [list(lane) for lane in state["lanes"]], list(state["begun"])

    def rows(self) -> list[Row]:
        """The next row of every lane; a row without spans if no text is left."""
        return [self._row(b) for b in range(self.B)]

    def _row(self, b: int) -> Row:
        spans, room = [], self.T
        continues = bool(self.begun[b])
        if self.apart:
            continues = self.lanes[b][2] >= 2
        while room:
            spent = self.lanes[b][2] < (2 if self.apart else 1)
            if spent and ((self.apart and spans) or not self._open(b)):
                break
            source, start, left = self.lanes[b]
            take = min(room, left)
            spans.append(Span(source, start, take))
            self.lanes[b] = [source, start + take, left - take]
            room -= take
        self.begun[b] = 1
        return Row(spans, continues and bool(spans))

    def _open(self, b: int) -> bool:
        """Give a lane its next chapter, from the source that is furthest below its weight."""
        total = sum(self.tokens) + 1
        candidates = [i for i, c in enumerate(self.chapters) if c.count and (self.endless or self.taken[i] < c.count)]
        if not candidates:
            return False
        i = max(candidates, key=lambda i: self.weights[i] * total - self.tokens[i])
        start, length = self.chapters[i].get(self.taken[i])
        self.taken[i] += 1
        self.tokens[i] += length
        self.lanes[b] = [i, start, length]
        return True
