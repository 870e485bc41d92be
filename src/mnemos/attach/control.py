"""`MemoryControl`: the memories of an attached model at inference: their strength, their writes, and knock-outs."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..choices import unknown
from ..memory.config import is_number

if TYPE_CHECKING:
    from .cache import AttachedCache

KNOCK_OUTS = {
    "writes": "nothing is written: memories keep the state that they have",
    "reads": "nothing is read: the output of memories is 0",
    "swap": "every row of a batch reads the memory of the next row",
}


@dataclass(frozen=True)
class Switches:
    """What memories do in one call. scale: factor of their output. swaps: every row reads the memory of the next row."""

    scale: float = 1.0
    writes: bool = True
    swaps: bool = False


class MemoryControl:
    """The switches of an attached model, `model.memory`. They hold for every call until they are changed.

    >>> control = MemoryControl()
    >>> control.scale = 0.5
    >>> with control.knock_out("reads"):
    ...     control.scale
    0.0
    >>> control.scale
    0.5
    """

    def __init__(self):
        self.switches = Switches()
        self.epoch = 0

    @property
    def scale(self) -> float:
        """Factor of the output of every memory, 0 to 1. At 0 the model is the base model, with the window of its attention."""
        return self.switches.scale

    @scale.setter
    def scale(self, value: float) -> None:
        if not is_number(value) or not 0 <= value <= 1:
            raise ValueError(f"scale={value!r:.60} must be a number in 0..1")
        self.switches = replace(self.switches, scale=float(value))

    @property
    def writes(self) -> bool:
        """Whether tokens are written."""
        return self.switches.writes

    def freeze_writes(self, frozen: bool = True) -> None:
        """Stop writing: memories are read as they are. False: write again."""
        if type(frozen) is not bool:
            raise ValueError(f"frozen={frozen!r:.60} must be True or False")
        self.switches = replace(self.switches, writes=not frozen)

    def reset(self, cache: AttachedCache | None = None) -> None:
        """Let the memories of a cache begin again, or, without a cache, those of every cache of the model. Attention keeps its tokens.

        States live in `past_key_values`, not in the model: caches begin again when they are used next.
        """
        if cache is not None:
            cache.reset_memory()
        else:
            self.epoch += 1

    @contextlib.contextmanager
    def knock_out(self, what: str) -> Generator[None]:
        """Inside the block, memories do not work: "writes", "reads" or "swap" (every row reads the memory of the next row).

        A number that a memory is said to cause must fall to that of the model without it under each of the three. "swap" needs two
        rows or more, of equal lengths.
        """
        changed = {"writes": {"writes": False}, "reads": {"scale": 0.0}, "swap": {"swaps": True}}
        if what not in changed:
            raise unknown("knock_out", what, KNOCK_OUTS)
        before = self.switches
        self.switches = replace(before, **changed[what])
        try:
            yield
        finally:
            self.switches = before

    def __repr__(self) -> str:
        return f"MemoryControl(scale={self.scale}, writes={self.writes}, swaps={self.switches.swaps})"
