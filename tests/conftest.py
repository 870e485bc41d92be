"""Makes tests/helpers.py importable from every test folder, and fills memory nobody has written yet with NaN."""

from __future__ import annotations

import math

import pytest
import torch

from mnemos.memory.workspace import Workspace


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """New tensors, and buffers of the hot loop each time they are taken again, hold NaN until something is written there."""
    buffer = Workspace.buffer
    monkeypatch.setattr(Workspace, "buffer", lambda self, *shape: buffer(self, *shape).fill_(math.nan))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
