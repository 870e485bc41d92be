"""Makes tests/helpers.py importable from every test folder, and fills uninitialised memory with NaN."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """New tensors, and buffers of the kernels each time they are taken again, hold NaN until something is written there."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
