"""`AuditResult`: the outcomes of an audit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from .registry import FAIL, NOT_APPLICABLE, PASS

FORMAT = "mnemos.audit/1"


@dataclass(frozen=True)
class Row:
    """The outcome of one check. number: what was measured; limit: what it may be; command: repeats the check."""

    check: str
    about: str
    status: str
    text: str
    number: float | None
    limit: float | None
    command: str
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AuditResult:
    """The outcomes of an audit. about: the model, and how it was measured. unfinished: checks that an interrupted audit did not finish.

    >>> row = Row("causality", "…", "fail", "logits of token 3 change", 0.5, 0.0, "mnemos audit runs/x --checks causality", 1.0)
    >>> result = AuditResult({"model": "runs/x"}, [row])
    >>> result.ok, [row.check for row in result.failures], result["causality"].number
    (False, ['causality'], 0.5)
    """

    about: dict[str, Any]
    rows: list[Row]
    unfinished: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all checks were finished and none failed."""
        return not self.failures and not self.unfinished

    @property
    def failures(self) -> list[Row]:
        """The checks that failed."""
        return [row for row in self.rows if row.status == FAIL]

    @property
    def statuses(self) -> dict[str, str]:
        """The status of each check."""
        return {row.check: row.status for row in self.rows}

    @property
    def counts(self) -> dict[str, int]:
        """The number of checks with each status."""
        return {status: sum(row.status == status for row in self.rows) for status in (PASS, FAIL, NOT_APPLICABLE)}

    def __getitem__(self, check: str) -> Row:
        return next(row for row in self.rows if row.check == check)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON holds it."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"format": FORMAT, "ok": self.ok, "about": self.about, "checks": rows, "unfinished": self.unfinished}


def shown(number: float | None) -> str:
    """A number as tables show it.

    >>> shown(0.0), shown(1234.0), shown(0.25), shown(2.4e-16), shown(None)
    ('0.0', '1,234', '0.25', '2.4e-16', '–')
    """
    if number is None:
        return "–"
    if number == 0:
        return "0.0"
    if abs(number) >= 1000:
        return f"{number:,.0f}" if abs(number) < 1e12 else f"{number:.1e}"
    return f"{number:.3g}" if abs(number) >= 0.001 else f"{number:.1e}"
