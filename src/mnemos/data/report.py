"""Counts of documents read, and of documents skipped by reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

REASONS = {
    "empty": "nothing but white space",
    "short": "fewer characters than min_chars",
    "long": "a JSON line or cell of more bytes than max_document_bytes",
    "binary": "not text",
    "bad_json": "a line that is not JSON",
    "no_text": "no string in the text column",
}


@dataclass
class ReadReport:
    """Counts of documents, tokens (end tokens included) and bytes of text; `skipped` by reason; `repaired`: documents with invalid UTF-8."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    repaired: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    sources: dict[str, ReadReport] = field(default_factory=dict)
    splits: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # sentences for the user

    def add(self, other: ReadReport) -> None:
        """Add the counts of another report to this one."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.repaired += other.repaired
        self.skipped.update(other.skipped)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token; end tokens count as tokens without bytes."""
        return self.bytes / self.tokens if self.tokens else float("nan")

    def counts(self) -> dict:
        """The counts as JSON-serialisable numbers; `from_counts` reads them.

        >>> ReadReport.from_counts(ReadReport(documents=2, skipped=Counter(empty=1)).counts()).skipped["empty"]
        1
        """
        names = ("documents", "tokens", "bytes", "repaired")
        return {name: getattr(self, name) for name in names} | {"skipped": dict(self.skipped)}

    @classmethod
    def from_counts(cls, counts: dict[str, Any]) -> ReadReport:
        report = cls()
        for name, value in counts.items():
            setattr(report, name, Counter(value) if name == "skipped" else value)
        return report

    def why_skipped(self) -> str:
        """The skipped documents in words: `3 empty (nothing but white space), ...`."""
        return ", ".join(f"{n} {name} ({REASONS[name]})" for name, n in sorted(self.skipped.items()) if n)
