"""Charts of the suites of `mnemos eval`, for one model or several: a finding as title, and an SVG.

A function of `CHARTS` takes the rows of a suite by model and yields (title, chart) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..colours import BLUE, GREY, ORANGE, colours_of
from ..eval.headlines import Headline
from ..eval.headlines import perplexity as perplexity_headlines
from .charts import Line, Mark, chart, heat_map

Rows = list[dict[str, Any]]
ByModel = Mapping[str, Rows]
Titled = tuple[str, str]


def charts_of(suite: str, rows: ByModel) -> list[Titled]:
    """The charts of a suite; empty for one without charts, or without numbers to draw.

    >>> charts_of("capacity", {"x": [{"pairs": 2, "recall": 1.0}, {"pairs": 8, "recall": 0.5}]})[0][0]
    'Recalls 50% of 8 facts'
    """
    known = {name: found for name, found in rows.items() if found}
    return list(CHARTS[suite](known)) if suite in CHARTS and known else []


def _perplexity(rows: ByModel) -> Iterator[Titled]:
    lines = []
    for model, found in rows.items():
        for memory in dict.fromkeys(row["memory"] for row in found):
            places = [r for r in found if r["memory"] == memory and r["what"].startswith("positions")]
            x = [max(1, int(r["what"].split()[1].split("…")[0])) for r in places]
            y = [r["perplexity"] for r in places]
            if len(x) > 1 and all(map(math.isfinite, y)):
                lines.append(
                    Line(
                        _memory_name(model, memory, len(rows)),
                        x,
                        y,
                        _colour(rows, model, memory),
                        dashed=memory == "frozen",
                    )
                )
    if lines:
        drawn = chart(lines, "position in the text, tokens", "perplexity", log="x")
        if len(rows) > 1:
            best = _leader(lines, lowest=True)
            yield f"{best} predicts the end of the text best" if best else "Perplexity by position", drawn
            return
        yield _title([h for found in rows.values() for h in perplexity_headlines(found)]), drawn


def _title(headlines: list[Headline]) -> str:
    gains = [h.value for h in headlines if h.name == "learning gain"]
    if not gains:
        return "Perplexity by position"
    word = "lowers" if gains[0] >= 0 else "raises"
    return f"Learning at test time {word} perplexity by {abs(gains[0]):.1%}"


def _memory_name(model: str, memory: str, models: int) -> str:
    if models > 1:
        return model if memory != "frozen" else f"{model}, without learning"
    return {"learning": "with learning at test time", "frozen": "without learning"}.get(memory, model)


def _colour(rows: ByModel, model: str, memory: str = "") -> int:
    if len(rows) > 1:
        return colours_of(rows)[model]
    return BLUE if memory == "frozen" else ORANGE


def _leader(lines: list[Line], lowest: bool) -> str | None:
    """The name of the line that ends best, alone; None if several do."""
    ends = sorted((line.y[-1] if lowest else -line.y[-1], line.name) for line in lines if not line.dashed)
    return ends[0][1] if len(ends) > 1 and ends[0][0] < ends[1][0] else None


def _needle(rows: ByModel) -> Iterator[Titled]:
    for model, found in rows.items():
        score = "generated" if found[0].get("generated") is not None else "likelihood"
        lengths, depths = sorted({r["length"] for r in found}), sorted({r["depth"] for r in found})
        cells = [
            [_mean(r.get(score) for r in found if (r["length"], r["depth"]) == (n, d)) for n in lengths] for d in depths
        ]
        whole = _mean(r.get(score) for r in found)
        if whole is None:
            continue
        names = [f"{n:,}" for n in lengths], [f"{d:.0%}" for d in depths]
        title = f"Finds {whole:.0%} of the needles" if len(rows) == 1 else f"{model}: {whole:.0%} of the needles"
        yield title, heat_map(cells, *names, "length, tokens", "depth of the needle")


def _length(rows: ByModel) -> Iterator[Titled]:
    lines = _lines(rows, "length", "perplexity")
    if lines and len(lines[0].x) > 1:
        first, last = lines[0].y[0], lines[0].y[-1]
        best = _leader(lines, lowest=True)
        title = f"{best} has the lowest perplexity" if best else "Perplexity by length of the text"
        if len(rows) == 1:
            title = f"Perplexity goes from {first:.3g} to {last:.3g} at {lines[0].x[-1]:,} tokens"
        yield title, chart(lines, "length, tokens", "perplexity", log="x", x_ticks=lines[0].x)


def _capacity(rows: ByModel) -> Iterator[Titled]:
    yield from _shares(rows, "pairs", "recall", "facts", "Recalls {share} of {x} facts", "Recall by number of facts")


def _mqar(rows: ByModel) -> Iterator[Titled]:
    yield from _shares(
        rows, "pairs", "accuracy", "pairs", "Recalls {share} of {x} pairs", "Accuracy by number of pairs"
    )


def _babilong(rows: ByModel) -> Iterator[Titled]:
    by_length = {}
    for model, found in rows.items():
        score = "generated" if found[0].get("generated") is not None else "likelihood"
        lengths = sorted({r["length"] for r in found if isinstance(r["length"], int)})
        by_length[model] = [
            {"length": max(1, n), "right": _mean(r.get(score) for r in found if r["length"] == n)} for n in lengths
        ]
    yield from _shares(
        by_length,
        "length",
        "right",
        "tokens of text around the facts",
        "Answers {share} in {x} tokens",
        "Answers by length",
    )


def _shares(rows: ByModel, x: str, y: str, x_label: str, single: str, several: str) -> Iterator[Titled]:
    lines = _lines(rows, x, y)
    if not lines or len(lines[0].x) < 2:
        return
    chances = [r["chance"] for found in rows.values() for r in found if r.get("chance") is not None]
    marks = [Mark("guessing", y=sum(chances) / len(chances))] if chances else []
    best = _leader(lines, lowest=False)
    several = f"{best} is right most often" if best else several
    title = several if len(rows) > 1 else single.format(share=f"{lines[0].y[-1]:.0%}", x=f"{lines[0].x[-1]:,}")
    yield title, chart(lines, x_label, y, (0, 1), log="x", percent=True, marks=marks, x_ticks=lines[0].x)


def _vitality(rows: ByModel) -> Iterator[Titled]:
    names = {"carried": "state carried", "fresh": "fresh state", "frozen": "without learning"}
    lines = []
    for model, found in rows.items():
        ordered = sorted((r for r in found if r.get("carried") is not None), key=lambda r: r["length"])
        for key, name in names.items() if len(rows) == 1 else [("carried", model)]:
            place = (ORANGE, GREY, BLUE)[list(names).index(key)] if len(rows) == 1 else _colour(rows, model)
            y = [r[key] for r in ordered]
            if len(y) > 1 and all(map(math.isfinite, y)):
                lines.append(Line(name, [max(100, r["length"]) for r in ordered], y, place, dashed=key != "carried"))
    if lines:
        title = "Bits per token after more and more other text"
        yield title, chart(lines, "tokens of other text before (100: none)", "bits per token", log="x")


def _lines(rows: ByModel, x: str, y: str) -> list[Line]:
    lines = []
    for model, found in rows.items():
        known = sorted(
            (r for r in found if isinstance(r.get(y), int | float) and math.isfinite(r[y])), key=lambda r: r[x]
        )
        if known:
            place = _colour(rows, model)
            lines.append(Line(model if len(rows) > 1 else y, [r[x] for r in known], [r[y] for r in known], place))
    return lines


def _mean(values) -> float | None:
    numbers = [float(v) for v in values if v is not None]
    return sum(numbers) / len(numbers) if numbers else None


CHARTS: dict[str, Callable[[ByModel], Iterator[Titled]]] = {
    "perplexity": _perplexity,
    "needle": _needle,
    "length": _length,
    "capacity": _capacity,
    "babilong": _babilong,
    "mqar": _mqar,
    "vitality": _vitality,
}
