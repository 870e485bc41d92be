"""The state between two turns, and a turn that has begun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .record import Turn

Memory = Literal["write", "read", "off"]


@dataclass(frozen=True)
class Moment:
    """The state between two turns. A cache is never changed once it is here."""

    cache: Any
    pending: tuple[int, ...]
    tokens_read: int
    turns: tuple[Turn, ...]
    title: str
    updated: float


@dataclass(frozen=True, eq=False)
class OpenTurn:
    """A turn that has begun, see `Session.open_turn`: the model reads `ids` from `cache` on.

    cache: must not be changed; None: an empty state. read: tokens in it. said: role, text and number of tokens of each new message.
    answer: an answer follows.
    """

    memory: Memory
    cache: Any
    ids: list[int]
    read: int
    before: Moment
    said: list[tuple[str, str, int]]
    answer: bool
