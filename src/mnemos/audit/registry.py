"""The registry of checks, and the outcome of one check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..choices import unknown

if TYPE_CHECKING:
    from .probe import Probe

PASS, FAIL, NOT_APPLICABLE = "pass", "fail", "not applicable"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check: its status, a sentence, the measured number and its limit (None: there is none), and further numbers.

    >>> passed("no logit changed", 0.0, 0.0).status
    'pass'
    """

    status: str
    text: str
    number: float | None = None
    limit: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


def passed(text: str, number: float | None = None, limit: float | None = None, **details: Any) -> Outcome:
    """An outcome without a fault."""
    return Outcome(PASS, text, number, limit, details)


def failed(text: str, number: float | None = None, limit: float | None = None, **details: Any) -> Outcome:
    """An outcome with a fault."""
    return Outcome(FAIL, text, number, limit, details)


def not_applicable(text: str, number: float | None = None, limit: float | None = None, **details: Any) -> Outcome:
    """The model has nothing that the check could test, or another fault comes first."""
    return Outcome(NOT_APPLICABLE, text, number, limit, details)


@dataclass(frozen=True)
class Check:
    """One check. about: one line of help. run: tests a model. needs: checks that must not fail, because their faults would show here too."""

    name: str
    about: str
    run: Callable[[Probe], Outcome]
    needs: tuple[str, ...] = ()


CHECKS: dict[str, Check] = {}
Run = Callable[["Probe"], Outcome]


def register_check(name: str, about: str, needs: Sequence[str] = ()) -> Callable[[Run], Run]:
    """Decorator: registers a function (probe) -> Outcome as the check NAME. It runs behind those that it needs and those of the package.

    >>> from mnemos.audit import passed
    >>> @register_check("vocabulary", "the model has more than one token")
    ... def vocabulary(probe):
    ...     return passed(f"{probe.own.vocab_size} tokens", probe.own.vocab_size)
    >>> CHECKS.pop("vocabulary").about
    'the model has more than one token'
    """
    if name in CHECKS:
        raise ValueError(f"check {name!r} is registered already: choose another name")

    def register(run: Run) -> Run:
        CHECKS[name] = Check(name, about, run, tuple(needs))
        return run

    return register


def choose(names: Sequence[str] | None) -> list[Check]:
    """The checks with these names, in the order in which they run; None: all."""
    if names is None:
        return list(CHECKS.values())
    wrong = [name for name in names if name not in CHECKS]
    if wrong:
        raise unknown("check", wrong[0], CHECKS)
    if not names:
        raise ValueError(f"name at least one check: {', '.join(CHECKS)}")
    return [check for name, check in CHECKS.items() if name in names]


def with_needs(checks: Sequence[Check]) -> list[Check]:
    """The checks and those that they need, in the order in which they run."""
    names = {check.name for check in checks}
    while more := {need for name in names for need in CHECKS[name].needs} - names:
        missing = sorted(more - CHECKS.keys())
        if missing:
            raise unknown("check", missing[0], CHECKS)
        names |= more
    return [check for name, check in CHECKS.items() if name in names]
