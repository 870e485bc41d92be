"""What every fuzzed kind of file shares: a corpus of sound files, a mutation, a use, and the property that use must have."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import torch
from torch import Tensor

LARGE = 1e9  # float32 cannot hold the fourth powers of such numbers


class Mismatch(Exception):
    """Something was accepted that should have been refused, or gave a wrong result."""


class Overflow(Exception):
    """The file holds finite but huge numbers, and arithmetic left the range of its type: counted, no failure."""


class Target:
    """One kind of file. `mutate` writes a case into a folder, `use` opens it and works with it."""

    kind: str

    def __init__(self):
        self.stage = "start"
        self.build()

    def build(self) -> None:
        """Make the corpus."""
        raise NotImplementedError

    def mutate(self, rng: Random, folder: Path) -> None:
        raise NotImplementedError

    def use(self, rng: Random, folder: Path) -> None:
        raise NotImplementedError

    def step(self, stage: str) -> None:
        """How far the case came: "loaded", then "used"."""
        self.stage = stage

    def saved(self, save: Callable[[Path], None]) -> bytes:
        """What `save(path)` writes."""
        folder = Path(tempfile.mkdtemp())
        try:
            save(folder / "file")
            return (folder / "file").read_bytes()
        finally:
            shutil.rmtree(folder)


def check_numbers(tensors: Iterable[Tensor]) -> None:
    """Loading refuses NaN and infinity."""
    if not all(bool(torch.isfinite(x.double()).all()) for x in tensors):
        raise Mismatch("a state with NaN or infinite numbers was loaded")


def check_positions(tensors: dict[str, Tensor]) -> None:
    """Loading refuses positions that are no int64, negative, or so large that counting on overflows."""
    for name, x in tensors.items():
        if name.split(".")[-1] == "position":
            if x.dtype != torch.int64:
                raise Mismatch(f"{name} of type {x.dtype} was loaded")
            if int(x.min()) < 0 or int(x.max()) >= 2**62:
                raise Mismatch(f"{name}={x.tolist()[:4]} was loaded")


def check_finite(y: Tensor, in_float64: Callable[[], Iterable[Tensor]]) -> None:
    """Outputs are finite, unless the numbers themselves leave the range of float32: those of the same computation in float64 tell."""
    if bool(torch.isfinite(y).all()):
        return
    for x in in_float64():
        if x.is_floating_point() and x.numel() and not float(x.abs().max()) < LARGE:
            raise Overflow
    raise Mismatch("outputs are not finite, but float64 gives moderate numbers")
