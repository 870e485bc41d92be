"""Random generators of Python, numpy and torch: seeding, and state as JSON for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seed all random generators."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """State of all random generators, as JSON."""
    version, numbers, gauss = random.getstate()
    state = numpy.random.get_state(legacy=False)
    found: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": _listed(state),
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }
    if torch.cuda.is_available():
        found["cuda"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return found


def set_random_state(saved: dict[str, Any]) -> None:
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy.random.set_state(saved["numpy"])
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(saved["torch"])), dtype=torch.uint8))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(saved["cuda"])), dtype=torch.uint8))


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(x) for key, x in value.items()}
    return value.tolist() if isinstance(value, numpy.ndarray) else value
