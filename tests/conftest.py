"""Makes tests/helpers.py importable from every test folder, and fills uninitialised memory with NaN."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = "ONEDNN_MAX_CPU_ISA"  # oneDNN reads it when torch is imported, here and in processes that tests start
BFLOAT16_PRODUCT = "import torch; x = torch.ones(96, 96, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"


def lacks_reported_matrix_units() -> bool:
    """Whether the processor reports AMX, but a product in bfloat16 is an illegal instruction, as on some virtual machines."""
    info = Path("/proc/cpuinfo")
    if LIMIT in os.environ or not info.exists() or "amx_tile" not in info.read_text():
        return False
    return subprocess.run([sys.executable, "-c", BFLOAT16_PRODUCT], capture_output=True).returncode < 0


if lacks_reported_matrix_units():
    os.environ[LIMIT] = "AVX512_CORE_BF16"

import torch  # noqa: E402


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """New tensors, and buffers of the kernels each time they are taken again, hold NaN until something is written there."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
