"""The demo's report: one HTML page that needs nothing from outside."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from .charts import Line, Mark, chart
from .facts import CHANCE
from .results import example_at, examples_of

if TYPE_CHECKING:
    from .results import DemoReport

PAGE_CSS = """
:root { color-scheme: light dark; --ink: #212529; --soft: #5c636a; --paper: #fff; --line: #dee2e6; --panel: #f8f9fa }
@media (prefers-color-scheme: dark) { :root { --ink: #e9ecef; --soft: #adb5bd; --paper: #16191d; --line: #3b4148; --panel: #1e2226 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 960px; padding: 16px; color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.1rem; margin: 0 0 .4rem } p { margin: .4rem 0 } .soft { color: var(--soft) }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 16px }
section { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 14px; min-width: 0 }
svg { width: 100%; height: auto; display: block } svg text { font: 12px system-ui, sans-serif; fill: var(--soft) }
.grid { stroke: var(--line) } .mark { stroke: var(--soft); stroke-dasharray: 4 4 }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: .85rem } .legend i { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 6px }
.legend i.dash { width: 18px; height: 0; border-radius: 0; border-top: 2px dashed var(--soft); vertical-align: middle }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .9rem } th, td { text-align: left; vertical-align: bottom; padding: 4px 8px; border-bottom: 1px solid var(--line) }
td.right { color: #2b8a3e; font-weight: 600 } td.wrong { color: #c92a2a } .number { text-align: right; font-variant-numeric: tabular-nums }
@media (prefers-color-scheme: dark) { td.right { color: #69db7c } td.wrong { color: #ff8787 } }
code { overflow-wrap: anywhere }
"""


def page(report: DemoReport) -> str:
    """The page of a run: charts, tables and a description of each measurement."""
    panels = [_learning(report), _distance(report), _examples(report), _state(report), _file(report), _text(report)]
    far = report.recall["memory"][-1]
    other = report.recall["window only"][-1]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Mnemos demo</title><style>{PAGE_CSS}</style></head><body>
<h1>A memory that learns while it reads</h1>
<p>Two models of one size ({report.parameters["memory"]:,} and {report.parameters["window only"]:,} parameters) see {report.plan.window} tokens at a time.
One of them also has a memory. {far.distance:,} tokens after the facts it recalls {far.recall:.0%} of them; the other {other.recall:.0%}, where guessing gives {CHANCE:.0%}.</p>
<p class="soft">Everything on this page was measured in one run of {report.seconds:.0f} seconds. {html.escape(report.machine)}.</p>
<div class="panels">{"".join(panels)}</div>
</body></html>
"""


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{''.join(parts)}</section>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    """Cells are HTML; those that begin with a digit stand to the right, and so does the name of their column."""

    def cell(text: str) -> str:
        return (
            f'<td class="number">{text}</td>'
            if text[:1].isdigit()
            else text
            if text[:3] == "<td"
            else f"<td>{text}</td>"
        )

    numbers = [column[:1].isdigit() for column in rows[0]]
    names = "".join(f'<th class="number">{h}</th>' if number else f"<th>{h}</th>" for h, number in zip(head, numbers))
    lines = "".join(f"<tr>{''.join(cell(text) for text in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{f"<tr>{names}</tr>" if any(head) else ""}{lines}</table></div>'


def _learning(report: DemoReport) -> str:
    lines = []
    for name, curve in report.curves.items():
        every = max(1, curve.steps // 60)
        steps = range(every, curve.steps + 1, every)
        lines.append(Line(name, list(steps), [_mean(curve.recall[s - every : s]) for s in steps], dots=False))
    plan, memory, other = report.plan, report.curves["memory"], report.curves["window only"]
    grew = "the text never grew" if memory.grew_at is None else f"the text grew from step {memory.grew_at} on"
    drawn = chart(lines, "training steps", "recall", (0, 1), percent=True, marks=[Mark("guessing", y=CHANCE)])
    words = (
        f"<p>Up to {plan.curriculum.pairs} facts, {plan.curriculum.gap[0]} to {plan.curriculum.longest} bytes of text, then questions; {grew}. The same batches for both: "
        f"{memory.steps} steps in {memory.seconds:.0f} s with the memory, {other.steps} in {other.seconds:.0f} s without.</p>"
    )
    return _section("Learning to keep facts", drawn, words)


def _distance(report: DemoReport) -> str:
    lines = [
        Line(name, [a.distance for a in found], [a.recall for a in found]) for name, found in report.recall.items()
    ]
    marks = [Mark("guessing", y=CHANCE), Mark("the windows' reach", x=report.plan.reach)]
    drawn = chart(lines, "tokens since the facts", "recall", (0, 1), log="x", percent=True, marks=marks)
    questions = report.plan.rows * report.plan.curriculum.pairs
    words = f"<p>{questions} questions at each distance, on text that was held out. Windows of {report.plan.window} tokens in {report.plan.layers} layers see {report.plan.reach} tokens back.</p>"
    return _section("Recall by distance", drawn, words)


def _examples(report: DemoReport) -> str:
    distance = example_at(report.plan)
    rows = []
    for person, thing, *answers in examples_of(report.recall, distance, report.plan.curriculum.pairs):
        marked = [f'<td class="{"right" if a == thing else "wrong"}">{html.escape(a)}</td>' for a in answers]
        rows.append([person, thing, *marked])
    return _section(
        f"One reader, {distance:,} tokens later",
        _table(["asked about", "fact", "answer with memory", "answer of window only"], rows),
    )


def _state(report: DemoReport) -> str:
    found = report.far
    lines = [Line(name, [a.distance for a in list_], [a.state_bytes for a in list_]) for name, list_ in found.items()]
    lines.append(Line("full attention", list(report.attention), list(report.attention.values())))
    sizes = [y for line in lines for y in line.y]
    drawn = chart(lines, "tokens read", "bytes of state", (min(sizes) / 2, max(sizes) * 2), log="xy")
    rows = [
        [
            f"{a.distance:,}",
            f"{a.state_bytes:,}",
            f"{a.recall:.0%}",
            f"{report.plan.far_rows * a.distance / a.seconds:,.0f}",
        ]
        for a in found["memory"]
    ]
    return _section(
        "The state's size", drawn, _table(["tokens read", "bytes of the memory model", "recall", "tokens/s"], rows)
    )


def _file(report: DemoReport) -> str:
    kept = report.kept
    rows = [
        ["recall before saving", f"{kept.before:.1%}"],
        ["recall after loading", f"{kept.after:.1%}"],
        ["largest difference of any logit", f"{kept.largest_difference:g}"],
        ["bytes of the file", f"{kept.file_bytes:,}"],
    ]
    return _section(
        "Saved and loaded",
        f"<p>{report.plan.rows} readers in <code>{kept.path.name}</code>.</p>",
        _table(["", ""], rows),
    )


def _text(report: DemoReport) -> str:
    rows = [[name, f"{bits:.3f}", f"{report.parameters[name]:,}"] for name, bits in report.text.items()]
    return _section(
        "Predicting text",
        "<p>Both were trained on the text between facts and questions too. Bits per byte of held-out text in that place, lower is better.</p>",
        _table(["model", "bits per byte", "parameters"], rows),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
