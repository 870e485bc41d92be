"""Train, validation and test: who reads what, decided by the text itself.

A source of many documents is divided by documents: the hash of a document's text puts it on one side of an edge that all sources
share, so a copy of it, in this source or another, is on the same side. A source of few documents (one book, enwik8), or with one that
is most of it, is divided inside each: the beginning trains, then come validation and test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .shards import Store

FEW = 2.0  # documents that a held-out share should have at least, on average
LARGE = 0.1  # share of a source above which a document is divided, not given to one side
SPLITS = ("train", "validation", "test")


@dataclass
class Documents:
    """Stretches of a store's tokens. starts, lengths: (n,)."""

    starts: np.ndarray
    lengths: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.starts)


def split(stores: Sequence[Store], validation: float, test: float) -> list[dict[str, Documents]]:
    """For each store, the documents of each of `SPLITS`."""
    shares = [share for share in (validation, test) if share]
    few = [bool(shares) and _is_coarse(store, min(shares)) for store in stores]
    divided = [store.hashes for store, is_few in zip(stores, few) if is_few]
    seen = np.concatenate(divided) if divided else np.zeros(0, np.uint64)
    fine = [store for store, is_few in zip(stores, few) if not is_few]
    first = max([0.0, *(_edge(store, validation) for store in fine)])
    second = max([first, *(_edge(store, validation + test) for store in fine)]) if test else first
    return [
        _inside(store, validation, test) if is_few else _between(store, first, second, seen)
        for store, is_few in zip(stores, few)
    ]


def _is_coarse(store: Store, share: float) -> bool:
    return len(store.starts) < FEW / share or float(store.sizes.max()) > LARGE * float(store.sizes.sum())


def _share(hashes: np.ndarray) -> np.ndarray:
    return hashes.astype(np.float64) / 2.0**64


def _edge(store: Store, share: float) -> float:
    """Documents whose hash is below it have, together, at least `share` of the source's bytes."""
    if not share:
        return 0.0
    order = np.argsort(store.hashes)
    bytes_below = store.sizes[order].astype(np.float64).cumsum()
    last = int(bytes_below.searchsorted(share * bytes_below[-1]))
    return float(np.nextafter(_share(store.hashes[order[last]]), 2.0))


def _between(store: Store, first: float, second: float, seen: np.ndarray) -> dict[str, Documents]:
    """Whole documents; those that a source of few documents divides are left to it."""
    share = _share(store.hashes)
    left = ~np.isin(store.hashes, seen) if len(seen) else np.ones(len(share), bool)
    sides = (share >= second, share < first, (share >= first) & (share < second))
    return {name: Documents(store.starts[side & left], store.lengths[side & left]) for name, side in zip(SPLITS, sides)}


def _inside(store: Store, validation: float, test: float) -> dict[str, Documents]:
    """The beginning, middle and end of every document."""
    L = store.lengths
    first = np.rint(L * (1 - validation - test)).astype(np.int64)
    second = np.rint(L * (1 - test)).astype(np.int64)
    edges = (np.zeros_like(L), first, second, L)
    result = {}
    for name, begin, end in zip(SPLITS, edges, edges[1:]):
        some = end > begin
        result[name] = Documents((store.starts + begin)[some], (end - begin)[some])
    return result
