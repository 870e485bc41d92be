"""Results of `mnemos eval` as a page: a table for every suite, with scores as bars."""

from __future__ import annotations

import html
from typing import Any

from ..eval import SUITES
from ..eval.comparison import compare
from .page import head

SCORES = ("generated", "likelihood", "accuracy", "classwise", "exact", "normalised", "recall", "chosen")
WORD_CELL = ' class="word"'
BEST_CELL = ' class="best"'
RESULTS_CSS = """
.results .best { font-weight: 700 }
.scroll { overflow-x: auto; margin-top: 8px } .results { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums }
.results th, .results td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; vertical-align: bottom }
.results th { color: var(--soft); font-weight: 500 } .results .word { text-align: left }
.results .score { background: linear-gradient(90deg, rgb(var(--cold) / .3) var(--share), transparent var(--share)); min-width: 90px }
@media (max-width: 600px) { .results { font-size: .74rem } .results th, .results td { padding: 3px 4px } .results th, .results .word { white-space: normal } .results .score { min-width: 52px } }
"""


def results_page(results: dict[str, Any], title: str = "mnemos eval") -> str:
    """The page of a results dictionary of `run_suites`: one self-contained HTML file without scripts.

    >>> entry = {"seconds": 1.0, "rows": [{"pairs": 4, "length": 64, "accuracy": 0.5, "chance": 0.01}]}
    >>> "50 %" in results_page({"model": {"path": "runs/x"}, "suites": {"mqar": entry}})
    True
    """
    about = "; ".join(f"{name} {value}" for name, value in results["model"].items() if value)
    parts = [_suite(name, entry) for name, entry in results["suites"].items()]
    return f"""{head(title, RESULTS_CSS)}
<body>
<main>
<h1>{html.escape(title)}</h1>
<p class="soft">{html.escape(about)}</p>
{"".join(parts)}
</main>
</body>
</html>
"""


def _suite(name: str, entry: dict[str, Any]) -> str:
    """A heading, a description, and the rows of a suite, or the reason for their absence."""
    known = SUITES.get(name)
    head = f"<h2>{html.escape(name)}</h2>"
    if "rows" not in entry:
        return f"{head}<p>Not measured: {html.escape(entry.get('error', 'no rows'))}</p>"
    about = f"{known.about}; " if known else ""
    rows = entry["rows"]
    columns = (known.columns if known else ()) or tuple(dict.fromkeys(key for row in rows for key in row))
    columns = tuple(c for c in columns if any(row.get(c) is not None for row in rows))
    words = {c for c in columns if any(isinstance(row.get(c), str) for row in rows)}
    named = "".join(f"<th{WORD_CELL * (c in words)}>{html.escape(c.replace('_', ' '))}</th>" for c in columns)
    lines = "".join(f"<tr>{''.join(_cell(c, row.get(c), c in words) for c in columns)}</tr>" for row in rows)
    table = f'<div class="scroll" tabindex="0"><table class="results"><tr>{named}</tr>{lines}</table></div>'
    return f'{head}<p class="soft">{html.escape(about)}{entry["seconds"]:.1f} s</p>{table}'


def _cell(column: str, value: Any, word: bool) -> str:
    if column in SCORES and isinstance(value, int | float):
        return f'<td class="score" style="--share:{100 * value:.1f}%">{100 * value:.3g} %</td>'
    return f"<td{WORD_CELL * word}>{html.escape(_text(column, value))}</td>"


def _text(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column in ("chance", "depth"):
        return f"{100 * value:.3g} %"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def comparison_page(results: dict[str, dict[str, Any]], title: str = "mnemos eval") -> str:
    """The page of several models: one table of headlines, the best of each column marked, then the suites of each model.

    >>> found = {"suites": {"mqar": {"seconds": 1.0, "rows": [{"pairs": 4, "accuracy": 0.5}]}}, "parameters": 1000, "model": {}}
    >>> "1,000" in comparison_page({"a": found, "b": found})
    True
    """
    found = compare(results)
    heads = "".join(f"<th{WORD_CELL * (i == 0)}>{html.escape(h)}</th>" for i, h in enumerate(found.heads()))
    rows = ""
    for row in found.rows():
        cells = [f"<td{WORD_CELL}>{html.escape(row[0])}</td>"]
        for text in row[1:]:
            best = text.endswith(" *")
            cells.append(f"<td{BEST_CELL * best}>{html.escape(text.removesuffix(' *'))}</td>")
        rows += f"<tr>{''.join(cells)}</tr>"
    parts = [
        f"<h2>{html.escape(name)}</h2>{''.join(_suite(suite, entry) for suite, entry in one['suites'].items())}"
        for name, one in results.items()
    ]
    return f"""{head(title, RESULTS_CSS)}
<body>
<main>
<h1>{html.escape(title)}</h1>
<div class="scroll" tabindex="0"><table class="results"><tr>{heads}</tr>{rows}</table></div>
<p class="soft">Bold: the best of a column.</p>
{"".join(parts)}
</main>
</body>
</html>
"""
