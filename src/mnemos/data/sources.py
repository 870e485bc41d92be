"""Resolves the names of sources to items to read: files, folders, named sources, hub datasets."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .readers import READERS, Hub, ReadRules, Text
from .sharding import Item, files_under, items_of, kind_of, known_suffixes

SMOLLM = "HuggingFaceTB/smollm-corpus"
MIXTURES: dict[str, tuple[tuple[str, float], ...]] = {
    "smollm-corpus": (("cosmopedia-v2", 0.4), ("fineweb-edu-dedup", 0.5), ("python-edu", 0.1)),
}
HUB = {
    "cosmopedia-v2": (SMOLLM, "cosmopedia-v2"),
    "fineweb-edu-dedup": (SMOLLM, "fineweb-edu-dedup"),
    "python-edu": ("Avelina/python-edu-cleaned", None),  # smollm-corpus itself holds only references to its files
    "python-edu-cleaned": ("Avelina/python-edu-cleaned", None),
}


@dataclass(frozen=True)
class Source:
    """A source: its name, its weight (None: proportional to its size), and its items."""

    name: str
    weight: float | None
    items: tuple[Item, ...]

    def fingerprint(self, rules: ReadRules) -> str:
        """A hash of the name, size and modification time of every file, and of the reading rules."""
        content = {"items": [item.as_json() for item in self.items], "rules": vars(rules)}
        versions = {item.kind: READERS[item.kind].version for item in self.items if READERS[item.kind].version}
        content |= {"versions": versions} if versions else {}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def known_sources() -> list[str]:
    """Names of sources that are not files.

    >>> "embedded" in known_sources()
    True
    """
    return [*(reader.source for reader in READERS.values() if reader.source is not None), *MIXTURES, *HUB]


def parse(specs: Sequence[str]) -> list[tuple[str, float | None]]:
    """Names and weights; mixtures are replaced by their parts.

    >>> parse(["books:2", "a.txt:1"])
    [('books', 2.0), ('a.txt', 1.0)]
    >>> parse(["smollm-corpus"])
    [('cosmopedia-v2', 0.4), ('fineweb-edu-dedup', 0.5), ('python-edu', 0.1)]
    """
    pairs: list[tuple[str, float | None]] = []
    for spec in specs:
        name, weight = _weighted(spec)
        if name in MIXTURES:
            pairs += [(part, share * (1.0 if weight is None else weight)) for part, share in MIXTURES[name]]
        else:
            pairs.append((name, weight))
    given = [weight is not None for _, weight in pairs]
    if any(given) and not all(given):
        missing = next(name for name, weight in pairs if weight is None)
        raise ValueError(f"source {missing!r} has no weight, but others have: give one (name:0.5) to all or to none")
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"source {twice!r} is given twice: give it once, with a weight")
    return pairs


def _weighted(spec: str) -> tuple[str, float | None]:
    name, colon, tail = spec.rpartition(":")
    if not colon or os.path.exists(spec):
        return spec, None
    try:
        weight = float(tail)
    except ValueError:
        return spec, None
    if not 0 < weight < math.inf or not name:
        raise ValueError(f"source {spec!r} must be a name and a weight above 0, as in name:0.5")
    return name, weight


def resolve(specs: Sequence[str], rules: ReadRules) -> list[Source]:
    """The sources of a config. Finds every file, and checks the first of each kind, before any text is read."""
    return [Source(name, weight, tuple(_items(name, rules))) for name, weight in parse(specs)]


def _items(name: str, rules: ReadRules) -> list[Item]:
    for reader in READERS.values():
        if name == reader.source:
            return [reader.source_item(rules)]
    if name in HUB:
        path, subset = HUB[name]
        return [Item(Hub.name, path, subset=subset, size=rules.hub_bytes)]
    path = Path(name).expanduser()
    if os.path.isdir(path) and name.strip():  # unlike Path.is_dir, no error for a name that is too long
        files = files_under(path)
        if not files:
            *first, last = known_suffixes()
            raise ValueError(f"folder {name} holds no {', '.join(first)} or {last} file (nor .gz of them)")
    elif os.path.isfile(path):
        files = [path]
    elif _looks_like_a_path(name):
        raise ValueError(f"source {name!r:.200} does not exist; named sources are {', '.join(known_sources())}")
    else:
        owner, _, subset = name.partition("@")
        return [Item(Hub.name, owner, subset=subset or None, size=rules.hub_bytes)]
    kinds = [kind_of(file) or Text.name for file in files]
    for kind in sorted(set(kinds)):
        READERS[kind].check(files[kinds.index(kind)], rules)
    return [item for file, kind in zip(files, kinds) for item in items_of(file, kind)]


def _looks_like_a_path(name: str) -> bool:
    slashes = name.startswith((".", "/", "~", "\\")) or name.endswith("/") or name.count("/") > 1 or "\\" in name
    return slashes or kind_of(Path(name)) is not None or not name.strip() or len(name) > 255
