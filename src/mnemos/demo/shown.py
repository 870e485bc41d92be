"""The demo's measurements in a terminal: an example with its facts, text, questions and answers; tables; recall as bars."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .facts import CHANCE
from .measure import Asked
from .results import FULL_ATTENTION, MODEL_NAMES, WITH_MEMORY, DemoPlan, example_at, example_of

BLOCKS = " ▏▎▍▌▋▊▉█"
BAR_CELLS = 10
TERMINAL_COLORS = {"memory": "dark_orange", "window only": "dodger_blue1", "full attention": "grey62"}


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """A share in 0..1 as a bar of eighths of a cell.

    >>> bar(0.5, 4), bar(0.03, 4), bar(1, 4)
    ('██', '▏', '████')
    """
    eighths = math.ceil(round(share * cells * 8, 6))
    full, rest = divmod(eighths, 8)
    return BLOCKS[8] * full + (BLOCKS[rest] if rest else "")


def print_recall(recall: dict[str, list[Asked]], plan: DemoPlan, console: Console) -> None:
    """Recall by distance, a bar for each model."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("tokens since the facts", justify="right")
    for name in MODEL_NAMES:
        table.add_column(name, style=TERMINAL_COLORS[name], no_wrap=True)
    for i, distance in enumerate(plan.distances):
        cells = [f"{distance:,}"]
        for name in MODEL_NAMES:
            asked = recall[name][i] if i < len(recall[name]) else None
            cells.append("not asked" if asked is None else f"{bar(asked.recall):<{BAR_CELLS}} {asked.recall:>4.0%}")
        table.add_row(*cells)
    console.print(table)
    console.print(
        f"{plan.questions} questions at every distance; guessing: {CHANCE:.0%}. The windows reach {plan.reach} tokens back. "
        f"Training had up to {plan.curriculum.longest:,} tokens.",
        highlight=False,
    )


def print_example(recall: dict[str, list[Asked]], plan: DemoPlan, console: Console) -> None:
    """One reader: a fact, the text between, the question, and the answer of each model."""
    example = example_of(recall, example_at(plan))
    person, thing = example.facts[0]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    others = ", ".join(f"{p} {t}" for p, t in example.facts[1:])
    table.add_row("facts", Text(f"{person} {thing}" + (f", {others}" if others else "")))
    table.add_row("text", Text(f"{example.text} ({example.distance:,} bytes)", style="dim"))
    table.add_row("question", Text(f"{person}?"))
    for name, answers in example.answers.items():
        right = answers[0] == thing
        answer = Text(f"{answers[0]} ", style="green" if right else "red")
        answer.append("✓ right" if right else f"✗ wrong, it is {thing}")
        count = sum(answer == fact for answer, (_, fact) in zip(answers, example.facts))
        answer.append(f"; {count} of {len(answers)} questions right", style="dim")
        table.add_row(name, answer)
    console.print(table)


def print_states(recall: dict[str, list[Asked]], plan: DemoPlan, console: Console) -> None:
    """Bytes of the state by tokens read, and the speed of reading."""
    names = (*(f"{name}, bytes" for name in MODEL_NAMES), "memory, tokens/s")
    table = Table("tokens read", *names, box=None, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.justify = "right"
    for i, distance in enumerate(plan.distances):
        if distance < 1_000 and distance != plan.distances[-1]:
            continue
        cells = [f"{recall[n][i].state_bytes:,}" if i < len(recall[n]) else "not read" for n in MODEL_NAMES]
        asked = recall[WITH_MEMORY][i]
        table.add_row(f"{distance:,}", *cells, f"{plan.rows * distance / max(1e-9, asked.seconds):,.0f}")
    console.print(table)
    last = recall[FULL_ATTENTION][-1]
    each = (last.state_bytes - recall[FULL_ATTENTION][0].state_bytes) / (
        last.distance - recall[FULL_ATTENTION][0].distance
    )
    console.print(
        f"Full attention keeps {each:,.0f} bytes for every token, {each * max(plan.distances) / 1e6:,.0f} MB for {max(plan.distances):,}.",
        highlight=False,
    )
