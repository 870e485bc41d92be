"""Advice before a training: rows too short for the memory to commit often enough."""

from __future__ import annotations

import pytest

from helpers import run_here
from mnemos.ablate import runner
from mnemos.cli import main
from mnemos.models import presets
from mnemos.train import Trainer
from mnemos.train.advice import commit_interval, few_commits
from small import events, small

WORDS = "use rows of {length} or {smaller}"


@pytest.mark.parametrize(
    ("preset", "memory", "length", "expected"),
    [
        ("titans-mag", {}, 256, None),
        ("titans-mag", {}, 255, "commits 3 times in a sequence of 255 tokens (its interval is 64)"),
        ("titans-mag", {}, 100, "commits once in a sequence of 100 tokens"),
        ("atlas-interval", {}, 64, "never commits in a sequence of 64 tokens (its interval is 128)"),
        ("atlas-interval", {"memory_commit_every": 16}, 64, None),
        ("atlas", {}, 64, None),
        ("deltanet", {}, 4, None),  # every token has its own anchor
        ("transformer", {}, 2, None),
    ],
)
def test_rows_with_fewer_than_four_commits_are_named(preset, memory, length, expected):
    found = few_commits(presets.config(preset, **memory), length, WORDS)
    assert found is None if expected is None else expected in found


@pytest.mark.parametrize(
    ("memory", "length"),
    [({}, 90), ({"memory_commit_every": 64}, 90), ({"memory_chunk_size": 48, "memory_commit_every": 24}, 40)],
)
def test_the_advice_is_sufficient(memory, length):
    """Taking either of its two ways ends the warning."""
    found = few_commits(presets.config("atlas-interval", **memory), length, WORDS)
    longer, smaller = found.partition("rows of ")[2].split(" or ")
    assert few_commits(presets.config("atlas-interval", **memory), int(longer), WORDS) is None
    name, _, value = smaller.partition("=")
    assert few_commits(presets.config("atlas-interval", **memory | {name: int(value)}), length, WORDS) is None


def test_the_interval_is_that_of_commits_or_chunks():
    intervals = {
        name: commit_interval(presets.config(name).memory_config.spec) for name in ("titans-lmm", "moneta", "retnet")
    }
    assert intervals == {"titans-lmm": 64, "moneta": 4, "retnet": 64}


def test_a_training_in_short_rows_says_so_unless_it_carries_state(tmp_path):
    short = {"seq_len": 24}
    path = Trainer(small(tmp_path, steps=1, data=short)).train().path
    assert "commits 3 times in a sequence of 24 tokens" in events(path)
    assert "use --seq-len 32, --carry-state or --model.set memory_chunk_size=6" in events(path)
    carried = Trainer(small(tmp_path, name="b", steps=1, data=short | {"carry_state": True})).train().path
    long = Trainer(small(tmp_path, name="c", steps=1)).train().path
    assert "commits" not in events(carried) + events(long)


def test_a_dry_run_and_an_ablation_in_short_rows_say_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "run_all", run_here)
    few = ["--model.set", "num_hidden_layers=1", "hidden_size=32", "--seq-len", "128"]
    assert main(["train", "--preset", "titans-lmm", *few, "--dry-run"]) == 0
    assert "mnemos: the memory commits 2 times in a sequence of 128 tokens" in capsys.readouterr().err
    tiny = [
        "--set",
        "hidden_size=16",
        "num_hidden_layers=1",
        "memory_heads=1",
        "memory_key_dim=4",
        "memory_chunk_size=16",
    ]
    rest = ["--steps", "1", "--seeds", "1", "--examples", "2", "--batch-size", "2", "--length", "32", "--pairs", "2"]
    command = [
        "ablate",
        "--preset",
        "atlas-interval",
        "--ablations",
        "no-memory",
        "--workers",
        "1",
        "--output",
        str(tmp_path / "a"),
        *rest,
        *tiny,
    ]
    assert main(command) == 0
    assert "use --length 64 or --set memory_chunk_size=8" in capsys.readouterr().err
