"""Registers every check of the package, in the order in which they run, whichever of their modules was imported first."""

from . import batch, caching, calls, causality, gradients, loss, memory, needle, prompts, state_size, swap
from .registry import CHECKS

MODULES = (calls, causality, loss, caching, batch, swap, state_size, gradients, memory, needle, prompts)


def _sort() -> None:
    places = {module.__name__: i for i, module in enumerate(MODULES)}
    last = len(places)
    ordered = sorted(CHECKS.items(), key=lambda item: places.get(item[1].run.__module__, last))
    CHECKS.clear()
    CHECKS.update(ordered)


_sort()
