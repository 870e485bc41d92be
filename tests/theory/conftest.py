"""Every test of a formula draws the same numbers each time it runs."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
