"""Plots of the rows of a suite, drawn into a given matplotlib axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rows = list[dict[str, Any]]
Panel = Callable[[Any, Rows], None]


def by_position(axis, rows: Rows) -> None:
    for memory in dict.fromkeys(row["memory"] for row in rows):
        chosen = [r for r in rows if r["memory"] == memory and r["what"].startswith("positions")]
        x = [int(r["what"].split()[1].split("…")[0]) for r in chosen]
        axis.plot([max(1, v) for v in x], [r["perplexity"] for r in chosen], marker="o", label=f"memory {memory}")
        _ticks(axis, [max(1, v) for v in x])
    axis.set(xlabel="position of the token, from", ylabel="perplexity")
    axis.legend(frameon=False)


def grid(axis, rows: Rows) -> None:
    """Heat map of depth by length, mean over the tasks."""
    lengths, depths = sorted({r["length"] for r in rows}), sorted({r["depth"] for r in rows})
    score = "generated" if "generated" in rows[0] else "likelihood"
    cells = [[_mean([r[score] for r in rows if r["length"] == n and r["depth"] == d]) for n in lengths] for d in depths]
    axis.imshow(cells, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axis.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
    for i, line in enumerate(cells):
        for j, value in enumerate(line):
            axis.text(j, i, f"{value:.2f}", ha="center", va="center", color="black" if value > 0.6 else "white")
    axis.set(xlabel="length, tokens", ylabel=f"depth of the needle ({score})")


def by_length(axis, rows: Rows) -> None:
    score = "generated" if "generated" in rows[0] else "likelihood"
    for task in dict.fromkeys(r["task"] for r in rows):
        chosen = [r for r in rows if r["task"] == task]
        axis.plot([str(r["length"]) for r in chosen], [r[score] for r in chosen], marker="o", label=task)
    axis.set(xlabel="length, tokens", ylabel=f"accuracy ({score})", ylim=(-0.03, 1.03))
    axis.legend(frameon=False)


def line(x: str, *curves: str, chance: bool = False) -> Callable[[Any, Rows], None]:
    def draw(axis, rows: Rows) -> None:
        for name in curves:
            axis.plot([r[x] for r in rows], [r[name] for r in rows], marker="o", label=name.replace("_", " "))
        if chance:
            axis.plot([r[x] for r in rows], [r["chance"] for r in rows], ls=":", color="grey", label="chance")
            axis.set(ylim=(-0.03, 1.03))
        axis.set(xlabel=x)
        _ticks(axis, [r[x] for r in rows])
        axis.legend(frameon=False)

    return draw


def vitality(axis, rows: Rows) -> None:
    """Bits per token, and what a chunk teaches the memory relative to a fresh one, on a second scale."""
    lengths = [f"{r['length']:,}" for r in rows]
    for name in ("carried", "fresh", "frozen"):
        axis.plot(lengths, [r[name] for r in rows], marker="o", label=name)
    axis.set(xlabel="tokens of other text before", ylabel="bits per token")
    axis.legend(frameon=False, loc="upper left")
    second = axis.twinx()
    second.plot(lengths, [r["relearning"] for r in rows], marker="s", ls=":", color="grey")
    second.set(ylabel="relearning (dotted)")
    second.set_ylim(bottom=min(0.0, *second.get_ylim()), top=max(1.1, *second.get_ylim()))


def bars(axis, rows: Rows) -> None:
    names = [r["task"] for r in rows]
    axis.barh(names[::-1], [r["accuracy"] for r in rows][::-1])
    axis.set(xlabel="accuracy", xlim=(0, 1))


def _ticks(axis, values: list[int]) -> None:
    """A logarithmic axis with a tick at each of the values."""
    axis.set_xscale("log")
    shown = values[:: -(-len(values) // 6)]
    axis.set_xticks(shown, [f"{v:,}" for v in shown])
    axis.minorticks_off()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
