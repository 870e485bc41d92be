"""The result of `mnemos audit` as a page: verdicts, numbers, limits, findings, and the command that repeats each check."""

from __future__ import annotations

import html
from typing import Any

from ..audit.registry import FAIL, NOT_APPLICABLE, PASS
from ..audit.result import shown
from .page import head

CLASSES = {PASS: "good", FAIL: "bad", NOT_APPLICABLE: "none"}
LABELS = {"sizes": "windows and chunks", "rounding": "rounding measured in", "tokens": "tokens per text"}
AUDIT_CSS = """
.audit td, .audit th { text-align: left; padding: 8px 10px; } .audit td { overflow-wrap: anywhere; }
.audit .figure { text-align: right; white-space: nowrap; } .audit .name { white-space: nowrap; font-weight: 600; }
.verdict { display: inline-block; white-space: nowrap; border: 1px solid currentColor; border-radius: 999px; padding: 0 9px; font-size: .8rem; }
.verdict.good { color: var(--good); } .verdict.bad { color: var(--bad); font-weight: 600; } .verdict.none { color: var(--soft); }
.audit code { display: block; margin-top: 3px; color: var(--soft); font: .78rem/1.4 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.audit .about { color: var(--soft); font-size: .82rem; } .tile.good b { color: var(--good); } .tile.bad b { color: var(--bad); } .stopped { color: var(--bad); font-weight: 600; }
@media (max-width: 640px) {
  .audit tr { padding: 10px 0; } .audit td { padding: 1px 0; } .audit .found { display: block; }
  .audit .name::before, .audit .found::before { content: none; } .audit .name { font-size: 1rem; }
}
"""
COLUMNS = ("check", "verdict", "number", "limit", "finding")


def audit_page(result: dict[str, Any]) -> str:
    """The page of `AuditResult.to_dict()`: one self-contained HTML file without scripts.

    >>> from mnemos.audit import AuditResult, Row
    >>> row = Row("causality", "…", "fail", "token 3 <moves>", 0.5, 0.0, "mnemos audit x --checks causality", 1.0)
    >>> page = audit_page(AuditResult({"model": "x"}, [row]).to_dict())
    >>> "token 3 &lt;moves&gt;" in page, "<script" in page
    (True, False)
    """
    about, rows = result["about"], result["checks"]
    title = f"mnemos audit: {about['model']}"
    rest = ", ".join(result.get("unfinished", ()))
    stopped = f'<p class="stopped">Interrupted; not finished: {html.escape(rest)}.</p>' if rest else ""
    count = {status: sum(row["status"] == status for row in rows) for status in CLASSES}
    tiles = "".join(
        f'<div class="tile {CLASSES[status] if n else ""}"><b>{n}</b><span>{status}</span></div>'
        for status, n in count.items()
    )
    known = ", ".join(
        f"{LABELS.get(name, name)} {_text(value)}" for name, value in about.items() if name != "model" and value
    )
    header = "".join(f'<th scope="col"{_figure(name)}>{name}</th>' for name in COLUMNS)
    return f"""{head(title, AUDIT_CSS)}
<body>
<main>
<h1>{html.escape(title)}</h1>
<p class="soft">{html.escape(known)}</p>
<div class="tiles">{tiles}</div>
{stopped}
<p class="soft">A number must not exceed its limit; those of memory and needle must exceed theirs. 0.0 means equal to the last bit; other differences of logits are relative to their standard deviation. A check is not applicable where one that it needs has failed.</p>
<table class="wide audit"><thead><tr>{header}</tr></thead><tbody>{"".join(map(_row, rows))}</tbody></table>
</main>
</body>
</html>
"""


def _row(row: dict[str, Any]) -> str:
    verdict = f'<span class="verdict {CLASSES[row["status"]]}">{html.escape(row["status"])}</span>'
    finding = f'{html.escape(row["text"])}<div class="about">{html.escape(row["about"])}</div><code>{html.escape(row["command"])}</code>'
    cells = {
        "check": (' class="name"', html.escape(row["check"])),
        "verdict": ("", verdict),
        "number": (_figure("number"), shown(row["number"])),
        "limit": (_figure("limit"), shown(row["limit"])),
        "finding": (' class="found"', finding),
    }
    inner = "".join(f'<td{kind} data-name="{name}">{content}</td>' for name, (kind, content) in cells.items())
    return f"<tr>{inner}</tr>"


def _figure(name: str) -> str:
    return ' class="figure"' if name in ("number", "limit") else ""


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int | float) else str(value)
