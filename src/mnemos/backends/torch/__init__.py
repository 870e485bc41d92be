"""The torch backend: every memory, device and type, in ordinary operations."""

from __future__ import annotations

import torch

from ...dispatch import kernel
from .engine import Engine
from .scan import scan as _scan
from .step import step
from .trace import traced_scan


def unavailable_reason() -> None:
    """Always available."""


def _supports(*arguments) -> None:
    """Every call."""


@kernel("scan", "torch", _supports, compiles=True)
def scan(q, k, *arguments):
    low = None
    if k.dtype != torch.float64 and torch.is_autocast_enabled(k.device.type):
        low = torch.get_autocast_dtype(k.device.type)
    return _scan(q, k, *arguments, Engine(low))


kernel("step", "torch", _supports, compiles=True)(step)
kernel("traced_scan", "torch", _supports, compiles=True)(traced_scan)
