"""The earlier place of `mnemos.memory.freeze`."""

from ..memory.freeze import frozen_memory, has_memory

__all__ = ["frozen_memory", "has_memory"]
