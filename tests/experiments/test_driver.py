"""`python experiments/run.py`: cells are what the config says, results are kept, tables and verdicts follow from them, the page from the files."""

from __future__ import annotations

import dataclasses
import doctest
import hashlib
import importlib
import json
import math
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import driver
from driver import Experiment, command, find, pivot, recall, run, runner, text
from driver.command import main
from driver.experiment import DEFAULTS, REVISED, first_names
from driver.kinds import KINDS, run_cell
from driver.needle import longest
from driver.recall import stage
from driver.runner import missing
from helpers import run_here
from mnemos import cli
from mnemos.data.tasks import mqar
from mnemos.memory.validation import NotFiniteError
from mnemos.models import MnemosForCausalLM, presets
from mnemos.train import OptimConfig
from mnemos.trials import TrialConfig, train

ROOT = Path(__file__).parents[2] / "experiments"
SMALL = {"dim": 16, "layers": 1, "tokens": 64, "steps": 2, "examples": 4, "lr": 0.01, "seed": 0}
DELTANET = {"preset": "deltanet", "memory_heads": 1, "memory_chunk_size": 8}
CELLS = {
    "recall": {"model": DELTANET, "vocab_size": 16, "pairs": 2, "length": 16, "also": [[4, 32]]},
    "text": {
        "model": DELTANET | {"layers": "mag", "attention_window": 8},
        "corpus": "embedded",
        "length": 32,
        "eval_chunks": [4, 16],
        "finish_chunk": 4,
        "routing": True,
    },
    "needle": {"model": DELTANET, "corpus": "embedded", "pairs": 2, "train_distance": 16, "distances": [16, 40]},
    "story": {"model": DELTANET, "corpus": "embedded", "asides": True, "train_length": 120, "lengths": [120, 1500]},
    "stream": {"model": DELTANET, "length": 32, "stream": 12000, "late": 4000},
    "capacity": {"features": "identity", "degree": 2, "dim": 4, "seeds": 2},
    "stability": {"depth": 2, "momentum": 0.9, "lr_scale": 1, "start_scale": 1, "length": 64, "chunk": 8},
    "scale": {"preset": "titans-mag", "size": "170m", "devices": 8},
}


MODULES = [module.name for module in pkgutil.iter_modules(driver.__path__, "driver.")]
PAGES = [ROOT.parent / "README.md", *sorted((ROOT.parent / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]


def experiment(tmp_path: Path, **fields) -> Experiment:
    config = {
        "question": "does it?",
        "kind": "capacity",
        "fixed": {"dim": 4, "seeds": 2, "degree": 2},
        "runs": [{"features": ["identity", "elementwise"]}],
        "quick": {"fixed": {"seeds": 1}, "runs": [{"features": "identity"}]},
    } | fields
    folder = tmp_path / "experiments" / "small"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return Experiment.load(folder)


def test_every_kind_has_a_case_here():
    assert CELLS.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_of_every_kind_gives_finite_numbers_and_the_same_again(kind):
    cell = SMALL | CELLS[kind] | {"kind": kind}
    first, again = run_cell(cell), run_cell(cell)
    clocks = {"seconds", "cpu_seconds"}
    assert {k: v for k, v in first.items() if k not in clocks} == {k: v for k, v in again.items() if k not in clocks}
    assert all(math.isfinite(x) for x in first.values()) and "error" not in first


def test_text_is_measured_with_other_chunks_and_without_memory():
    found = run_cell(SMALL | CELLS["text"] | {"kind": "text"})
    assert {
        "bits",
        "bits@chunk4",
        "bits@chunk16",
        "beyond",
        "beyond_unwritten",
        "beyond_without",
        "gate",
        "gate_spread",
    } <= found.keys()
    assert found["bits@chunk4"] == found["bits"]  # it finished with chunks of 4
    assert found["beyond"] not in (found["beyond_unwritten"], found["beyond_without"])


def test_stability_tells_a_rate_that_is_safe_from_one_that_is_not():
    cell = CELLS["stability"] | {"kind": "stability", "depth": 1, "momentum": 0.0, "length": 512, "seed": 0}
    assert run_cell(cell)["diverged"] == 0 and run_cell(cell)["step"] <= 2
    wild = run_cell(cell | {"lr_scale": 8})
    assert wild["diverged"] > 0.2 and wild["step"] > 2


def test_results_are_kept_for_the_defaults_they_were_measured_with():
    """If this fails, a preset's settings have changed. Results know the row of their preset; raise DEFAULTS (or REVISED, for the models of
    one kind) if it computes something else by the same row now, and write the new hash here."""
    derived = ("effective_w0_scale", "effective_max_lr", "initial_lr", "initial_momentum")
    settings = {}
    for name in presets.names():
        config = presets.config(name)
        memory = config.memory_config if config.has_memory else None
        settings[name] = [config.blocks, config.num_persistent_tokens, config.gate_mode]
        settings[name] += [config.attention_conv_width] if config.attention_conv_width else []
        settings[name] += (
            [
                json.dumps(first_names(json.loads(memory.to_json())), sort_keys=True),
                [getattr(memory, part) for part in derived],
            ]
            if memory
            else []
        )
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    assert (DEFAULTS, REVISED, digest) == (2, {"muon": 2, "deep": 2}, "7e31e647586a1c0f")
    assert OptimConfig.w0_lr_scale == 0.1  # how deep memories are trained: raise REVISED["deep"] with it


def test_results_belong_to_the_row_of_their_preset(tmp_path, monkeypatch):
    made = experiment(
        tmp_path, kind="recall", models={"a": {"preset": "swa"}, "b": {"preset": "deltanet"}}, runs=[{"model": "all"}]
    )
    before = [made.digest(cell) for cell in made.cells()]
    row = presets.PRESETS["deltanet"]
    monkeypatch.setitem(presets.PRESETS, "deltanet", dataclasses.replace(row, memory={**row.memory, "conv_width": 2}))
    after = [made.digest(cell) for cell in made.cells()]
    assert before[0] == after[0] and before[1] != after[1]


def test_results_without_a_convolution_are_those_of_the_time_before_attention_had_one(tmp_path, monkeypatch):
    models = {"a": {"preset": "swa", "attention_conv_width": 0}, "b": {"preset": "swa"}, "c": {"preset": "deltanet"}}
    made = experiment(tmp_path, kind="recall", models=models, runs=[{"model": "all"}])
    pinned, new, other = (made.digest(cell) for cell in made.cells())
    monkeypatch.setitem(presets.PRESETS, "swa", dataclasses.replace(presets.PRESETS["swa"], model=None))
    made = experiment(tmp_path, kind="recall", models=models | {"a": {"preset": "swa"}}, runs=[{"model": "all"}])
    before, same, unchanged = (made.digest(cell) for cell in made.cells())
    assert pinned == before == same != new and other == unchanged


@pytest.mark.parametrize(
    ("preset", "overrides", "ends_with"),
    [
        ("atlas", {}, {"muon", "deep"}),
        ("atlas", {"memory_rule": "gd"}, {"deep"}),
        ("atlas", {"memory_structure": "linear"}, {"muon"}),
        ("titans-lmm", {}, {"deep"}),
        ("titans-lmm", {"memory_rule": "muon"}, {"muon", "deep"}),
        ("deltanet", {}, set()),
        ("deeptransformer", {}, set()),
        ("swa", {}, set()),
    ],
)
def test_results_of_one_kind_of_models_end_with_its_revision(tmp_path, monkeypatch, preset, overrides, ends_with):
    models = {"a": {"preset": preset} | overrides}
    made = experiment(tmp_path, kind="text", models=models, runs=[{"model": "all"}])
    (cell,) = made.cells()
    before = made.digest(cell)
    for kind in ("muon", "deep"):
        with monkeypatch.context() as patch:
            patch.setitem(REVISED, kind, 99)
            assert (made.digest(cell) != before) == (kind in ends_with)


@pytest.mark.parametrize("kind", ["recall", "text", "needle", "story"])
def test_a_models_own_share_for_its_start_reaches_the_training(kind, monkeypatch):
    """start_lr 0: hidden maps stay as they were drawn, all else learns."""
    trained, module = [], importlib.import_module(f"driver.{kind}")

    def noted(model, trial):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        found = train(model, trial)
        trained.append({name for name, p in model.named_parameters() if torch.equal(p, before[name])})
        return found

    monkeypatch.setattr(module, "train", noted)
    chosen = {"preset": "titans-lmm", "memory_heads": 1, "memory_chunk_size": 8}
    for share in ({"start_lr": 0}, {}):
        run_cell(SMALL | CELLS[kind] | {"kind": kind, "model": chosen | share})
    frozen, by_default = trained
    assert frozen and all(name.endswith("W0.0") for name in frozen) and not by_default


def test_a_model_that_training_breaks_is_a_result(monkeypatch):
    def broken(cell):
        raise NotFiniteError("gates.lr must be finite and >= 0, but ranges over [nan, nan]")

    monkeypatch.setitem(KINDS, "recall", broken)
    assert run_cell({"kind": "recall"}) == {"diverged": 1}
    rows = [
        {"model": "a", "lr": 1, "accuracy": 0.5},
        {"model": "a", "lr": 2, "diverged": 1},
        {"model": "b", "lr": 1, "accuracy": 0.25},
    ]
    table = {"rows": "model", "columns": "lr", "value": "accuracy"}
    assert pivot(rows, ["model", "lr"], table)[1] == [["a", "0.500", "diverged"], ["b", "0.250", "–"]]
    partly = [{"model": "a", "x": 1.5, "diverged": 1}, {"model": "b", "x": 2.5}]
    assert pivot(partly, ["model"], {"rows": "model", "values": ["x", "y"]})[1] == [
        ["a", "1.500", "diverged"],
        ["b", "2.500", "–"],
    ]


@pytest.mark.parametrize(("kind", "asked"), [("needle", "recall@"), ("story", "accuracy@")])
def test_nothing_is_asked_beyond_the_longest(kind, asked):
    cell = SMALL | CELLS[kind] | {"kind": kind}
    numbers = cell["distances" if kind == "needle" else "lengths"]
    found = run_cell(cell | {"longest": min(numbers)})
    assert [name for name in found if name.startswith(asked)] == [f"{asked}{min(numbers)}"] and len(numbers) > 1


def test_random_words_come_with_the_whole_examples_and_in_the_test(monkeypatch):
    made, cell = [], SMALL | CELLS["recall"] | {"kind": "recall", "steps": 10, "fill": "later"}

    def noted(*args, fill, seed):
        made.append(fill)
        return recall_mqar(*args, fill=fill, seed=seed)

    recall_mqar = recall.mqar
    monkeypatch.setattr(recall, "mqar", noted)
    run_cell(cell)
    assert made[:10] == ["zero"] * 4 + ["random"] * 6 and set(made[10:]) == {"random"}


def test_a_chunk_at_which_a_memory_breaks_is_told_and_the_others_are_measured(monkeypatch):
    cell = SMALL | {"kind": "text"} | CELLS["text"]
    model_bits, calls = text.bits, []

    def breaks_at_the_second(model, ids, skip=1):
        calls.append(1)
        if len(calls) == 5:  # after bits, and the three of routing
            raise NotFiniteError("gates.lr must be finite and >= 0, but ranges over [nan, nan]")
        return model_bits(model, ids, skip)

    monkeypatch.setattr(text, "bits", breaks_at_the_second)
    found = run_cell(cell)
    assert found["diverged"] == 1 and "bits@chunk4" not in found
    assert math.isfinite(found["bits"]) and math.isfinite(found["bits@chunk16"])


def test_a_step_whose_gates_are_not_finite_is_skipped_and_counted():
    model = MnemosForCausalLM(
        presets.config("titans-lmm", hidden_size=16, num_hidden_layers=1, vocab_size=16, memory_heads=1)
    )
    ids = torch.arange(16)[None]

    def batch(step):
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(math.nan if step == 1 else 0.1)
        return ids, ids

    found = train(model, TrialConfig(3, 1e-3, batch))
    assert found["bad_steps"] == 1 and math.isfinite(found["train_loss"])


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind='magic' is unknown; choose one of recall"):
        run_cell({"kind": "magic"})


def test_batches_begin_short_and_end_as_they_are_tested():
    assert stage(0.99, 64, 512) == (64, 512) and stage(0.0, 4, 64) == (2, 16)
    assert all(4 * pairs <= length for pairs, length in (stage(done / 10, 16, 64) for done in range(10)))
    assert longest(0, 10, 1000) == 8 and longest(9, 10, 1000) == 1000


@pytest.mark.parametrize("fill", ["zero", "random"])
def test_a_recall_is_learned_and_asked_with_the_same_filling(fill, monkeypatch):
    seen = []
    monkeypatch.setattr(recall, "mqar", lambda *a, **k: (seen.append(k["fill"]), mqar(*a, **k))[1])
    run_cell(SMALL | CELLS["recall"] | {"kind": "recall", "fill": fill})
    assert seen == [fill] * (SMALL["steps"] + 2)  # a batch for each step, and two kinds of questions


def test_cells_are_products_and_carry_what_is_fixed(tmp_path):
    models = {"a": {"preset": "swa"}, "b": {"preset": "deltanet"}}
    runs = [{"model": "all", "lr": [1, 2]}, {"model": "b", "lr": 2, "seed": [0, 1]}, {"model": "a", "lr": 1}]
    made = experiment(tmp_path, kind="recall", models=models, runs=runs, fixed={"steps": 3})
    assert len(made.cells()) == 6  # 4, and 2 with seeds; the last is among the first
    assert made.whole(made.cells()[2]) == {"kind": "recall", "steps": 3, "model": {"preset": "deltanet"}, "lr": 1}
    with pytest.raises(ValueError, match="has no model 'c'; there are a, b"):
        made.whole({"model": "c"})


def test_a_config_with_a_word_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown fields grid; there are claims"):
        experiment(tmp_path, grid=[])
    (tmp_path / "config.yaml").write_text("kind: recall\n")
    with pytest.raises(ValueError, match="lacks question, runs, quick"):
        Experiment.load(tmp_path)


@pytest.fixture
def without_workers(monkeypatch):
    """Cells run in this process; the folder of corpora below reaches a real worker."""
    monkeypatch.setattr(runner, "run_all", run_here)


def test_cells_are_kept_and_run_again_only_when_the_config_changes(tmp_path, without_workers):
    made, path, seen = experiment(tmp_path), tmp_path / "results.json", []
    rows = run(made, path, workers=1, report=seen.append)
    assert len(seen) == 2 and [row["features"] for row in rows] == ["identity", "elementwise"]
    assert rows[0]["least squares"] == 4
    assert run(made, path, workers=1, report=seen.append) == rows and len(seen) == 2
    changed = experiment(tmp_path, fixed={"dim": 3, "seeds": 2, "degree": 2})
    assert len(missing(changed, path)) == 2
    assert run(changed, path, workers=1)[0]["least squares"] == 3
    assert len(changed.results(path)) == 2  # rows of the old config are gone


def test_a_cell_that_fails_is_told_and_tried_again(tmp_path, without_workers):
    made, path = experiment(tmp_path, runs=[{"features": ["identity", "magic"]}]), tmp_path / "results.json"
    rows = run(made, path, workers=1)
    assert "error" in rows[1] and "magic" in rows[1]["error"] and "error" not in rows[0]
    assert [cell["features"] for cell in missing(made, path)] == ["magic"]


def test_the_command_lists_runs_compares_and_writes(tmp_path, monkeypatch, capsys, without_workers):
    table = {"title": "T", "rows": "features", "values": ["least squares"]}
    claims = [{"text": "it is 4", "value": "least squares", "of": {"features": "identity"}, "at_least": 4}]
    made = experiment(tmp_path, tables=[table], claims=claims)
    (tmp_path / "docs" / "images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0 and "does it?" in capsys.readouterr().out
    assert main(["small", "--keep", "--workers", "1"]) == 0
    assert made.results()[0]["least squares"] == 4
    out = capsys.readouterr().out
    assert "it is 4" in out and "reproduced" in out
    assert main(["--all", "--quick", "--workers", "1"]) == 0
    assert "0 came out again, 0 the other way round" in capsys.readouterr().out  # a level is no order
    assert len(made.results()) == 2  # quick results are elsewhere
    assert main(["--write"]) == 0
    assert "| identity | 4 |" in (tmp_path / "docs" / "results.md").read_text()
    assert main(["smal"]) == 2
    assert "experiment 'smal' is unknown; did you mean small? Choose one of small" in capsys.readouterr().err
    assert main(["small", "--quick", "--keep"]) == 2
    assert main(["--root", "nowhere"]) == 2
    assert "run this in a clone" in capsys.readouterr().err


@pytest.mark.slow
def test_quick_says_how_many_orders_came_out_again_and_claims_none_that_failed(tmp_path, monkeypatch, capsys):
    order = {"text": "more is more", "value": "least squares", "better": {"dim": 4}, "worse": {"dim": 3}}
    runs, features = [{"dim": [3, 4]}], {"features": "identity", "seeds": 1, "degree": 2}
    quick = {"runs": runs}
    experiment(tmp_path, fixed=features, runs=runs, quick=quick, claims=[order])
    monkeypatch.chdir(tmp_path)
    assert main(["small", "--keep", "--workers", "1"]) == 0
    command = ["small", "--quick", "--workers", "1"]
    assert main(command) == 0 and "1 came out again, 0 the other way round" in capsys.readouterr().out
    experiment(tmp_path, fixed=features, runs=runs, quick=quick | {"fixed": {"features": "magic"}}, claims=[order])
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "failed: small" in out and "0 came out again" in out and "1 more are within noise" in out
    less = [order | {"lower": True, "better": {"dim": 4}, "worse": {"dim": 3}}]
    experiment(tmp_path, fixed=features, runs=runs, quick=quick, claims=less)
    assert main(command) == 0 and "1 came out again" in capsys.readouterr().out  # not reproduced, twice


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_of_the_driver_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_every_command_of_a_page_is_understood_and_names_an_experiment(monkeypatch):
    asked = []
    monkeypatch.setattr(command, "experiments", lambda name=None, **options: asked.append((name, options)))
    names = {made.name for made in find(None, ROOT)}
    for page in PAGES:
        for line in re.findall(r"python experiments/run\.py([^`#\n]*)", page.read_text()):
            words = shlex.split(line)
            assert main(words) == 0, (page.name, line)
            name, options = asked[-1]
            assert name is None or name in names, (page.name, line)
            assert options.keys() >= {"all", "quick", "keep", "write", "text"}
    assert {name for name, _ in asked} >= names


def test_the_script_lists_the_experiments_from_the_repository_and_is_not_in_the_package():
    done = subprocess.run(
        [sys.executable, "experiments/run.py"],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT.parent / "src")},
    )
    assert done.returncode == 0 and "mqar" in done.stdout, done.stderr
    assert "reproduce" not in cli.COMMANDS
    assert not list((ROOT.parent / "src" / "mnemos").rglob("reproduce*.py"))
    assert not list((ROOT.parent / "src" / "mnemos" / "reproduce").glob("*.py"))


def test_a_corpus_is_read_from_the_folder_that_is_given(tmp_path):
    cell = SMALL | CELLS["text"] | {"kind": "text", "corpus": "own.txt", "routing": False}
    (tmp_path / "own.txt").write_bytes(bytes(range(256)) * 40)
    assert math.isfinite(run_cell(cell, tmp_path)["bits"])
    with pytest.raises(ValueError, match=r"the corpus .*nowhere/own\.txt does not exist; give its folder by --text"):
        run_cell(cell, tmp_path / "nowhere")


def test_the_folder_of_corpora_reaches_the_workers_and_changes_no_digest(tmp_path, monkeypatch, capsys):
    fixed = SMALL | {key: CELLS["text"][key] for key in ("model", "length")} | {"corpus": "own.txt"}
    models, seed = {"a": fixed.pop("model")}, fixed.pop("seed")
    quick = {"runs": [{"model": "a", "seed": seed}]}
    made = experiment(tmp_path, kind="text", fixed=fixed, models=models, runs=quick["runs"], quick=quick)
    digests = [made.digest(cell) for cell in made.cells()]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "own.txt").write_bytes(bytes(range(256)) * 40)
    monkeypatch.chdir(tmp_path)
    assert main(["small", "--keep", "--workers", "1", "--text", "elsewhere"]) == 0
    (row,) = made.results()
    assert [row["digest"]] == digests and "error" not in row and math.isfinite(row["bits"])
