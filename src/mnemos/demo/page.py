"""The demo's report: one HTML page that needs nothing from outside."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from ..colours import colour, colour_index
from ..report.charts import CHARTS_CSS, Line, Mark, chart
from ..report.page import head
from .facts import CHANCE
from .results import MODEL_NAMES, example_at, example_of

if TYPE_CHECKING:
    from .results import DemoReport

MODEL_COLORS = {name: colour(name) for name in MODEL_NAMES}
PAGE_CSS = """
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px; margin-top: 16px }
.panels h2 { margin: 0 0 4px } .wide { grid-column: 1 / -1 }
.story { display: grid; grid-template-columns: max-content 1fr; gap: 8px 16px; margin: 8px 0 0 } .story dt { color: var(--soft) } .story dd { margin: 0; min-width: 0; overflow-wrap: anywhere }
.story .text { max-height: 8.7em; overflow-y: auto; font: 0.85rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; color: var(--soft) }
.right { color: var(--good); font-weight: 600 } .wrong { color: var(--bad) }
@media (max-width: 600px) { .story { grid-template-columns: 1fr; gap: 0 } .story dd { margin-bottom: 8px } }
"""


def page(report: DemoReport) -> str:
    """The page of a run: an example, charts, tables and a description of each measurement."""
    panels = [_example(report), _distance(report), _state(report), _learning(report), _answers(report), _rest(report)]
    return f"""{head("Mnemos demo", CHARTS_CSS + PAGE_CSS)}
<body><main>
<h1>{html.escape(finding(report))}</h1>
<p>Three models of one size ({report.parameters["memory"]:,} parameters) read facts, then text, then questions. One has a memory that learns while it reads,
one attends to {report.plan.baseline_window} tokens, one to all tokens. Guessing gives {CHANCE:.0%}.</p>
<p class="soft">Everything on this page was measured in one run of {report.seconds:.0f} seconds. {html.escape(report.machine)}.</p>
<div class="panels">{"".join(panels)}</div>
</main></body></html>
"""


def finding(report: DemoReport) -> str:
    """The main result in one sentence."""
    memory, window = report.recall["memory"], report.recall["window only"]
    far = max((a for a in memory if a.recall >= 0.5), key=lambda a: a.distance, default=memory[0])
    other = next(a for a in window if a.distance == far.distance)
    return f"{far.distance:,} tokens after the facts, the memory recalls {far.recall:.0%}, and the window {other.recall:.0%}"


def _section(title: str, *parts: str, wide: bool = False) -> str:
    return f'<section class="card{" wide" * wide}"><h2>{html.escape(title)}</h2>{"".join(parts)}</section>'


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
    table = f'<table class="data">{f"<tr>{names}</tr>" if any(head) else ""}{lines}</table>'
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _example(report: DemoReport) -> str:
    example = example_of(report.recall, example_at(report.plan))
    (person, thing), *others = example.facts
    rest = ", ".join(f"{p} {t}" for p, t in others)
    answers = ""
    for name, given in example.answers.items():
        right = given[0] == thing
        mark = "right" if right else f"wrong, it is {thing}"
        answers += f'<dt>{name}</dt><dd class="{"right" if right else "wrong"}">{html.escape(given[0])} ({mark})</dd>'
    story = (
        f"<dt>facts</dt><dd><b>{person} {thing}</b>{', ' if rest else ''}{rest}</dd>"
        f'<dt>text, {example.distance:,} bytes</dt><dd class="text" tabindex="0">{html.escape(example.text)}</dd>'
        f"<dt>question</dt><dd><b>{person}?</b></dd>{answers}"
    )
    return _section("A fact, a text, a question", f'<dl class="story">{story}</dl>', wide=True)


def _distance(report: DemoReport) -> str:
    lines = [
        Line(name, [a.distance for a in found], [a.recall for a in found], colour_index(name))
        for name, found in report.recall.items()
    ]
    plan = report.plan
    marks = [Mark("guessing", y=CHANCE)]
    if min(plan.distances) < plan.reach < max(plan.distances):
        marks.append(Mark("the windows' reach", x=plan.reach))
    drawn = chart(lines, "tokens since the facts", "recall", (0, 1), log="x", percent=True, marks=marks)
    words = (
        f"<p>{plan.questions} questions at each distance, on text that was held out. Windows of {plan.baseline_window} tokens in {plan.layers} layers "
        f"reach {plan.reach} tokens back. Training had up to {plan.curriculum.longest:,} tokens between facts and questions. "
        f"Full attention is asked up to {max(plan.attention_distances):,}; beyond the training, its positions are new to it.</p>"
    )
    far = max(a.distance for a in report.recall["full attention"])  # the largest distance at which all models are asked
    recalled = [f"{name} {a.recall:.0%}" for name, found in report.recall.items() for a in found if a.distance == far]
    return _section(f"Recall after {far:,} tokens: {', '.join(recalled)}", drawn, words)


def _state(report: DemoReport) -> str:
    lines = [
        Line(name, [a.distance for a in found], [a.state_bytes for a in found], colour_index(name))
        for name, found in report.recall.items()
    ]
    drawn = chart(lines, "tokens read", "bytes of state", log="xy")
    first, last = report.recall["memory"][0], report.recall["memory"][-1]
    constant = first.state_bytes == last.state_bytes
    title = "The memory's state has a fixed size" if constant else "The memory's state grows"
    words = (
        f"<p>The memory's state has {first.state_bytes:,} bytes after {first.distance:,} tokens and {last.state_bytes:,} after {last.distance:,}. "
        f"The model reads {report.plan.rows * last.distance / max(1e-9, last.seconds):,.0f} tokens per second on one thread.</p>"
    )
    return _section(title, drawn, words)


def _learning(report: DemoReport) -> str:
    lines = []
    for name, curve in report.curves.items():
        every = max(1, curve.steps // 60)
        steps = range(every, curve.steps + 1, every)
        y = [_mean(curve.recall[s - every : s]) for s in steps]
        lines.append(Line(name, list(steps), y, colour_index(name), dots=False))
    plan, memory = report.plan, report.curves["memory"]
    grew = "the text never grew" if memory.grew_at is None else f"the text grew from step {memory.grew_at} on"
    ended = "reached its goal" if memory.reached else "did not reach its goal"
    title = f"The memory learns to keep facts in {memory.steps} steps"
    if not memory.reached:
        title = f"The memory does not reach {plan.curriculum.goal:.0%} in {memory.steps} steps"
    drawn = chart(lines, "training steps", "recall", (0, 1), percent=True, marks=[Mark("guessing", y=CHANCE)])
    seconds = ", ".join(f"{name} {curve.seconds:.0f} s" for name, curve in report.curves.items())
    words = (
        f"<p>Up to {plan.curriculum.pairs} facts, {plan.curriculum.gap[0]} to {plan.curriculum.longest:,} bytes of text, then questions; {grew}. "
        f"Training {ended} of {plan.curriculum.goal:.0%} after {memory.steps} steps. The others got the same batches. Training times: {seconds}.</p>"
    )
    return _section(title, drawn, words)


def _answers(report: DemoReport) -> str:
    example = example_of(report.recall, example_at(report.plan))
    rows = []
    for i, (person, thing) in enumerate(example.facts):
        marked = []
        for answers in example.answers.values():
            marked.append(f'<td class="{"right" if answers[i] == thing else "wrong"}">{html.escape(answers[i])}</td>')
        rows.append([person, thing, *marked])
    heads = ["question", "fact", *example.answers]
    return _section(f"All answers, {example.distance:,} tokens later", _table(heads, rows))


def _rest(report: DemoReport) -> str:
    kept = report.kept
    rows = [
        ["recall before saving", f"{kept.before:.1%}"],
        ["recall after loading", f"{kept.after:.1%}"],
        ["largest difference of any logit", f"{kept.largest_difference:g}"],
        ["bytes of the file", f"{kept.file_bytes:,}"],
    ]
    text = [[name, f"{bits:.3f}", f"{report.parameters[name]:,}"] for name, bits in report.text.items()]
    return _section(
        "Saved and loaded, and text",
        f"<p>The state of {report.plan.rows} readers in <code>{html.escape(kept.path.name)}</code>.</p>",
        _table(["", ""], rows),
        "<p>Bits per byte of held-out text behind facts, as in training; lower is better.</p>",
        _table(["model", "bits per byte", "parameters"], text),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
