"""The model card that `mnemos export` writes: its numbers are those of the run, and text of a stranger stays text."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil

import pytest
import yaml

from mnemos.cli import main
from mnemos.models.fingerprint import fingerprint
from mnemos.train import Trainer, export, load_model
from mnemos.train.telemetry import read_metrics
from small import small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("carded")
    Trainer(small(folder, name="a", steps=4, watch={"validate_every": 2})).train()
    return folder / "runs" / "a"


def results(weights: str, rows: list) -> str:
    return json.dumps({"format": "mnemos.eval/1", "model": {"weights": weights}, "suites": {"needle": {"rows": rows}}})


def card_of(run, out) -> str:
    return (export(run, out, checkpoint="last") / "README.md").read_text()


def test_the_card_has_the_preset_size_data_tokens_and_validation_of_the_run(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "out"), "--checkpoint", "last"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["library_name"] == "mnemos" and "titans-mag" in front["tags"] and "license" not in front
    count = sum(p.numel() for p in load_model(run, "last").parameters())
    assert f"| parameters | {count:,} |" in body
    config = json.loads(next((run / "checkpoints").glob("*4/state.json")).read_text())["config"]
    tokens = 4 * config["data"]["batch_size"] * config["data"]["seq_len"]
    assert f"| tokens | {tokens:,} |" in body and "| steps | 4 |" in body
    loss = read_metrics(run, "validate")[-1]["val_loss"]
    assert f"| validation loss, nats per token | {loss:.4f} |" in body
    assert f"{tokens / count:.3g} tokens per parameter; compute-optimal training takes about 20" in body
    assert "Not evaluated" in body and "## Limits" in body


def test_the_code_of_the_card_runs_in_its_folder(run, tmp_path, monkeypatch):
    card = card_of(run, tmp_path / "out")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(tmp_path / "out")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().startswith("The ")


def test_a_model_over_ids_is_used_without_a_tokenizer(run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "tokenizer")
    card = card_of(tmp_path / "b", tmp_path / "out")
    assert "AutoTokenizer" not in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(tmp_path / "out")
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_results_are_shown_only_for_the_weights_they_were_measured_on(run, tmp_path):
    shutil.copytree(run, tmp_path / "b")
    rows = [{"task": "passkey", "length": 1000, "likelihood": 0.25, "generated": 0.5}]
    (tmp_path / "b" / "eval.json").write_text(results("0" * 16, rows))
    assert "Not evaluated" in card_of(tmp_path / "b", tmp_path / "one")
    (tmp_path / "b" / "eval.json").write_text(results(fingerprint(load_model(run, "last")), rows))
    card = card_of(tmp_path / "b", tmp_path / "two")
    assert "### needle" in card and "| passkey | 1,000 | 0.25 |" in card and "Not evaluated" not in card


@pytest.mark.parametrize("damage", ["not json", "[]", '{"model": 3, "suites": 4}', "[" * 100_000])
def test_damaged_results_leave_the_card_without_them(run, tmp_path, damage):
    shutil.copytree(run, tmp_path / "b")
    (tmp_path / "b" / "eval.json").write_text(damage)
    assert "Not evaluated" in card_of(tmp_path / "b", tmp_path / "out")


def test_text_of_a_stranger_stays_text_and_folders_of_the_machine_are_left_out(run, tmp_path):
    shutil.copytree(run, tmp_path / "b")
    (path,) = (tmp_path / "b" / "checkpoints").glob("*4/state.json")
    state = json.loads(path.read_text())
    hostile = "evil\n---\nlicense: mit\n# <script>alert(1)</script> | `x` [click](https://example.org)"
    state["config"]["model"] |= {"preset": hostile, "set": [hostile, 3]}
    state["config"]["data"] |= {"sources": ["/home/ann/secret/notes.txt", "owner/name", hostile], "batch_size": "many"}
    state["tokens"] = "many"
    path.write_text(json.dumps(state))
    rows = [{"task": hostile, hostile: 1.0, "length": float("inf")}, "no row"]
    (tmp_path / "b" / "eval.json").write_text(results(fingerprint(load_model(run, "last")), rows))
    from mnemos.train.model_card import model_card

    card = model_card(tmp_path / "b", path.parent, load_model(run, "last"))
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["datasets"] == ["owner/name"] and front.keys() == {"library_name", "pipeline_tag", "tags", "datasets"}
    assert "ann" not in card.replace("many", "") and "`notes.txt`" in card
    assert "<" not in card and "](" not in card and card.count("\n---\n") == 1
    assert "\n# evil" not in card and "`custom`" in card and "not recorded" in card


def test_the_card_of_averaged_weights_says_so_and_claims_no_validation(tmp_path):
    Trainer(small(tmp_path, name="e", steps=2, optim={"ema": 0.9}, watch={"validate_every": 1})).train()
    card = (export(tmp_path / "runs" / "e", tmp_path / "out", "last", average=True) / "README.md").read_text()
    assert "| steps | 2, average of the weights |" in card and "validation loss" not in card
