"""Batches: rows read into tensors, made ahead in a thread, and an order that can be taken up again at any batch.

Shapes: B rows of the global batch, b = B / world_size of them here, T tokens.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .document_streams import Lanes
from .labels import IGNORED
from .packing import Packed, Row, Stream
from .shards import Store
from .shuffle import uniform

Batch = dict[str, Tensor]


class BatchPlan(Protocol):
    """Which rows make the next global batch."""

    def rows(self) -> list[Row]: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


class Mixture:
    """Each row is of the source that the seed and the row's number choose, by weight."""

    def __init__(self, sources: Sequence[Stream | Packed], weights: Sequence[float], B: int, seed: int):
        self.sources, self.edges, self.B, self.seed = sources, np.cumsum(weights)[:-1], B, seed
        self.count = 0

    def rows(self) -> list[Row]:
        found = []
        for _ in range(self.B):
            i = int(self.edges.searchsorted(uniform(self.seed, self.count), side="right"))
            found.append(self.sources[i].next())
            self.count += 1
        return found

    def state(self) -> dict[str, Any]:
        return {"rows": self.count, "sources": [source.state() for source in self.sources]}

    def load(self, state: dict[str, Any]) -> None:
        self.count = state["rows"]
        for source, its in zip(self.sources, state["sources"], strict=True):
            source.load(its)


class Assembler:
    """Rows to tensors: the rows rank::world_size of a global batch. `extra`: position_ids, continues, or neither."""

    def __init__(self, stores: Sequence[Store], T: int, eos: int, extra: str | None, rank: int, world_size: int):
        self.stores, self.T, self.eos, self.extra = stores, T, eos, extra
        self.rank, self.world_size = rank, world_size
        self.count_up = np.arange(T)

    def __call__(self, rows: Sequence[Row]) -> Batch:
        mine = rows[self.rank :: self.world_size]
        ids = np.full((len(mine), self.T), self.eos, np.int64)
        labels = np.full((len(mine), self.T), IGNORED, np.int64)
        positions = np.tile(self.count_up, (len(mine), 1)) if self.extra == "position_ids" else None
        for i, row in enumerate(mine):
            column = 0
            for source, start, length, ignored in row.spans:
                end = column + length
                self.stores[source].read(start, ids[i, column:end])
                labels[i, column + ignored : end] = ids[i, column + ignored : end]
                if positions is not None:  # padding behind the last one counts on: it is no document of its own
                    positions[i, column:] = self.count_up[: self.T - column]
                column = end
        batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if positions is not None:
            batch["position_ids"] = torch.from_numpy(positions)
        if self.extra == "continues":
            batch["continues"] = torch.tensor([row.continues for row in mine])
        return batch


class Batches:
    """An endless iterator of batches; `state_dict` is where it is, after the batch that was given out last.

    Batches made ahead do not count: what is taken up again is what was not given out yet.
    """

    def __init__(self, plan: BatchPlan, assemble: Assembler, identity: dict[str, Any], prefetch: int = 0):
        self.plan, self.assemble, self.identity, self.prefetch = plan, assemble, identity, prefetch
        self._state = plan.state()
        self._stop: Callable[[], None] | None = None
        self._queue: queue.Queue | None = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        if not self.prefetch:
            batch, self._state = _make(self.plan, self.assemble)
            return batch
        if self._queue is None:
            self._start()
        assert self._queue is not None
        made = self._queue.get()
        if isinstance(made, BaseException):
            self.close()
            raise made
        batch, self._state = made
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Numbers and strings; the same on every rank and for any world_size."""
        return {"position": self._state, "identity": self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of the same data, seed and shape of rows; others are refused."""
        theirs = state.get("identity", {})
        other = [name for name, value in self.identity.items() if theirs.get(name) != value]
        if other:
            told = ", ".join(f"{name} ({theirs.get(name)}, now {self.identity[name]})" for name in other)
            raise ValueError(f"the data cannot go on from this state, which was made with another {told}")
        self.close()
        self.plan.load(state["position"])
        self._state = self.plan.state()

    def close(self) -> None:
        """Stop making batches ahead. The next one asked for follows the last one given."""
        if self._stop is not None:
            self._stop()
            self._stop = self._queue = None
            self.plan.load(self._state)

    def _start(self) -> None:
        self._queue = queue.Queue(self.prefetch)
        stopped = threading.Event()
        thread = threading.Thread(
            target=_make_ahead, args=(self.plan, self.assemble, self._queue, stopped), name="mnemos-data", daemon=True
        )
        thread.start()
        _at_work[thread] = stopped
        weakref.finalize(self, stopped.set)  # the thread does not know this object, so it can be collected

        def stop() -> None:
            stopped.set()
            thread.join()

        self._stop = stop


_at_work: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


@atexit.register
def _let_them_end() -> None:
    """A thread inside torch while the interpreter goes away takes the process down with it (SIGABRT)."""
    for thread, stopped in list(_at_work.items()):
        stopped.set()
        thread.join()


def _make(plan: BatchPlan, assemble: Assembler) -> tuple[Batch, dict[str, Any]]:
    rows = plan.rows()
    return assemble(rows), plan.state()


def _make_ahead(plan: BatchPlan, assemble: Assembler, made: queue.Queue, stopped: threading.Event) -> None:
    while not stopped.is_set():
        try:
            item: Any = _make(plan, assemble)
        except BaseException as wrong:  # raised again where the batch is asked for
            item = wrong
        while not stopped.is_set():
            try:
                made.put(item, timeout=0.05)
                break
            except queue.Full:
                pass
        if isinstance(item, BaseException):
            return


class FixedBatches:
    """The same batches every time it is iterated. The last is filled up with rows whose labels are all ignored, so that every
    rank has as many batches as the others."""

    def __init__(self, rows: Callable[[], Iterator[list[Row]]], count: int, assemble: Assembler):
        self._rows, self._count, self.assemble = rows, count, assemble

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        for rows in self._rows():
            yield self.assemble(rows)


def fixed_rows(sources: Sequence[Stream | Packed], weights: Sequence[float], B: int, batches: int) -> list[list[Row]]:
    """At most `batches` batches of B rows, of each source by its weight."""
    wanted = B * batches
    rows: list[Row] = []
    for source, weight in zip(sources, weights):
        rows += source.fixed(max(1, round(wanted * weight)))
    rows = rows[:wanted]
    rows += [Row([])] * (-len(rows) % B)
    return [rows[i : i + B] for i in range(0, len(rows), B)]


def lane_rows(make: Callable[[], Lanes], batches: int) -> Iterator[list[Row]]:
    """Batches of lanes that are read once."""
    lanes = make()
    for _ in range(batches):
        rows = lanes.rows()
        if not any(row.spans for row in rows):
            return
        yield rows
