"""What can be seen of a run: its record, trackers read back, gates, surprise, the memory gain, needles, runs side by side."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from mnemos.cli import main
from mnemos.data import ByteTokenizer
from mnemos.memory import NeuralMemory
from mnemos.models import MnemosForCausalLM, presets
from mnemos.train import Trainer, export, list_runs
from mnemos.train.display import Display, slow_first_step
from mnemos.train.probes import _memory_numbers, gate_statistics, look_inside, needle
from mnemos.train.telemetry import Metrics, flatten, flops_per_token, open_tracker, read_metrics
from small import losses, small


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs, one of them with everything watched."""
    folder = tmp_path_factory.mktemp("watched")
    watch = {"validate_every": 3, "probe_every": 3, "probe_length": 64, "sample_every": 3, "sample_tokens": 5}
    Trainer(small(folder, name="a", steps=6, watch=watch | {"trackers": ("tensorboard",)})).train()
    Trainer(small(folder, "transformer", name="b", steps=4, watch={"validate_every": 2, "log_every": 2})).train()
    return folder


def test_every_line_of_the_record_is_json_with_its_step(folder):
    records = [json.loads(line) for line in (folder / "runs" / "a" / "metrics.jsonl").read_text().splitlines()]
    assert {r["kind"] for r in records} == {"train", "validate", "probe", "event"}
    train = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in train] == [1, 2, 3, 4, 5, 6] and train[-1]["tokens"] == 6 * 4 * 32
    for key in ("loss", "perplexity", "lr", "grad_norm", "tokens_per_second", "mfu", "peak_memory_mb", "data_wait"):
        assert train[-1][key] >= 0 and math.isfinite(train[-1][key])
    assert 0 < train[-1]["mfu"] < 1 and 0 <= train[-1]["data_wait"] < 1 and train[-1]["peak_memory_mb"] > 50
    assert any(r.get("message") == "first step" and r["seconds"] > 0 for r in records)


def test_validation_records_gates_surprise_and_the_gain_from_learning(folder):
    found = read_metrics(folder / "runs" / "a", "validate")[-1]
    assert found["perplexity"] == pytest.approx(math.exp(found["val_loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["val_loss"] / math.log(2))
    assert sorted(found["layers"]) == ["0", "1"]
    for layer in found["layers"].values():
        assert {"gate", "lr", "momentum", "retain", "surprise_before", "surprise_after"} <= layer.keys()
        assert 0 <= layer["gate"]["near_0"] <= 1 and 0 < layer["retain"]["mean"] <= 1 and 0 < layer["lr"]["mean"] <= 1
        assert layer["surprise_after"] < layer["surprise_before"]  # it has learned what it read
        assert 1 < layer["effective_rank"] <= 16 and layer["distance"] > 0 and layer["relearning"] > 0.2
    memory = found["memory"]
    assert memory["beyond"] == 8 and memory["gain"] == pytest.approx(
        1 - memory["perplexity"] / memory["perplexity_frozen"]
    )
    assert "memory" not in read_metrics(folder / "runs" / "b", "validate")[-1]


def test_the_live_panel_shows_every_number(folder):
    records = read_metrics(folder / "runs" / "a", "train")
    display = Display("a", 6, live=False)
    display.numbers = records[-1] | {"val_loss": 1.5, "bits_per_byte": 2.25, "best": 1.25}
    with display.console.capture() as shown:
        display.console.print(display._panel(), width=80, markup=False)
    for label in ("loss", "perplexity", "lr", "grad norm", "val loss", "bits/byte", "best", "tokens/s", "bad steps"):
        assert f" {label} " in shown.get(), label
    assert f"{records[-1]['loss']:.4f}" in shown.get()


def test_time_left_is_unknown_until_the_second_step_and_leaves_out_the_first():
    display = Display("a", 100, live=False)
    display.start(0)
    display.began -= 60.0  # a minute of compiling
    display.stepped(1)
    assert math.isnan(display.time_left(1)) and "left unknown" in display.line()
    display.first = (1, display.first[1] - 2.0)  # two seconds for two steps
    assert display.time_left(3) == pytest.approx(97.0, rel=0.05)


def test_the_panel_shows_the_reason_for_the_wait_then_losses_and_the_sample():
    display = Display("a", 100, live=False)

    def panel() -> str:
        with display.console.capture() as shown:
            display.console.print(display._panel(), width=100, markup=False)
        return shown.get()

    display.start(0, slow_first_step(compiles=True, has_memory=True, device="cpu"))
    assert "step 0 of 100" in panel() and "torch.compile compiles the blocks" in panel() and "left unknown" in panel()
    display.stepped(1)
    assert "compile" not in panel()
    for step, loss in enumerate([3.0, 2.0, 1.0, math.nan], 1):
        display.update(step, {"loss": loss})
    assert "█▅▁ 3.000 → 1.000" in panel()
    display.sample(4, "so it\x1b[31m goes\nand [bold]on")
    assert "sample at step 4" in panel() and "so it[31m goes" in panel() and "and [bold]on" in panel()


def test_without_a_terminal_a_line_has_the_reason_for_the_wait_and_another_its_end(capsys):
    display = Display("a", 100, live=False)
    display.start(0, slow_first_step(compiles=False, has_memory=True, device="cpu"))
    assert capsys.readouterr().out == "the first step compiles C++ kernels, if this machine has none yet\n"
    display.began -= 62.0
    display.stepped(1)
    display.stepped(2)
    assert capsys.readouterr().out == "the first step is done after 1:02\n"
    Display("b", 100, live=False).start(0)
    assert capsys.readouterr().out == "waiting for the first step\n"


def test_a_sample_is_shown_as_text_without_a_terminal(capsys):
    Display("a", 5, live=False).sample(3, "first line\nsecond \x1b[2Jline")
    assert capsys.readouterr().out == "sample at step 3:\n    first line\n    second [2Jline\n"


def test_tensorboard_files_hold_what_the_record_holds(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "runs" / "a" / "tensorboard"))
    events.Reload()
    shown = {e.step: e.value for e in events.Scalars("train/loss")}
    assert shown == pytest.approx(losses(folder / "runs" / "a"), rel=1e-6)
    assert "validate/layers/0/gate/mean" in events.Tags()["scalars"] and "probe/accuracy" in events.Tags()["scalars"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_trackers_work_offline(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HOME", str(tmp_path))
    result = Trainer(small(tmp_path, steps=2, watch={"trackers": (kind,)})).train()
    assert result.step == 2
    written = [p for p in tmp_path.rglob("*") if p.suffix in (".wandb", ".db", ".parquet", ".sqlite")]
    assert written, list(tmp_path.iterdir())


def test_a_missing_tracker_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"the tracker wandb needs the extra track: pip install 'mnemos\[track\]'"):
        open_tracker("wandb", tmp_path, "a", {})


def test_numbers_that_json_cannot_hold_become_null_and_reach_no_tracker(tmp_path):
    class Seen(list):
        def log(self, step, numbers):
            self.append((step, numbers))

        def close(self):
            pass

    seen = Seen()
    metrics = Metrics(tmp_path, [seen])
    metrics.log(3, "train", loss=math.nan, deep={"a": 1.0, "b": math.inf})
    metrics.close()
    assert read_metrics(tmp_path)[0]["loss"] is None and seen == [(3, {"train/deep/a": 1.0})]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "kind"')  # as a crash leaves it
    assert len(read_metrics(tmp_path)) == 1
    Metrics(tmp_path, [], from_step=3).close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert flatten({"a": {"b": {"c": 1}}}) == {"a/b/c": 1}


def test_gate_statistics_count_the_ends_and_the_middle():
    found = gate_statistics(torch.tensor([0.05, 0.45, 0.55, 0.95, 1.0]))
    assert (found["near_0"], found["near_1"], found["undecided"]) == pytest.approx((0.2, 0.4, 0.4))
    assert found["mean"] == pytest.approx(0.6) and found["min"] == pytest.approx(0.05)


def test_surprise_is_the_inner_loss_before_and_after_the_last_whole_chunk():
    torch.manual_seed(0)
    memory = NeuralMemory(dim=16, heads=1, chunk_size=8, structure="linear", momentum=False, lr_init=0.1)
    x = torch.randn(1, 27, 16)
    with torch.no_grad():
        state = memory.write(x[:, :3])
        found = _memory_numbers(memory, x[:, 3:], state)  # tokens 3 … 26: the last whole chunk is 16 … 23
        _, _, trace = memory(x, trace=True)
    assert found["surprise_before"] == pytest.approx(trace.surprise[:, 16:24].mean().item(), rel=1e-4)
    assert found["surprise_after"] < found["surprise_before"]


def test_a_state_that_training_carries_is_watched_too(tmp_path):
    config = small(tmp_path, steps=6, data={"carry_state": True}, watch={"validate_every": 3})
    layers = read_metrics(Trainer(config).train().path, "validate")[-1]["layers"]
    for layer in layers.values():
        assert 1 <= layer["carried_rank"] <= 16 and 32 <= layer["carried_tokens"] <= 6 * 32 + 4


@pytest.mark.parametrize("preset", presets.names())
def test_every_preset_can_be_looked_into(preset):
    model = MnemosForCausalLM(presets.config(preset, "nano", num_hidden_layers=1)).eval()
    ids = torch.randint(1, 256, (2, 140))
    found = look_inside(model, model, {"input_ids": ids, "labels": ids})
    assert bool(found) == (preset not in ("transformer", "swa"))
    assert flops_per_token(model, 140) > 2 * sum(p.numel() for p in model.parameters())


def test_a_needle_is_scored_on_its_answer_alone():
    """A reader that copies what follows the fact finds every needle; one that knows no fact finds none."""
    tokenizer = ByteTokenizer()
    fact, width = tokenizer.encode(" The secret number is "), 5

    def reader(knows: bool):
        def call(input_ids, attention_mask, use_cache, logits_to_keep):
            logits = torch.zeros(*input_ids.shape, 256)
            for row, ids in enumerate(input_ids.tolist()):
                first = next(i for i in range(len(ids)) if ids[i : i + len(fact)] == fact)
                digits = ids[first + len(fact) : first + len(fact) + width]
                for i, digit in enumerate(digits):
                    logits[row, len(ids) - width - 1 + i, digit if knows else 32] = 9.0
            return type("Output", (), {"logits": logits[:, -logits_to_keep:]})

        return call

    haystack = torch.tensor(tokenizer.encode("all that hay and nothing else " * 40))
    right = needle(reader(True), tokenizer, haystack, 200, "cpu")
    assert right["accuracy"] == right["exact"] == 1.0 and right["gain"] > 3
    wrong = needle(reader(False), tokenizer, haystack, 200, "cpu")
    assert wrong["accuracy"] == wrong["exact"] == 0.0 and wrong["gain"] == pytest.approx(0, abs=1e-5)


def test_samples_and_probes_leave_the_random_numbers_of_training_alone(folder):
    plain = small(folder, name="plain", steps=6)
    Trainer(plain).train()
    assert losses(folder / "runs" / "plain") == losses(folder / "runs" / "a")
    texts = [json.loads(line) for line in (folder / "runs" / "a" / "samples.jsonl").read_text().splitlines()]
    assert [t["step"] for t in texts] == [3, 6] and all(t["text"].startswith("the") for t in texts)


def test_runs_are_listed_and_compared_in_a_table_and_a_plot(folder, capsys):
    assert [r.name for r in list_runs(folder / "runs")][:2] == ["a", "b"]
    assert main(["runs", "a", "b", "--folder", str(folder / "runs"), "--plot", str(folder / "p.png")]) == 0
    shown = capsys.readouterr().out
    best = read_metrics(folder / "runs" / "a", "validate")[-1]["val_loss"]
    assert "titans-mag nano" in shown and "transformer nano" in shown and f"{best:.4f}" in shown
    assert (folder / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["runs", str(folder / "runs" / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4
    assert main(["runs", "--folder", str(folder / "none")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_run_is_exported_with_its_tokenizer_and_generates_the_same(folder, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, out = str(folder / "runs" / "a"), str(folder / "out")
    assert main(["export", run, out]) == 0
    assert json.loads((folder / "out" / "config.json").read_text())["use_cache"] is True
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    ids = tokenizer("the memory", return_tensors="pt").input_ids
    assert ids.tolist() == [list(b"the memory")]
    text = tokenizer.decode(model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)[0])
    capsys.readouterr()
    for source in (run, out):
        assert main(["generate", source, "--prompt", "the memory", "--max-tokens", "9", "--temperature", "0"]) == 0
        assert capsys.readouterr().out.rstrip("\n") == text.rstrip("\n")
    assert main(["generate", run, "--samples", "2", "--max-tokens", "3", "--seed", "1"]) == 0
    assert len(capsys.readouterr().out) >= 2
    with pytest.raises(ValueError, match="exists already"):
        export(run, out)
    assert main(["export", run, str(folder / "out2"), "--checkpoint", "4"]) == 2
    assert "checkpoint='4' does not exist; choose best, last or one of" in capsys.readouterr().err
    assert main(["export", run, str(folder / "out3"), "--average"]) == 2
    assert main(["generate", str(folder)]) == 2
    assert "neither a run" in capsys.readouterr().err


def test_the_command_trains_and_says_what_is_next(tmp_path, capsys, monkeypatch):
    config = small(tmp_path, steps=2)
    config.save(tmp_path / "c.yaml")
    monkeypatch.chdir(tmp_path)
    assert (
        main(["train", "--config", "c.yaml", "--folder", "runs", "--name", "new", "--watch.validate-every", "1"]) == 0
    )
    shown = capsys.readouterr().out
    assert "step 2/2" in shown and "mnemos generate runs/new" in shown and "left" in shown
    assert main(["train", "--config", "runs/new/config.yaml", "--name", "again"]) == 0
    assert losses(tmp_path / "runs" / "again") == losses(tmp_path / "runs" / "new")
    assert main(["train", "--config", "c.yaml", "--folder", "runs", "--name", "new"]) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert main(["train", "--preset", "titan"]) == 2
    assert "preset 'titan' is unknown" in capsys.readouterr().err
