"""States, caches and model folders in one process, in random order: what one file leaves behind in memory, the next one meets."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz_caches import Caches
from fuzz_models import Models
from fuzz_states import States
from fuzz_target import Target

SHARES = (60, 30, 10)  # of states, caches and model folders, in hundredths


class Mixed(Target):
    """One case in ten is a model folder, which takes longest."""

    kind = "mixed"

    def build(self) -> None:
        self.targets = (States(), Caches(), Models())

    def mutate(self, rng: Random, folder: Path) -> None:
        for old in folder.iterdir():
            old.unlink()
        (self.chosen,) = rng.choices(self.targets, SHARES)
        self.chosen.step = self.step  # ty: ignore[invalid-assignment]
        self.chosen.mutate(rng, folder)

    def use(self, rng: Random, folder: Path) -> None:
        self.chosen.use(rng, folder)
