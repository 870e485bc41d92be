"""Text that needs no download: Python's own documentation and standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator

MAX_CHARACTERS = 4 * 2**20  # characters


def documents(limit: int = MAX_CHARACTERS) -> Iterator[str]:
    """English help topics, then the modules of the standard library with their docstrings, sorted by name.

    The text comes from the running Python and differs between versions.

    >>> next(documents()).count("statement") > 0
    True
    """
    left = limit
    for text in _all():
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
    if left == limit:
        raise ValueError("this Python comes without its sources, so there is no embedded text: give files as sources")


def _all() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        topics = {}
    for name in sorted(topics):
        yield topics[name]
    folder = sysconfig.get_path("stdlib")
    names = sorted(name for name in os.listdir(folder) if name.endswith(".py")) if os.path.isdir(folder) else []
    for name in names:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            yield file.read()
