"""docs/results.md and every experiment's README.md, written from the configs and the kept results alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from .experiment import Experiment
from .tables import pivot
from .verdicts import FAILS, HOLDS, NOISE, OPEN, verdicts

HEADLINES = ("needle", "mqar", "routing", "text", "ablations")  # experiments whose findings begin the page
TITLE = """# Results

Five findings, measured on two processor cores with small models:
"""
INTRODUCTION = """## How to read this page

Every table and picture on this page is made from `experiments/*/results.json` by `python experiments/run.py --write`; a test compares them.

    python experiments/run.py mqar           # run what is missing of one experiment, show its tables and the verdicts on its claims
    python experiments/run.py --all --quick  # a small version of every experiment, and whether the orders of the kept results come out again

± is the 95 % interval over seeds; a number without it is one seed.
Behind a claim, ± is the interval of the difference over n pairs of runs that have the same seed and size and differ only in the compared setting.
*Within noise* means that this interval contains 0; for a claim about one level, that the interval over seeds contains the level.
With fewer than three pairs, a difference below 0.05 bits, or below 0.25 of the answers, is within noise too: kept results of different seeds differ by as much.
These are small models trained for minutes: an order found here need not hold at 1.3 B parameters.
Numbers in the column *whose* are the paper's.
"""


def names(experiment: Experiment) -> list[str]:
    """What varies between the cells."""
    return list(dict.fromkeys(name for cell in experiment.cells() for name in cell))


def lines_of(text: str) -> str:
    """A text with one sentence per line.

    >>> print(lines_of("A matrix, as in eq. 3. `W0` is learned."))
    A matrix, as in eq. 3.
    `W0` is learned.
    """
    return re.sub(r"(?<=[a-z0-9)`%][.?!]) +(?=[A-Z`])", "\n", text.strip())


def markdown_table(header: list[str], lines: list[list[str]], numeric: bool = True) -> str:
    """numeric: all columns but the first hold numbers, which are aligned to the right."""
    rule = ["---", *["---:" if numeric else "---"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def done(experiment: Experiment, rows: list[dict[str, Any]]) -> str:
    """How much of the experiment has been run, in how much time."""
    cells = experiment.cells()
    known = {row["digest"] for row in rows if "error" not in row}
    count = sum(experiment.digest(cell) in known for cell in cells)
    seconds = sum(row.get("cpu_seconds") or 0 for row in rows)
    spent = f", {seconds / 60:,.0f} minutes of processor time in training" if seconds else ""
    return f"{count} of {len(cells)} cells run{spent}."


def section(experiment: Experiment, picture: str | None) -> str:
    """Question, command, finding, tables, picture and verdicts of one experiment."""
    rows, config = experiment.results(), experiment.config
    parts = [lines_of(config["question"]), f"    python experiments/run.py {experiment.name}", done(experiment, rows)]
    if config.get("finding"):
        parts.append(lines_of(config["finding"]))
    for table in config.get("tables", []):
        header, lines = pivot(rows, names(experiment), table)
        if lines:
            parts.append(f"**{table['title']}**\n\n{markdown_table(header, lines)}")
    if picture is not None and rows and config.get("plots"):
        parts.append(f"![{experiment.name}]({picture})")
    found = verdicts(rows, names(experiment), config.get("claims", []))
    if found:
        lines = [[verdict.text, verdict.paper, f"**{verdict.found}**", verdict.numbers] for verdict in found]
        parts.append(markdown_table(["claim", "whose", "here", "numbers"], lines, numeric=False))
    return "\n\n".join(parts) + "\n"


def claims_table(experiments: list[Experiment]) -> str:
    """Every claim of every experiment in one table, which the documentation's page sorts by any column."""
    lines = []
    for experiment in experiments:
        whole = ""
        for verdict in verdicts(experiment.results(), names(experiment), experiment.config.get("claims", [])):
            continued = verdict.text.startswith("…")  # the table may be sorted, so every claim is whole
            whole = whole if continued else verdict.text
            text = f"{whole} {verdict.text}" if continued else whole
            place = f"[{experiment.name}](#{experiment.name})"
            lines.append([text, place, verdict.paper, verdict.found, verdict.numbers])
    counts = {word: sum(line[3] == word for line in lines) for word in (HOLDS, FAILS, NOISE, OPEN)}
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    header = ["claim", "experiment", "whose", "here", "numbers"]
    return f"## All claims\n\n{len(lines)} claims: {told}.\nClick on a column's name to sort by it.\n\n{markdown_table(header, lines, numeric=False)}\n"


def readme(experiment: Experiment) -> str:
    return f"# {experiment.name}\n\n{section(experiment, 'plot.svg')}"


def page(experiments: list[Experiment], root: Path) -> str:
    """The whole of docs/results.md: five findings, a table of all claims, then every experiment."""
    headlines = {experiment.name: experiment.config.get("headline") for experiment in experiments}
    found = [text.strip() for text in map(headlines.get, HEADLINES) if text]
    parts = (
        [TITLE + "\n" + "\n".join(f"{i}. {text}" for i, text in enumerate(found, 1)) + "\n"]
        if found
        else ["# Results\n"]
    )
    parts += [claims_table(experiments), INTRODUCTION]
    parts += [
        f"## {experiment.name}\n\n{section(experiment, f'images/results-{experiment.name}.svg')}"
        for experiment in experiments
    ]
    rest = root / "claims.yaml"
    if rest.exists():
        rows = yaml.safe_load(rest.read_text(encoding="utf-8"))
        lines = [[row["text"], row["paper"], row["why"]] for row in rows]
        parts.append(
            "## Claims that are not tested here\n\n"
            + markdown_table(["claim", "whose", "why not"], lines, numeric=False)
            + "\n"
        )
    return "\n".join(parts)
