"""`Watch`: follows an audit while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .result import Row


class Watch:
    """Follows an audit. Every method does nothing; a subclass overrides those that it needs.

    >>> class Printed(Watch):
    ...     def finished(self, row):
    ...         print(row.check, row.status)
    >>> from mnemos.audit import run
    >>> import torch
    >>> result = run(lambda ids: torch.eye(9)[ids], length=16, checks=["causality"], watch=Printed())
    calls pass
    causality pass
    """

    def started(self, about: dict[str, Any], checks: Sequence[str]) -> None:
        """The model is ready. about: as in `AuditResult`; checks: names, in the order in which they run."""

    def running(self, check: str) -> None:
        """A check begins."""

    def expect(self, parts: int) -> None:
        """The check has at most this many parts."""

    def part(self) -> None:
        """A part of the check is done."""

    def finished(self, row: Row) -> None:
        """A check is done, with this row of the result."""
