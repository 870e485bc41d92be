"""Tokenised text on disk: `<n>.bin` holds tokens, with the end token after each document; `<n>.npy` holds one row per document.

Columns of the .npy: end of the document (in tokens), its bytes of text, a hash of its text. `<n>.json` is written after both and
holds their sizes, so a shard without it, or with other sizes, is incomplete. `index.json` is written last and marks a complete folder.
"""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic_io import whole_file
from .files import read_json, write_json
from .report import ReadReport

SHARD_FORMAT = 1
HASH_BYTES = 8


def dtype_of(vocab_size: int) -> np.dtype:
    """The smallest integer type that holds every token id.

    >>> dtype_of(256), dtype_of(32000), dtype_of(100_000)
    (dtype('uint8'), dtype('uint16'), dtype('uint32'))
    """
    return np.dtype(np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.uint32)


class ShardWriter:
    """Writes one shard; its files appear when the `with` block ends without an error."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype):
        self.stem = folder / f"{number:05d}"
        self.dtype = dtype
        self.table = array("Q")
        self.tokens = 0
        self.bytes = 0
        self._file = whole_file(self.stem.with_suffix(".bin"))
        self._new_document()

    def _new_document(self) -> None:
        self._hash, self._size = hashlib.blake2b(digest_size=HASH_BYTES), 0

    def write(self, ids: np.ndarray) -> None:
        self._out.write(ids.astype(self.dtype, copy=False).tobytes())
        self.tokens += len(ids)

    def add_text(self, text: str) -> None:
        raw = text.encode(errors="replace")
        self._hash.update(raw)
        self._size += len(raw)

    def end_document(self) -> None:
        self.table.extend((self.tokens, self._size, int.from_bytes(self._hash.digest(), "little")))
        self.bytes += self._size
        self._new_document()

    def __enter__(self) -> ShardWriter:
        self._out = self._file.__enter__()
        return self

    def __exit__(self, *wrong) -> bool | None:
        return self._file.__exit__(*wrong)

    def finish(self, report: ReadReport) -> dict[str, Any]:
        """Write the table and, last, the sizes. Call it after the `with` block."""
        documents = len(self.table) // 3
        report.documents, report.tokens, report.bytes = documents, self.tokens, self.bytes
        with whole_file(self.stem.with_suffix(".npy")) as file:
            np.save(file, np.frombuffer(self.table, np.uint64).reshape(documents, 3), allow_pickle=False)
        about = {"format": SHARD_FORMAT, "dtype": self.dtype.name, "report": report.counts()}
        about |= {suffix: self.stem.with_suffix(suffix).stat().st_size for suffix in (".bin", ".npy")}
        write_json(self.stem.with_suffix(".json"), about)
        return about


def whole_shard(folder: Path, number: int) -> dict[str, Any] | None:
    """The content of a shard's .json file if the shard is complete, else None."""
    stem = folder / f"{number:05d}"
    about = read_json(stem.with_suffix(".json"))
    if not isinstance(about, dict) or about.get("format") != SHARD_FORMAT:
        return None
    try:
        sizes = {suffix: stem.with_suffix(suffix).stat().st_size for suffix in (".bin", ".npy")}
    except OSError:
        return None
    return about if all(about.get(suffix) == size for suffix, size in sizes.items()) else None


class Store:
    """The shards of a source as one memory-mapped sequence of tokens.

    starts, lengths: (documents,), in tokens. sizes: bytes of text per document. hashes: of the text of each document.
    """

    def __init__(self, folder: Path):
        index = read_json(folder / "index.json")
        self.folder, self.index = folder, index
        self.report = ReadReport.from_counts(index["report"])
        dtype = np.dtype(index["dtype"])
        self.arrays: list[np.ndarray] = []
        bounds, starts, lengths, sizes, hashes = [0], [], [], [], []
        for number in range(index["shards"]):
            stem = folder / f"{number:05d}"
            table = np.load(stem.with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
            if not len(table):
                continue
            self.arrays.append(np.memmap(stem.with_suffix(".bin"), dtype, mode="r"))
            ends = np.asarray(table[:, 0]).astype(np.int64)
            begins = np.concatenate([[0], ends[:-1]])
            starts.append(begins + bounds[-1])
            lengths.append(ends - begins)
            sizes.append(table[:, 1])
            hashes.append(table[:, 2])
            bounds.append(bounds[-1] + len(self.arrays[-1]))
        self.bounds = np.array(bounds)  # end of each shard, in tokens
        self.starts, self.lengths, self.sizes, self.hashes = (
            np.concatenate(column) for column in (starts, lengths, sizes, hashes)
        )

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens from `start` on; they must lie in one shard."""
        shard = int(self.bounds.searchsorted(start, side="right")) - 1
        first = start - int(self.bounds[shard])
        out[:] = self.arrays[shard][first : first + len(out)]
