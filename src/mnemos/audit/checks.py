"""Imports every check of the package, in the order in which they run."""

from . import calls, causality, loss, caching, batch, swap, state_size, gradients, memory, prompts, needle  # noqa: F401, I001
