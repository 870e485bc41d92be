"""`mnemos reproduce`: cells are what the config says, results are kept, tables and verdicts follow from them, the page from the files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from mnemos.cli import main
from mnemos.data.tasks import mqar
from mnemos.models import MnemosForCausalLM, presets
from mnemos.reproduce import Experiment, find, pivot, recall, run, text, verdicts
from mnemos.reproduce.experiment import DEFAULTS
from mnemos.reproduce.kinds import KINDS, run_cell
from mnemos.reproduce.needle import longest
from mnemos.reproduce.page import names, page, readme
from mnemos.reproduce.plots import dots, draw, points
from mnemos.reproduce.recall import stage
from mnemos.reproduce.runner import missing
from mnemos.reproduce.tables import matches, tuned
from mnemos.reproduce.verdicts import FAILS, HOLDS, NOISE, OPEN, _each
from mnemos.trials import Course, train

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
    "capacity": {"features": "identity", "degree": 2, "dim": 4, "seeds": 2},
    "stability": {"depth": 2, "momentum": 0.9, "lr_scale": 1, "start_scale": 1, "length": 64, "chunk": 8},
    "scale": {"preset": "titans-mag", "size": "170m", "devices": 8},
}


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
    """If this fails, a preset's settings have changed. Results know the row of their preset; raise DEFAULTS if it computes something else by
    the same row now, and write the new hash here."""
    derived = ("start_size", "lr_ceiling", "lr_start", "momentum_start")
    settings = {}
    for name in presets.names():
        config = presets.config(name)
        memory = config.memory_config if config.has_memory else None
        settings[name] = [config.blocks, config.num_persistent_tokens, config.gate_mode]
        settings[name] += [memory.to_json(), [getattr(memory, part) for part in derived]] if memory else []
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    assert (DEFAULTS, digest) == (2, "443e86189c1d5e4c")


def test_results_belong_to_the_row_of_their_preset(tmp_path, monkeypatch):
    made = experiment(
        tmp_path, kind="recall", models={"a": {"preset": "swa"}, "b": {"preset": "deltanet"}}, runs=[{"model": "all"}]
    )
    before = [made.digest(cell) for cell in made.cells()]
    row = presets.PRESETS["deltanet"]
    monkeypatch.setitem(presets.PRESETS, "deltanet", dataclasses.replace(row, memory={**row.memory, "conv_width": 2}))
    after = [made.digest(cell) for cell in made.cells()]
    assert before[0] == after[0] and before[1] != after[1]


def test_a_model_that_training_breaks_is_a_result(monkeypatch):
    def broken(cell):
        raise ValueError("gates.lr must be finite and >= 0, but ranges over [nan, nan]")

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
            raise ValueError("gates.lr must be finite and >= 0, but ranges over [nan, nan]")
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

    found = train(model, Course(3, 1e-3, batch))
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


def test_cells_are_kept_and_run_again_only_when_the_config_changes(tmp_path):
    made, path, seen = experiment(tmp_path), tmp_path / "results.json", []
    rows = run(made, path, workers=1, report=seen.append)
    assert len(seen) == 2 and [row["features"] for row in rows] == ["identity", "elementwise"]
    assert rows[0]["least squares"] == 4
    assert run(made, path, workers=1, report=seen.append) == rows and len(seen) == 2
    changed = experiment(tmp_path, fixed={"dim": 3, "seeds": 2, "degree": 2})
    assert len(missing(changed, path)) == 2
    assert run(changed, path, workers=1)[0]["least squares"] == 3
    assert len(changed.results(path)) == 2  # rows of the old config are gone


def test_a_cell_that_fails_is_told_and_tried_again(tmp_path):
    made, path = experiment(tmp_path, runs=[{"features": ["identity", "magic"]}]), tmp_path / "results.json"
    rows = run(made, path, workers=1)
    assert "error" in rows[1] and "magic" in rows[1]["error"] and "error" not in rows[0]
    assert [cell["features"] for cell in missing(made, path)] == ["magic"]


ROWS = [
    {"model": model, "lr": lr, "seed": seed, "x": x}
    for model, lr, xs in (("a", 1, (0.5, 0.6)), ("a", 2, (0.9, 0.8)), ("b", 1, (0.3, 0.2)), ("b", 2, (0.1, 0.1)))
    for seed, x in enumerate(xs)
]
NAMES = ["model", "lr", "seed"]


def test_the_learning_rate_is_tuned_per_point_by_the_mean_over_seeds():
    assert [row["x"] for row in tuned(ROWS, NAMES, "lr", "x", lower=False)] == [0.9, 0.8, 0.3, 0.2]
    assert [row["x"] for row in tuned(ROWS, NAMES, "lr", "x", lower=True)] == [0.5, 0.6, 0.1, 0.1]
    lucky = [*ROWS, {"model": "a", "lr": 3, "seed": 0, "x": 1.0}]  # one seed of a rate that others have two of
    assert [row["x"] for row in tuned(lucky, NAMES, "lr", "x", lower=False)][:2] == [0.9, 0.8]


def test_columns_that_are_words_stand_as_they_were_run_and_numbers_by_size():
    rows = [{"model": "a", "size": size, "n": n, "x": 1} for size, n in (("340m", 10), ("1.3b", 9))]
    table = {"rows": "model", "value": "x"}
    assert pivot(rows, [], table | {"columns": "size"})[0] == ["model \\ size", "340m", "1.3b"]
    assert pivot(rows, [], table | {"columns": "n"})[0] == ["model \\ n", "9", "10"]


def test_a_table_has_means_with_intervals_and_dashes():
    header, lines = pivot(ROWS, NAMES, {"rows": "model", "columns": "lr", "value": "x", "where": {"seed": [0, 1]}})
    assert header == ["model \\ lr", "1", "2"] and lines[0][1].startswith("0.550 ± ")
    header, lines = pivot(
        [*ROWS, {"model": "c", "x": 1.0}], NAMES, {"rows": "model", "values": ["x", "y"], "best": "lr"}
    )
    assert header == ["model", "x", "y"] and lines[2] == ["c", "1.000", "–"] and lines[0][1].startswith("0.850")


def test_columns_of_one_line_are_those_of_one_learning_rate():
    rows = [{"model": "a", "lr": lr, "seed": 0, "x": x, "seconds": t} for lr, x, t in ((1, 0.9, 50), (2, 0.5, 99))]
    assert pivot(rows, ["model", "lr", "seed"], {"rows": "model", "values": ["x", "seconds"], "best": "lr"})[1] == [
        ["a", "0.900", "50"]
    ]


def claim(**fields):
    return verdicts(ROWS, NAMES, [{"text": "t", "value": "x"} | fields])[0]


def test_claims_are_judged_by_paired_differences():
    three = [
        {"model": m, "seed": s, "x": x}
        for m, xs in (("a", (1, 2, 3)), ("b", (0.5, 1.4, 2.6)))
        for s, x in enumerate(xs)
    ]

    def judged(better, worse, **more):
        return verdicts(
            three,
            ["model", "seed"],
            [{"text": "t", "value": "x", "better": {"model": better}, "worse": {"model": worse}} | more],
        )[0]

    assert judged("a", "b").found == HOLDS and "+0.500" in judged("a", "b").numbers
    assert judged("b", "a").found == FAILS and judged("b", "a", lower=True).found == HOLDS
    assert judged("a", "c").found == OPEN
    noisy = [
        {"model": m, "seed": s, "x": x} for m, xs in (("a", (1, 2, 3)), ("b", (0, 3, 2))) for s, x in enumerate(xs)
    ]
    compared = {"text": "t", "value": "x", "better": {"model": "a"}, "worse": {"model": "b"}}
    assert verdicts(noisy, ["model", "seed"], [compared])[0].found == NOISE
    single = [{"model": "a", "x": 0.54}, {"model": "b", "x": 0.5}]
    assert verdicts(single, ["model"], [compared])[0].found == NOISE
    single[0]["x"] = 0.6
    assert verdicts(single, ["model"], [compared])[0].found == HOLDS


def test_one_seed_may_claim_no_more_than_seeds_differ_by():
    def judged(value, a, b):
        rows = [{"model": "a", "seed": 0, value: a}, {"model": "b", "seed": 0, value: b}]
        compared = {"text": "", "value": value, "better": {"model": "a"}, "worse": {"model": "b"}}
        return verdicts(rows, ["model", "seed"], [compared])[0].found

    assert judged("bits", 2.6, 2.5) == HOLDS and judged("bits", 2.54, 2.5) == NOISE
    assert judged("accuracy@1000", 0.594, 0.5) == NOISE  # 64 answers; of MQAR three seeds of one model are 0.22 apart
    assert judged("recall@16000", 0.96, 0.03) == HOLDS


def test_levels_must_be_reached_by_all_that_are_named():
    assert claim(of={"model": ["a", "b"]}, at_least=-0.5, best="lr").found == HOLDS
    assert claim(of={"model": ["a", "b"]}, at_least=0.9, best="lr").found == FAILS  # a may be there, b is not
    assert claim(of={"model": ["a", "z"]}, at_least=0.1).found == OPEN
    assert claim(of={"model": "b"}, at_most=0.9).found == HOLDS
    assert claim(better={"lr": 2}, worse={"lr": 1}, where={"model": "a"}).found == NOISE  # two pairs, 0.4 and 0.2 apart


def test_a_level_must_be_reached_at_every_point():
    rows = [{"model": "a", "size": size, "seed": 0, "x": x} for size, x in ((1, 0.5), (2, 1.5))]
    [found] = verdicts(
        rows, ["model", "size", "seed"], [{"text": "", "value": "x", "of": {"model": "a"}, "at_least": 0.9}]
    )
    assert (found.found, found.numbers) == (FAILS, "a 0.500 (n = 1)")


def test_seeds_that_diverged_are_told_and_not_averaged_away():
    """One lucky seed of three is no result, in a table or for a claim."""
    rows = [{"model": "a", "seed": 0, "x": 0.99}, *({"model": "a", "seed": s, "diverged": 1} for s in (1, 2))]
    rows += [{"model": "b", "seed": s, "x": 0.6} for s in range(3)]
    rows += [{"model": "c", "seed": s, "x": None} for s in range(3)]  # what JSON makes of NaN
    varying, table = ["model", "seed"], {"rows": "model", "values": ["x"]}
    wanted = [["a", "0.990 (2 of 3 diverged)"], ["b", "0.600 ± 0.000"], ["c", "diverged"]]
    assert pivot(rows, varying, table)[1] == wanted
    columns = pivot([row | {"size": 1} for row in rows], varying, {"rows": "model", "columns": "size", "value": "x"})
    assert columns[1] == wanted

    def judged(better, worse):
        compared = {"text": "", "value": "x", "better": {"model": better}, "worse": {"model": worse}}
        return verdicts(rows, varying, [compared])[0]

    assert (judged("a", "b").found, judged("a", "b").numbers) == (FAILS, "2 against 0 diverged")
    assert judged("b", "a").found == FAILS and judged("b", "a").numbers.endswith("; 0 against 2 diverged")
    assert judged("b", "c").found == HOLDS and judged("c", "b").found == FAILS
    assert judged("z", "c").found == OPEN and judged("c", "z").found == OPEN
    level = {"text": "", "value": "x", "of": {"model": ["a", "b"]}, "at_least": 0.5}
    [found] = verdicts(rows, varying, [level])
    assert (found.found, found.numbers) == (FAILS, "a 2 diverged; b 0.600 ± 0.000 (n = 3)")


def test_what_diverged_at_rates_that_are_not_the_best_is_not_counted():
    rows = [{"model": "a", "lr": lr, "seed": s, "x": 0.5} for lr, s in ((1, 0), (1, 1), (2, 0))]
    rows.append({"model": "a", "lr": 2, "seed": 1, "diverged": 1})
    assert pivot(rows, NAMES, {"rows": "model", "values": ["x"], "best": "lr"})[1] == [["a", "0.500 ± 0.000"]]
    level = {"text": "", "value": "x", "of": {"model": "a"}, "at_least": 0.5, "best": "lr"}
    assert verdicts(rows, NAMES, [level])[0].found == HOLDS


def test_a_level_that_lies_within_the_interval_over_seeds_is_within_noise():
    def judged(*xs):
        rows = [{"model": "a", "seed": seed, "x": x} for seed, x in enumerate(xs)]
        level = {"text": "", "value": "x", "of": {"model": "a"}, "at_least": 0.95}
        [found] = verdicts(rows, ["model", "seed"], [level])
        return found.found, found.numbers

    assert judged(0.92, 1.0) == (NOISE, "a 0.960 ± 0.508 (n = 2)")
    assert judged(0.99, 0.98, 1.0)[0] == HOLDS and judged(0.5, 0.6, 0.4)[0] == FAILS
    assert judged(0.99) == (HOLDS, "a 0.990 (n = 1)")


def test_plots_average_over_seeds_and_read_numbers_out_of_names(tmp_path):
    assert points(ROWS, NAMES, {"x": "lr", "y": "x", "series": "model"})["a"] == [(1, 0.55), (2, pytest.approx(0.85))]
    wide = [{"model": "a", "r@8": 0.5, "r@16": 0.25}]
    plot = {"title": "t", "x": "r@", "series": "model", "log_x": True, "chance": 0.1}
    assert points(wide, ["model"], plot) == {"a": [(8.0, 0.5), (16.0, 0.25)]}
    pytest.importorskip("matplotlib")
    named = {"title": "dots", "dots": "model", "y": "x", "where": {"lr": 1}}
    assert dots(ROWS, NAMES, named)["a"] == (pytest.approx(0.55), pytest.approx(0.635, abs=1e-3))
    draw(wide, ["model"], [plot, plot], tmp_path / "plot.png")
    draw(ROWS, NAMES, [plot | {"x": "lr", "y": "x"}, named], tmp_path / "dots.png")
    assert (tmp_path / "dots.png").stat().st_size > 1000
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_lists_runs_compares_and_writes(tmp_path, monkeypatch, capsys):
    table = {"title": "T", "rows": "features", "values": ["least squares"]}
    claims = [{"text": "it is 4", "value": "least squares", "of": {"features": "identity"}, "at_least": 4}]
    made = experiment(tmp_path, tables=[table], claims=claims)
    (tmp_path / "docs" / "images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce"]) == 0 and "does it?" in capsys.readouterr().out
    assert main(["reproduce", "small", "--keep", "--workers", "1"]) == 0
    assert made.results()[0]["least squares"] == 4
    out = capsys.readouterr().out
    assert "it is 4" in out and "reproduced" in out
    assert main(["reproduce", "--all", "--quick", "--workers", "1"]) == 0
    assert "0 came out again, 0 the other way round" in capsys.readouterr().out  # a level is no order
    assert len(made.results()) == 2  # quick results are elsewhere
    assert main(["reproduce", "--write"]) == 0
    assert "| identity | 4 |" in (tmp_path / "docs" / "results.md").read_text()
    assert main(["reproduce", "smal"]) == 2
    assert "experiment 'smal' is unknown; choose one of small" in capsys.readouterr().err
    assert main(["reproduce", "small", "--quick", "--keep"]) == 2
    assert main(["reproduce", "--root", "nowhere"]) == 2
    assert "run this in a clone" in capsys.readouterr().err


def test_quick_says_how_many_orders_came_out_again_and_claims_none_that_failed(tmp_path, monkeypatch, capsys):
    order = {"text": "more is more", "value": "least squares", "better": {"dim": 4}, "worse": {"dim": 3}}
    runs, features = [{"dim": [3, 4]}], {"features": "identity", "seeds": 1, "degree": 2}
    quick = {"runs": runs}
    experiment(tmp_path, fixed=features, runs=runs, quick=quick, claims=[order])
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "small", "--keep", "--workers", "1"]) == 0
    command = ["reproduce", "small", "--quick", "--workers", "1"]
    assert main(command) == 0 and "1 came out again, 0 the other way round" in capsys.readouterr().out
    experiment(tmp_path, fixed=features, runs=runs, quick=quick | {"fixed": {"features": "magic"}}, claims=[order])
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "failed: small" in out and "0 came out again" in out and "1 more are within noise" in out
    less = [order | {"lower": True, "better": {"dim": 4}, "worse": {"dim": 3}}]
    experiment(tmp_path, fixed=features, runs=runs, quick=quick, claims=less)
    assert main(command) == 0 and "1 came out again" in capsys.readouterr().out  # not reproduced, twice


KEPT = [pytest.param(made, id=made.name) for made in find(None, ROOT)]


@pytest.mark.parametrize("made", KEPT)
def test_kept_results_are_those_of_the_config_and_the_readme_is_made_from_them(made):
    wanted = {made.digest(cell) for cell in made.cells()}
    rows = made.results()
    assert {row["digest"] for row in rows} <= wanted, "run `mnemos reproduce NAME --keep`: the config has changed"
    assert not any("error" in row for row in rows)
    varying = names(made)
    for table in made.config["tables"]:
        assert pivot(rows, varying, table)
    assert made.folder.joinpath("README.md").read_text() == readme(made), "run `mnemos reproduce --write`"
    for cell in [*made.cells(), *made.cells(quick=True)]:
        json.dumps(made.whole(cell))
    assert made.cells(quick=True)


COMPARED, LEVEL = {"better", "worse"}, {"of"}
OF_CLAIMS = {"text", "paper", "value", "lower", "where", "best", "at_least", "at_most"} | COMPARED | LEVEL


@pytest.mark.parametrize("made", KEPT)
def test_claims_and_tables_speak_of_cells_that_are_asked_for(made):
    """A slip of the pen would say "not run" for ever."""
    cells = made.cells()
    for claim in made.config["claims"]:
        assert claim.keys() <= OF_CLAIMS and (claim.keys() >= COMPARED) != (claim.keys() >= LEVEL), claim
        for side in [*(claim[s] for s in COMPARED if s in claim), *(_each(claim["of"]) if "of" in claim else [])]:
            where = claim.get("where", {}) | side
            assert any(matches(cell, where) for cell in cells), (claim["text"], where)
    for table in [*made.config["tables"], *made.config.get("plots", [])]:
        assert any(matches(cell, table.get("where", {})) for cell in cells), table["title"]


@pytest.mark.parametrize("made", KEPT)
def test_no_model_is_called_better_for_having_trained_longer(made):
    assert not any(claim.keys() >= COMPARED and claim.get("best") == "steps" for claim in made.config["claims"])


@pytest.mark.parametrize("made", KEPT)
def test_the_quick_version_asks_for_an_order_of_every_experiment_that_has_one(made):
    orders = [claim for claim in made.config["claims"] if claim.keys() >= COMPARED]
    cells = made.cells(quick=True)

    def asked(claim):
        sides = [claim.get("where", {}) | claim[side] for side in COMPARED]
        return all(any(matches(cell, where) for cell in cells) for where in sides)

    assert not orders or any(map(asked, orders))


def test_every_line_of_the_papers_has_claims_that_are_tested_or_said_not_to_be():
    rest = yaml.safe_load((ROOT / "claims.yaml").read_text())
    assert all(row.keys() == {"text", "paper", "why"} and all(row.values()) for row in rest)
    sources = [claim.get("paper", "") for made in find(None, ROOT) for claim in made.config["claims"]]
    sources += [row["paper"] for row in rest]
    tables = [f"Titans, {x}" for x in ("table 1", "table 2", "table 5", "figure 6", "figure 7", "theorem 4.1")]
    tables += [f"Atlas, {x}" for x in ("table 2", "table 4", "table 5", "table 6", "figure 4", "figure 5", "theorem 1")]
    for named in [*tables, "TNT, table 2", "TNT, figure 2", "Miras", "LaCT", "Memory Caching", "Titans Revisited"]:
        assert any(named in source for source in sources), named


def test_the_page_of_results_is_made_from_the_kept_files():
    written = (ROOT.parent / "docs" / "results.md").read_text()
    assert written == page(find(None, ROOT), ROOT), "run `mnemos reproduce --write`"
