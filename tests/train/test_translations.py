"""The commands of other scripts in docs/training.md: each row is dry-run, and its figures are those that are printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from mnemos.cli import main
from mnemos.data import train_bpe
from mnemos.models import presets

DOCUMENT = Path(__file__).parents[2] / "docs" / "training.md"


class Row(NamedTuple):
    there: str
    here: str
    vocabulary: str
    parameters: str
    tokens_per_step: str
    steps: str


def rows() -> list[Row]:
    section = DOCUMENT.read_text().partition("## For users of other scripts")[2]
    lines = [line for line in section.splitlines() if line.startswith("| ") and "`mnemos train " in line]
    return [Row(*(cell.strip() for cell in line.strip("| ").split(" | "))) for line in lines]


def figures(printed: str) -> dict[str, str]:
    found = dict(re.findall(r"│ (vocabulary|parameters|tokens per step) +│ ([\d,]+)", printed))
    (found["steps"],) = re.findall(r"in ([\d,]+) steps", printed)
    return found


def dry_run(arguments: list[str], capsys, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", *arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.there.strip("`")[:60])
def test_a_documented_command_has_the_documented_figures(row, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = shlex.split(row.here.strip("`"))
    assert command[:2] == ["mnemos", "train"]
    expected = {
        "vocabulary": row.vocabulary,
        "parameters": row.parameters,
        "tokens per step": row.tokens_per_step,
        "steps": row.steps,
    }
    assert figures(dry_run(command[2:], capsys, monkeypatch)) == expected
    assert not list(tmp_path.iterdir())  # nothing was started


def test_every_script_of_the_seeds_is_translated():
    there = " ".join(row.there for row in rows())
    for script in ("train_mac.py", "train_mag.py", "train_mal.py", "train_atlas.py", "train_titans.py", "main.py"):
        assert script in there
    assert "train_smollm.py" in there and "--disable-memory" in there


def test_the_54_million_of_train_smollm_are_54_million_with_32000_tokens_and_a_billion_read():
    (row,) = (row for row in rows() if "train_smollm.py" in row.there)
    number = {name: int(value.replace(",", "")) for name, value in row._asdict().items() if value[0].isdigit()}
    assert number["vocabulary"] == 32_000 and round(number["parameters"] / 1e6, 1) == 54.4
    assert number["tokens_per_step"] == 8 * 4 * 512
    assert number["tokens_per_step"] * number["steps"] == pytest.approx(1e9, rel=0.01)


def test_a_dry_run_names_the_tokenizer_that_a_size_is_meant_for(capsys, monkeypatch):
    printed = dry_run(["--preset", "swa", "--size", "omega-tiny"], capsys, monkeypatch)
    assert "256 (the size's 32,000: --tokenizer bpe:32000)" in printed
    printed = dry_run(["--preset", "swa", "--size", "omega-tiny", "--tokenizer", "bpe:32000"], capsys, monkeypatch)
    assert figures(printed)["parameters"] == f"{presets.count(presets.config('swa', 'omega-tiny')):,}"


def test_a_dry_run_reads_the_vocabulary_of_a_tokenizer_on_disk(capsys, monkeypatch, tmp_path):
    made = train_bpe(["to be or not to be, that is the question"] * 9, vocab_size=280)
    made.save(tmp_path / "tok")
    printed = dry_run(["--preset", "swa", "--tokenizer", str(tmp_path / "tok")], capsys, monkeypatch)
    assert figures(printed)["vocabulary"] == str(made.vocab_size)


@pytest.mark.parametrize(
    ("name", "ours", "claimed"),
    [("tiny", "tiny", 33.7), ("small", "mini", 54.4), ("medium", "small", 67.0), ("base", "base", 195.1)],
)
def test_sizes_of_atlas_mag_omegarule_have_its_shapes_and_their_own_counts(name, ours, claimed):
    theirs, mine = presets.size(f"omega-{name}"), presets.size(ours)
    shape = theirs.hidden_size, theirs.layers, theirs.heads, theirs.vocab_size
    assert shape == (mine.hidden_size, mine.layers, mine.heads, mine.vocab_size)
    assert f"{claimed}M there" in theirs.source
    count = presets.count(presets.config("atlas-mag", f"omega-{name}"))
    assert count == presets.count(presets.config("atlas-mag", ours)) < claimed * 1e6
