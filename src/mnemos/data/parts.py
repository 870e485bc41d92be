"""What a process is given to read: items (a file, a piece of one, a hub dataset), in groups of about the same size."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .files import require

PART_BYTES = 2**27  # of files, for one process to read
SUFFIXES = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class Item:
    """kind: text, json, jsonl, parquet, hub or embedded. start, stop: bytes of a jsonl file, row groups of a parquet file."""

    kind: str
    path: str = ""
    start: int = 0
    stop: int = -1
    size: int = 0
    changed: int = 0
    subset: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def kind_of(path: Path) -> str | None:
    """What a file name says about the file; None where it says nothing.

    >>> kind_of(Path("a.jsonl.gz")), kind_of(Path("enwik8.gz")), kind_of(Path("a.png"))
    ('jsonl', 'text', None)
    """
    name = path.name.lower()
    zipped = name.endswith(".gz")
    suffix = os.path.splitext(name.removesuffix(".gz"))[1]
    if suffix == ".parquet" and zipped:
        return None
    return SUFFIXES.get(suffix, "text" if zipped and not suffix else None)


def files_under(folder: Path) -> list[Path]:
    """Files of a known kind, below `folder`, in the order of their names; hidden ones are left out.

    >>> files_under(Path("nowhere"))
    []
    """
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(where, name) for name in names if not name.startswith(".") and kind_of(Path(name))]
    return sorted(found)


def items_of(path: Path, kind: str, part_bytes: int | None = None) -> list[Item]:
    """A file as items of at most about `part_bytes`; text, JSON and compressed files cannot be divided."""
    part_bytes = part_bytes or PART_BYTES
    stat = path.stat()
    whole = Item(kind, str(path.resolve()), size=stat.st_size, changed=stat.st_mtime_ns)
    if stat.st_size <= part_bytes or kind not in ("jsonl", "parquet") or path.name.lower().endswith(".gz"):
        return [whole]
    if kind == "jsonl":
        ends = [*range(part_bytes, stat.st_size, part_bytes), stat.st_size]
    else:
        groups = open_parquet(path).metadata.num_row_groups
        pieces = min(groups, -(-stat.st_size // part_bytes))
        ends = [groups * (i + 1) // pieces for i in range(pieces)]
    starts = [0, *ends[:-1]]
    size = stat.st_size // len(ends)
    return [Item(kind, whole.path, a, b, size, whole.changed) for a, b in zip(starts, ends)]


def parts_of(items: Iterable[Item], part_bytes: int | None = None) -> list[list[Item]]:
    """Neighbours together until they make a part: a hundred thousand small files are not as many shards."""
    part_bytes = part_bytes or PART_BYTES
    parts: list[list[Item]] = []
    room = 0
    for item in items:
        if item.size > room or not parts:
            parts.append([])
            room = part_bytes
        parts[-1].append(item)
        room -= item.size
    return parts


def open_parquet(path: str | Path):
    """A parquet file, or a sentence that it is none."""
    pyarrow = require("pyarrow", "data")
    require("pyarrow.parquet", "data")
    try:
        return pyarrow.parquet.ParquetFile(str(path))
    except (pyarrow.ArrowInvalid, OSError) as broken:
        raise ValueError(f"{path} is not a readable parquet file: {str(broken).splitlines()[0]}") from None
