"""Divides files into items (a file, or a part of one), and groups items into parts of about equal size, one per process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .reader import Item, reader_of_suffix
from .readers import READERS, Text

PART_BYTES = 2**27  # bytes of files per part


def kind_of(path: Path) -> str | None:
    """The name of the reader for a file, by its suffix; None for an unknown suffix.

    >>> kind_of(Path("a.jsonl.gz")), kind_of(Path("enwik8.gz")), kind_of(Path("a.png"))
    ('jsonl', 'text', None)
    """
    name = path.name.lower()
    zipped = name.endswith(".gz")
    suffix = os.path.splitext(name.removesuffix(".gz"))[1]
    reader = reader_of_suffix(suffix)
    if reader is None:
        return Text.name if zipped and not suffix else None
    return None if zipped and not reader.zipped else reader.name


def known_suffixes() -> list[str]:
    """Suffixes of the files that can be read.

    >>> known_suffixes()[:3]
    ['.txt', '.md', '.json']
    """
    return [suffix for reader in READERS.values() for suffix in reader.suffixes]


def files_under(folder: Path) -> list[Path]:
    """Files of a known kind below `folder`, sorted by name; hidden files are skipped.

    >>> files_under(Path("nowhere"))
    []
    """
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(where, name) for name in names if not name.startswith(".") and kind_of(Path(name))]
    return sorted(found)


def items_of(path: Path, kind: str, part_bytes: int | None = None) -> list[Item]:
    """A file as items of at most about `part_bytes`; text, JSON and compressed files are not divided."""
    part_bytes = part_bytes or PART_BYTES
    stat = path.stat()
    whole = Item(kind, str(path.resolve()), size=stat.st_size, changed=stat.st_mtime_ns)
    if stat.st_size <= part_bytes or path.name.lower().endswith(".gz"):
        return [whole]
    ends = READERS[kind].ends(path, stat.st_size, part_bytes)
    if not ends:
        return [whole]
    starts = [0, *ends[:-1]]
    size = stat.st_size // len(ends)
    return [Item(kind, whole.path, a, b, size, whole.changed) for a, b in zip(starts, ends)]


def parts_of(items: Iterable[Item], part_bytes: int | None = None) -> list[list[Item]]:
    """Group consecutive items into parts of about `part_bytes`, so that many small files do not become as many shards."""
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
