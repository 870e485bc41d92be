"""`mnemos ablate`: each ablation switches off what it says, cells are kept, and the intervals are Student's."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers import run_here
from mnemos.ablate import ABLATIONS, TASKS, AblationSettings, applicable, run, student_t, summary
from mnemos.ablate import runner as runner_module
from mnemos.ablate.cell import model_config, run_cell
from mnemos.ablate.grid import FULL
from mnemos.ablate.plot import plot
from mnemos.cli import main
from mnemos.models import MnemosForCausalLM, presets
from mnemos.trials.text import documents_corpus

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "memory_heads": 1, "memory_key_dim": 4, "memory_chunk_size": 8}
TINY = AblationSettings(
    preset="atlas", overrides=SMALL, length=16, pairs=2, vocab_size=16, steps=2, batch_size=2, examples=4
)


def names(model) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def test_atlas_has_all_choices_and_a_transformer_none():
    assert applicable(presets.config("atlas-interval")) == list(ABLATIONS) and len(ABLATIONS) == 8
    assert applicable(presets.config("atlas")) == [name for name in ABLATIONS if name != "no-momentum"]
    assert applicable(presets.config("transformer")) == []


@pytest.mark.parametrize("name", ABLATIONS)
@pytest.mark.parametrize("preset", ["atlas-interval", "atlas", "atlas-mag", "atlas-mac"])
def test_an_ablation_switches_off_its_own_choice_and_no_other(preset, name):
    if name not in applicable(presets.config(preset)):
        preset = "atlas-interval"
    settings = vars(TINY) | {"preset": preset, "overrides": {}}
    full, changed = model_config(settings, FULL), model_config(settings, name)
    if name == "no-memory":
        assert not changed.has_memory and full.has_memory
        assert not any("memory" in parameter for parameter in names(MnemosForCausalLM(changed)))
        return
    before, after = full.memory_config, changed.memory_config
    fields = [one.name for one in dataclasses.fields(before)]
    differing = {field for field in fields if getattr(before, field) != getattr(after, field)}
    expected = {
        "no-polynomial": {"features", "key_dim"},
        "gd": {"rule"},
        "shallow": {"structure"},
        "window-1": {"window"},
        "no-gates": {"gate"},
        "no-momentum": {"momentum"},
        "no-forgetting": {"retain"},
    }
    assert differing == expected[name]
    assert full.blocks == changed.blocks


def test_a_window_of_one_drops_the_gates_over_lags_too():
    settings = vars(TINY) | {"overrides": {"memory_gate": "token*decay"}}
    assert model_config(settings, "window-1").memory_config.gate == "token"


def test_an_ablation_that_changes_nothing_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"'gd' .* changes nothing in this model; there are shallow, no-memory"):
        model_config(vars(TINY) | {"preset": "titans-lmm", "overrides": {}}, "gd")
    with pytest.raises(ValueError, match="'no-fun' is unknown; choose from no-polynomial"):
        model_config(vars(TINY), "no-fun")


@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_and_scores(task):
    settings = vars(TINY) | {"task": task, "length": 64}
    result = run_cell(settings, "window-1", seed=0)
    assert result["bad_steps"] == 0 and math.isfinite(result["score"])
    assert 0 <= result["score"] <= 1 or task == "text"
    if task == "text":
        assert 7 < result["score"] < 9  # bits per byte, hardly trained


def test_seeds_share_their_batches_between_ablations_and_no_batch_is_tested_on():
    task, chosen = TASKS["mqar"], vars(TINY)
    first, again = task.train(chosen, 7, 3), task.train(chosen, 7, 3)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], task.train(chosen, 8, 3)[0])
    assert run_cell(chosen, FULL, 0)["score"] == run_cell(chosen, FULL, 0)["score"]


def test_the_quantile_of_students_t_is_that_of_the_tables():
    for freedom, expected in ((1, 12.7062), (2, 4.30265), (3, 3.18245), (9, 2.26216), (30, 2.04227)):
        assert student_t(0.95, freedom) == pytest.approx(expected, abs=1e-4)
    assert student_t(0.99, 5) == pytest.approx(4.03214, abs=1e-4)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 4, generator=generator, dtype=torch.float64) * 3 + 1
    half = student_t(0.95, 3) * draws.std(dim=1) / 2
    covered = ((draws.mean(1) - 1).abs() <= half).double().mean().item()
    assert 0.935 < covered < 0.965


def test_differences_are_taken_seed_by_seed():
    cells = [
        {"ablation": name, "seed": seed, "score": score, "parameters": 1, "seconds": 1.0, "bad_steps": 0}
        for name, scores in (("full", (0.5, 0.9)), ("gd", (0.4, 0.8)))
        for seed, score in enumerate(scores)
    ]
    full, gd = summary([*cells, {"ablation": "gd", "seed": 2, "error": "it failed"}])
    assert gd["difference"] == pytest.approx(-0.1) and gd["difference_interval"] == pytest.approx(0, abs=1e-9)
    assert full["score_interval"] > 2 and "difference" not in full
    assert gd["failed"] == 1 and gd["errors"] == ["it failed"]


def test_cells_run_in_processes_and_are_not_run_again(tmp_path, monkeypatch):
    seen = []
    results = run(TINY, tmp_path, ["gd"], seeds=2, workers=2, report=seen.append)
    assert [(r["ablation"], r["seed"]) for r in results] == [("full", 0), ("gd", 0), ("full", 1), ("gd", 1)]
    assert len(seen) == 4
    assert results[1] == json.loads((tmp_path / "results.jsonl").read_text().splitlines()[seen.index(results[1])])
    assert results[0]["score"] == run_cell(vars(TINY), "full", 0)["score"]  # another process, the same numbers

    monkeypatch.setattr(runner_module, "_run_cells", lambda *a: pytest.fail("nothing is missing"))
    assert run(TINY, tmp_path, ["gd"], seeds=2) == results


def test_only_what_is_missing_is_run_and_a_failed_cell_is_tried_again(tmp_path, monkeypatch):
    asked = []

    def pretend(settings, cells, workers, path, results, report):
        asked.append(cells)
        kept = [r for r in results if (r["ablation"], r["seed"]) not in cells]
        results[:] = [*kept, *({"ablation": name, "seed": seed, "error": "no"} for name, seed in cells)]
        runner_module.write_text(path, "".join(json.dumps(r) + "\n" for r in results))

    monkeypatch.setattr(runner_module, "_run_cells", pretend)
    run(TINY, tmp_path, ["gd"], seeds=1)
    good = {"ablation": "full", "seed": 0, "score": 1.0, "parameters": 1, "seconds": 1.0, "bad_steps": 0}
    (tmp_path / "results.jsonl").write_text(json.dumps(good) + "\n" + '{"ablation": "gd", "seed": 0, "error": "no"}\n')
    run(TINY, tmp_path, ["gd", "shallow"], seeds=2)
    assert asked[1] == [("gd", 0), ("shallow", 0), ("full", 1), ("gd", 1), ("shallow", 1)]


def test_a_folder_of_other_settings_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "_run_cells", lambda *a: a[4].extend([{"ablation": "full", "seed": 0}]))
    run(TINY, tmp_path, [], seeds=1)
    with pytest.raises(ValueError, match=r"holds an ablation with steps=2 \(now 3\); choose another folder"):
        run(AblationSettings(**vars(TINY) | {"steps": 3}), tmp_path, [], seeds=1)


def test_bad_settings_are_sentences_before_anything_runs(tmp_path):
    for change, sentence in (
        ({"task": "chess"}, "task='chess' is unknown; choose one of mqar"),
        ({"steps": 0}, "steps=0 must be a whole number >= 1"),
        ({"length": 6}, "must be even and at least 4"),
        ({"lr": 0.0}, "lr=0.0 must be > 0"),
        ({"preset": "atls"}, "preset 'atls' is unknown"),
    ):
        with pytest.raises(ValueError, match=sentence):
            run(AblationSettings(**vars(TINY) | change), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_command_prints_a_table_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner_module, "run_all", run_here)
    arguments = ["ablate", "--preset", "titans-lmm", "--steps", "2", "--batch-size", "2", "--examples", "4"]
    arguments += ["--length", "16", "--pairs", "2", "--vocab-size", "16", "--seeds", "2", "--workers", "1"]
    arguments += ["--set", "hidden_size=16", "num_hidden_layers=1", "memory_heads=1", "--ablations", "no-momentum"]
    assert main([*arguments, "--output", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert "no-momentum" in printed and "±" in printed and "higher is better" in printed
    assert (tmp_path / "a" / "ablation.png").stat().st_size > 5000 or "Not drawn" in printed
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["rows"][1]["seeds"] == 2
    assert main([*arguments, "--output", str(tmp_path / "a"), "--lr", "0.1"]) == 2
    assert "lr=0.003 (now 0.1)" in capsys.readouterr().err


def test_rows_without_an_interval_or_a_score_are_drawn_or_left_out(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"ablation": "full", "score": 0.5, "score_interval": None, "scores": [0.5]},
        {"ablation": "gd", "scores": [], "failed": 1},
    ]
    plot(rows, tmp_path / "x.png", "t", "accuracy", 0.1)
    assert (tmp_path / "x.png").stat().st_size > 3000


def children(pid: int) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(entry.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_workers_end_when_the_run_is_killed(tmp_path):
    overrides = [f"{name}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "mnemos", "ablate", "--preset", "atlas", "--ablations", "gd", "--seeds", "1"]
    command += ["--length", "16", "--pairs", "2", "--vocab-size", "16", "--batch-size", "2", "--examples", "4"]
    command += ["--steps", "3000", "--workers", "2", "--output", str(tmp_path), "--set", *overrides]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(workers := children(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert len(workers) == 2
    time.sleep(10)  # they import torch first
    process.kill()
    process.wait()
    while (left := {pid for pid in workers if Path(f"/proc/{pid}").exists()}) and time.monotonic() < deadline + 20:
        time.sleep(0.5)
    assert not left
    assert json.loads((tmp_path / "settings.json").read_text())["steps"] == 3000


# ---- text of the user


def my_text(folder: Path) -> Path:
    (folder / "my-text").mkdir()
    (folder / "my-text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (folder / "my-text" / "b.jsonl").write_text(json.dumps({"text": "pack my box with five dozen liquor jugs. " * 60}))
    return folder / "my-text"


def test_ablations_read_the_users_own_text_and_score_the_part_that_is_held_out(tmp_path):
    place = str(my_text(tmp_path))
    settings = vars(TINY) | {"task": "text", "data": [place]}
    whole = "the quick brown fox jumps over the lazy dog. " * 60 + "pack my box with five dozen liquor jugs. " * 60
    learn, held_out = (bytes(part.astype("uint8")).decode() for part in documents_corpus((place,)))
    assert learn + held_out == whole and len(held_out) == len(whole) - len(whole) * 19 // 20
    ids, labels = TASKS["text"].train(settings, 0, 5)
    assert torch.equal(ids, labels) and all(bytes(row.tolist()).decode() in learn for row in ids)
    torch.manual_seed(0)
    model = MnemosForCausalLM(model_config(settings, FULL)).eval()
    other = settings | {"data": []}
    assert TASKS["text"].score(settings, model, 4) != TASKS["text"].score(other, model, 4)


def test_the_command_ablates_on_a_folder_of_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner_module, "run_all", run_here)
    my_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = [
        "--preset",
        "atlas",
        "--data",
        "my-text",
        "--length",
        "16",
        "--steps",
        "2",
        "--seeds",
        "1",
        "--workers",
        "1",
    ]
    flags += [
        "--batch-size",
        "2",
        "--examples",
        "4",
        "--ablations",
        "shallow",
        "--set",
        *(f"{k}={v}" for k, v in SMALL.items()),
    ]
    assert main(["ablate", *flags]) == 0
    assert "atlas on my-text, 2 steps: bits per byte" in capsys.readouterr().out
    folder = tmp_path / "ablations" / "atlas-my-text"
    recorded = json.loads((folder / "settings.json").read_text())
    assert recorded["data"] == ["my-text"] and recorded["task"] == "text"
    (tmp_path / "my-text" / "a.txt").write_text("something else, written later. " * 99)
    assert main(["ablate", *flags]) == 2
    assert "data_version" in capsys.readouterr().err


def test_impossible_texts_are_one_sentence(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("so it goes")
    assert main(["ablate", "--data", str(tmp_path / "short.txt")]) == 2
    assert "but both parts must be longer than length=64" in capsys.readouterr().err
    assert main(["ablate", "--data", str(tmp_path / "none.txt")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["ablate", "--task", "mqar", "--data", str(tmp_path / "short.txt")]) == 2
    assert "the task is mqar" in capsys.readouterr().err


def test_folders_of_versions_without_data_are_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "run_all", run_here)
    run(TINY, tmp_path / "a", ["shallow"], seeds=1, workers=1)
    settings = json.loads((tmp_path / "a" / "settings.json").read_text())
    del settings["data"]
    (tmp_path / "a" / "settings.json").write_text(json.dumps(settings))
    seen = []
    run(TINY, tmp_path / "a", ["shallow"], seeds=1, workers=1, report=seen.append)
    assert seen == []
