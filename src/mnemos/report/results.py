"""Results of `mnemos eval` as a page: charts first, then a folded table for every suite. One model, or several side by side."""

from __future__ import annotations

import html
from typing import Any

from ..eval import SUITES
from ..eval.comparison import compare
from ..eval.suites import label
from .charts import CHARTS_CSS
from .page import head
from .suite_charts import charts_of

SCORES = ("generated", "likelihood", "accuracy", "classwise", "exact", "normalised", "recall", "chosen")
WORD_CELL = ' class="word"'
BEST_CELL = ' class="best"'
RESULTS_CSS = """
.results { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums }
.results th, .results td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; vertical-align: bottom }
.results th { color: var(--soft); font-weight: 500 } .results .word { text-align: left } .results .best { font-weight: 700 }
.results .score { background: linear-gradient(90deg, rgb(var(--cold) / .3) var(--share), transparent var(--share)); min-width: 90px }
.charts { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); margin-top: 14px } .charts h3 { margin: 0 }
details { border: 1px solid var(--line); border-radius: 10px; background: var(--card); margin-top: 10px; padding: 0 14px } details[open] { padding-bottom: 12px }
summary { cursor: pointer; padding: 9px 0; font-weight: 600 } summary .soft { font-weight: 400 }
.results .word { white-space: normal; overflow-wrap: anywhere; min-width: 7ch } .compared th { white-space: normal }
@media (max-width: 600px) {
  details { padding: 0 8px }
  .results { font-size: .72rem } .results th, .results td { padding: 3px 3px } .results th { white-space: normal } .results .score { min-width: 44px }
  .compared, .compared tbody { display: block } .compared tr { display: block; border: 1px solid var(--line); border-radius: 10px; background: var(--card); padding: 6px 10px; margin-top: 8px; font-size: .85rem }
  .compared tr:first-child { display: none } .compared td { display: flex; justify-content: space-between; gap: 10px; border: 0 } .compared td::before { content: attr(data-name); color: var(--soft); font-weight: 400 }
}
"""


def results_page(results: dict[str, Any], title: str = "mnemos eval") -> str:
    """The page of a results dictionary of `run_suites`: one self-contained HTML file without scripts.

    >>> entry = {"seconds": 1.0, "rows": [{"pairs": 4, "length": 64, "accuracy": 0.5, "chance": 0.01}]}
    >>> "50 %" in results_page({"model": {"path": "runs/x"}, "suites": {"mqar": entry}})
    True
    """
    about = [f"{name} {value}" for name, value in results["model"].items() if value]
    for key, name in (("parameters", "parameters"), ("training_tokens", "training tokens")):
        if results.get(key) is not None:
            about.append(f"{results[key]:,} {name}")
    tiles = "".join(
        f'<div class="tile"><b>{html.escape(h.text())}</b><span>{html.escape(h.name)}</span></div>'
        for h in compare({"": results}).cells[""].values()
    )
    tables = [_suite(name, entry) for name, entry in results["suites"].items()]
    return _page(
        title,
        f'<p class="soft">{html.escape("; ".join(about))}</p>',
        f'<div class="tiles">{tiles}</div>' if tiles else "",
        _charts({"": results}),
        "<h2>Tables</h2>",
        *tables,
    )


def comparison_page(results: dict[str, dict[str, Any]], title: str = "mnemos eval") -> str:
    """The page of several models: one table of headlines, the best of each column marked, charts of all models, then the tables of each.

    >>> found = {"suites": {"mqar": {"seconds": 1.0, "rows": [{"pairs": 4, "accuracy": 0.5}]}}, "parameters": 1000, "model": {}}
    >>> "1,000" in comparison_page({"a": found, "b": found})
    True
    """
    found = compare(results)
    heads = "".join(f"<th{WORD_CELL * (i == 0)}>{html.escape(h)}</th>" for i, h in enumerate(found.heads()))
    rows = ""
    for row in found.rows():
        cells = [f"<td{WORD_CELL}><b>{html.escape(row[0])}</b></td>"]
        for name, text in zip(found.heads()[1:], row[1:]):
            best = BEST_CELL * text.endswith(" *")
            cells.append(f'<td{best} data-name="{html.escape(name)}">{html.escape(text.removesuffix(" *"))}</td>')
        rows += f"<tr>{''.join(cells)}</tr>"
    tables = [
        f"<h3>{html.escape(name)}</h3>{''.join(_suite(suite, entry) for suite, entry in one['suites'].items())}"
        for name, one in results.items()
    ]
    return _page(
        title,
        f'<div class="scroll" tabindex="0"><table class="results compared"><tr>{heads}</tr>{rows}</table></div>',
        '<p class="soft">Bold: the best of a column.</p>',
        _charts(results),
        "<h2>Tables</h2>",
        *tables,
    )


def _page(title: str, *parts: str) -> str:
    return f"""{head(title, CHARTS_CSS + RESULTS_CSS)}
<body>
<main>
<h1>{html.escape(title)}</h1>
{"".join(parts)}
</main>
</body>
</html>
"""


def _charts(results: dict[str, dict[str, Any]]) -> str:
    """The charts of all suites, of all models."""
    suites = [name for name in SUITES if any(name in found["suites"] for found in results.values())]
    made = ""
    for suite in suites:
        rows = {model: found["suites"].get(suite, {}).get("rows") or [] for model, found in results.items()}
        for title, drawn in charts_of(suite, rows):
            made += f'<section class="card"><h3>{html.escape(title)}</h3>{drawn}</section>'
    return f'<div class="charts">{made}</div>' if made else ""


def _suite(name: str, entry: dict[str, Any]) -> str:
    """The folded rows of a suite with its description, or the reason for their absence."""
    known = SUITES.get(name)
    if "rows" not in entry:
        return f"<p><b>{html.escape(name)}</b>: not measured: {html.escape(entry.get('error', 'no rows'))}</p>"
    about = f"{known.about}; " if known else ""
    rows = entry["rows"]
    columns = (known.columns if known else ()) or tuple(dict.fromkeys(key for row in rows for key in row))
    columns = tuple(c for c in columns if any(row.get(c) is not None for row in rows))
    words = {c for c in columns if any(isinstance(row.get(c), str) for row in rows)}
    named = "".join(f"<th{WORD_CELL * (c in words)}>{html.escape(label(c))}</th>" for c in columns)
    lines = "".join(f"<tr>{''.join(_cell(c, row.get(c), c in words) for c in columns)}</tr>" for row in rows)
    table = f'<div class="scroll" tabindex="0"><table class="results"><tr>{named}</tr>{lines}</table></div>'
    about = f'<span class="soft">{html.escape(about)}{len(rows)} rows, {entry["seconds"]:.1f} s</span>'
    return f"<details><summary>{html.escape(name)} {about}</summary>{table}</details>"


def _cell(column: str, value: Any, word: bool) -> str:
    if column in SCORES and isinstance(value, int | float):
        return f'<td class="score" style="--share:{100 * value:.1f}%">{100 * value:.3g} %</td>'
    return f"<td{WORD_CELL * word}>{html.escape(_text(column, value))}</td>"


def _text(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column == "memory" and isinstance(value, str):
        return label(value)
    if column in ("chance", "depth"):
        return f"{100 * value:.3g} %"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
