"""Splits documents into train, validation and test by their content.

A source of many documents is split by document: the hash of its text decides, with thresholds common to all sources, so every copy
of a document is in the same split. A source of few documents (one book, enwik8), of copies of a few documents, or with one dominant
document is split inside each document: the beginning is for training, then come validation and test. If its documents are too short
for that, whole documents are held out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .shards import Store

FEW = 2.0  # smallest expected number of documents in a held-out share
LARGE = 0.1  # a document with a larger share of its source is divided, not assigned as a whole
SPLITS = ("train", "validation", "test")


@dataclass
class Documents:
    """Ranges of a store's tokens. starts, lengths: (n,)."""

    starts: np.ndarray
    lengths: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.starts)


def split(
    stores: Sequence[Store], validation: float, test: float, say: Callable[[int, str], None] = lambda i, why: None
) -> list[dict[str, Documents]]:
    """The documents of each of `SPLITS`, for each store. say: called with a store's index and a sentence about its split."""
    shares = [share for share in (validation, test) if share]
    copies = [bool(shares) and _is_copies(store, sum(shares)) for store in stores]
    few = [bool(shares) and (same or _is_coarse(store, min(shares))) for store, same in zip(stores, copies)]
    for i, same in enumerate(copies):
        if same:
            say(
                i,
                "many of its documents are identical, so each is divided: the beginning is for training, the end is held out",
            )
    divided = [store.hashes for store, is_few in zip(stores, few) if is_few]
    seen = np.concatenate(divided) if divided else np.zeros(0, np.uint64)
    fine = [store for store, is_few in zip(stores, few) if not is_few]
    first = max([0.0, *(_edge(store, validation) for store in fine)])
    second = max([first, *(_edge(store, validation + test) for store in fine)]) if test else first
    parts = []
    for i, (store, is_few) in enumerate(zip(stores, few)):
        part = _inside(store, validation, test) if is_few else _between(store, first, second, seen)
        if is_few and len(store.starts) > 1 and _is_short(store, part, validation, test):
            say(
                i,
                "its documents are too short to be divided, so some are held out whole; copies of them may be in training",
            )
            part = _whole(store, validation, test)
        parts.append(part)
    return parts


def _is_coarse(store: Store, share: float) -> bool:
    return len(store.starts) < FEW / share or float(store.sizes.max()) > LARGE * float(store.sizes.sum())


def _is_copies(store: Store, share: float) -> bool:
    """Whether copies share so few hashes that a threshold between them holds out far more than `share`."""
    if _is_coarse(store, share):
        return False
    held_out = store.sizes[_share(store.hashes) < _edge(store, share)].sum()
    return float(held_out) > (share + LARGE) * float(store.sizes.sum())


def _is_short(store: Store, part: dict[str, Documents], validation: float, test: float) -> bool:
    """Whether `_inside` held out no token although the share is at least one token."""
    tokens = store.lengths.sum()
    asked = {"validation": validation, "test": test}
    return any(share * tokens >= 1 and not part[name].tokens for name, share in asked.items())


def _share(hashes: np.ndarray) -> np.ndarray:
    return hashes.astype(np.float64) / 2.0**64


def _edge(store: Store, share: float) -> float:
    """The smallest threshold below which the documents, by hash, have at least `share` of the source's bytes."""
    if not share:
        return 0.0
    order = np.argsort(store.hashes)
    bytes_below = store.sizes[order].astype(np.float64).cumsum()
    last = int(bytes_below.searchsorted(share * bytes_below[-1]))
    return float(np.nextafter(_share(store.hashes[order[last]]), 2.0))


def _between(store: Store, first: float, second: float, seen: np.ndarray) -> dict[str, Documents]:
    """Assign whole documents by hash; documents that another source divides are left to that source."""
    share = _share(store.hashes)
    left = ~np.isin(store.hashes, seen) if len(seen) else np.ones(len(share), bool)
    sides = (share >= second, share < first, (share >= first) & (share < second))
    return {name: Documents(store.starts[side & left], store.lengths[side & left]) for name, side in zip(SPLITS, sides)}


def _inside(store: Store, validation: float, test: float) -> dict[str, Documents]:
    """Split every document into its beginning, middle and end."""
    L = store.lengths
    first = np.rint(L * (1 - validation - test)).astype(np.int64)
    second = np.rint(L * (1 - test)).astype(np.int64)
    edges = (np.zeros_like(L), first, second, L)
    result = {}
    for name, begin, end in zip(SPLITS, edges, edges[1:]):
        some = end > begin
        result[name] = Documents((store.starts + begin)[some], (end - begin)[some])
    return result


def _whole(store: Store, validation: float, test: float) -> dict[str, Documents]:
    """Split whole documents in order of their hashes: at least one for each requested share, and one for training."""
    order, n = np.argsort(store.hashes, kind="stable"), len(store.hashes)
    first = min(max(1, round(n * validation)), n - 1) if validation else 0
    second = first + (min(max(1, round(n * test)), n - 1 - first) if test else 0)
    sides = (order[second:], order[:first], order[first:second])
    return {name: Documents(store.starts[side], store.lengths[side]) for name, side in zip(SPLITS, map(np.sort, sides))}
