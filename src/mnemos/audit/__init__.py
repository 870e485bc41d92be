"""Audit: tests of any causal language model for what papers only claim: causality, exact caches, independent batch rows, a memory that works.

`run` returns an `AuditResult`; `assert_passes` is for the tests of other projects; a check is a function under `register_check`.
Names are imported lazily, because `mnemos audit --help` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .memory import knock_outs
    from .probe import Probe, changes, difference
    from .prompts import read_prompts
    from .registry import Check, Outcome, failed, not_applicable, passed, register_check
    from .result import AuditResult, Row
    from .runner import CHECKS, assert_passes, run
    from .settings import AuditSettings
    from .subject import Subject
    from .watch import Watch

_HOME = {
    "CHECKS": "runner",
    "AuditResult": "result",
    "AuditSettings": "settings",
    "Check": "registry",
    "Outcome": "registry",
    "Probe": "probe",
    "Row": "result",
    "Subject": "subject",
    "Watch": "watch",
    "assert_passes": "runner",
    "changes": "probe",
    "difference": "probe",
    "failed": "registry",
    "knock_outs": "memory",
    "not_applicable": "registry",
    "passed": "registry",
    "read_prompts": "prompts",
    "register_check": "registry",
    "run": "runner",
}

__all__ = [
    "CHECKS",
    "AuditResult",
    "AuditSettings",
    "Check",
    "Outcome",
    "Probe",
    "Row",
    "Subject",
    "Watch",
    "assert_passes",
    "changes",
    "difference",
    "failed",
    "knock_outs",
    "not_applicable",
    "passed",
    "read_prompts",
    "register_check",
    "run",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return value
