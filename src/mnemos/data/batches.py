"""Batches: rows read into tensors, prefetched in a thread, in an order that can be resumed at any batch.

Shapes: B rows of the global batch, b = B / world_size of them in this process, T tokens.
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
    """Selects the rows of the next global batch. Its state is a few numbers."""

    def rows(self) -> list[Row]: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


class Mixture:
    """Draws the source of each row by weight, from the seed and the index of the row."""

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
    """Turns rows into tensors: the rows rank::world_size of a global batch. extra: "position_ids", "continues" or None."""

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
                if positions is not None:  # also for the padding, which continues the last document
                    positions[i, column:] = self.count_up[: self.T - column]
                column = end
        batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if positions is not None:
            batch["position_ids"] = torch.from_numpy(positions)
        if self.extra == "continues":
            batch["continues"] = torch.tensor([row.continues for row in mine])
        return batch


class Batches:
    """An endless iterator of batches. `state_dict` is the position after the last batch that was returned.

    Prefetched batches do not count: a resumed iterator returns them again.
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
        """The position: numbers and strings, equal on every rank and for any world_size."""
        return {"position": self._state, "identity": self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict` of the same data, seed and row shape; raises a ValueError for any other.

        state: returned by `state_dict`.
        """
        theirs = state.get("identity", {})
        other = [name for name, value in self.identity.items() if theirs.get(name) != value]
        if other:
            differing = ", ".join(f"{name} ({theirs.get(name)}, now {self.identity[name]})" for name in other)
            raise ValueError(f"the data cannot be resumed from this state, which was saved with another {differing}")
        self.close()
        self.plan.load(state["position"])
        self._state = self.plan.state()

    def close(self) -> None:
        """Stop the prefetching thread. The next batch is the one after the last that was returned."""
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
        weakref.finalize(self, stopped.set)  # the thread holds no reference to this object, so it can be collected

        def stop() -> None:
            stopped.set()
            thread.join()

        self._stop = stop


_at_work: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


@atexit.register
def _let_them_end() -> None:
    """Stop the threads first: one inside torch while the interpreter shuts down aborts the process (SIGABRT)."""
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
        except BaseException as wrong:  # raised again in the thread that asks for the batch
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
    """The same batches in every iteration. Rows with all labels ignored complete the last batch, so that every rank has equally many."""

    def __init__(self, rows: Callable[[], Iterator[list[Row]]], count: int, assemble: Assembler):
        self._rows, self._count, self.assemble = rows, count, assemble

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        for rows in self._rows():
            yield self.assemble(rows)


def fixed_rows(sources: Sequence[Stream | Packed], weights: Sequence[float], B: int, batches: int) -> list[list[Row]]:
    """At most `batches` batches of B rows; each source gets a share of the rows by its weight."""
    wanted = B * batches
    rows: list[Row] = []
    for source, weight in zip(sources, weights):
        rows += source.fixed(max(1, round(wanted * weight)))
    rows = rows[:wanted]
    rows += [Row([])] * (-len(rows) % B)
    return [rows[i : i + B] for i in range(0, len(rows), B)]


def lane_rows(make: Callable[[], Lanes], batches: int) -> Iterator[list[Row]]:
    """Batches of lanes, each read once."""
    lanes = make()
    for _ in range(batches):
        rows = lanes.rows()
        if not any(row.spans for row in rows):
            return
        yield rows
