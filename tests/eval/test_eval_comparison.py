"""`mnemos eval a b c`: one table of several models, with parameters and training tokens."""

from __future__ import annotations

import json

import pytest
import torch

from mnemos.cli import main
from mnemos.eval.comparison import compare, short_names, training_tokens
from mnemos.models import MnemosForCausalLM, presets
from mnemos.train import Trainer
from small import small

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "memory_heads": 1, "num_attention_heads": 2}
TEXT = "The senate met early. It spoke of roads and of the army! Was peace at hand? Letters came. " * 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trained run, and two saved models, one of them without a memory."""
    folder = tmp_path_factory.mktemp("models")
    Trainer(small(folder, steps=4, checkpoint={"every": 2}, watch={"validate_every": 2})).train()
    torch.manual_seed(0)
    for name, preset in (("b", "titans-lmm"), ("c", "transformer")):
        MnemosForCausalLM(presets.config(preset, **SHAPE)).save_pretrained(folder / name)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def comparison(folder):
    """The file of `mnemos eval`, and what it printed."""
    flags = ["--suite", "perplexity", "capacity", "--pairs", "2", "--text", str(folder / "text.txt")]
    paths = [str(folder / "runs" / "a"), str(folder / "b"), str(folder / "c")]
    assert main(["eval", *paths, *flags, "--output", str(folder / "all.json")]) == 0
    return json.loads((folder / "all.json").read_text())


def test_every_model_has_a_row_with_its_size_and_the_tokens_of_its_training(folder, comparison):
    found = compare(comparison["models"])
    assert found.heads() == [
        "model", "parameters", "training tokens", "bits per byte", "learning gain", "recall of 2 facts",
    ]  # fmt: skip
    rows = {row[0]: dict(zip(found.heads(), row)) for row in found.rows()}
    state = json.loads((folder / "runs" / "a" / "checkpoints" / "step-000004" / "state.json").read_text())
    assert training_tokens(folder / "runs" / "a", "last") == state["tokens"] == 4 * 4 * 32
    assert rows["a"]["training tokens"] in ("256", "512") and rows["b"]["training tokens"] == "-"
    count = presets.count(presets.config("transformer", **SHAPE))
    assert rows["c"]["parameters"] == f"{count:,}" and rows["c"]["learning gain"] == "-"
    learning, frozen = (
        next(r["perplexity"] for r in comparison["models"]["b"]["suites"]["perplexity"]["rows"] if r["memory"] == kind)
        for kind in ("learning", "frozen")
    )
    assert rows["b"]["learning gain"].removesuffix(" *") == f"{100 * (1 - learning / frozen):.1f} %"
    bits = {name: found.cells[name]["bits per byte"].value for name in "abc"}
    assert rows[min(bits, key=bits.__getitem__)]["bits per byte"].endswith(" *")
    assert sum(row["bits per byte"].endswith(" *") for row in rows.values()) == 1


def test_each_model_keeps_its_own_results_which_are_reused(folder, comparison, capsys):
    own = json.loads((folder / "b" / "eval.json").read_text())
    assert own["suites"] == comparison["models"]["b"]["suites"] and own["parameters"]
    own["suites"]["capacity"]["rows"][0]["recall"] = 0.123
    (folder / "b" / "eval.json").write_text(json.dumps(own))
    flags = ["--suite", "perplexity", "capacity", "--pairs", "2", "--text", str(folder / "text.txt")]
    assert main(["eval", str(folder / "b"), str(folder / "c"), *flags, "--output", str(folder / "all.json")]) == 0
    printed = capsys.readouterr().out
    assert "12.3 %" in printed and "the best of a column" in printed and "training tokens" in printed
    page = (folder / "all.html").read_text()
    assert "12.3 %" in page and "<script" not in page and "http:" not in page


def test_names_of_models_are_escaped_in_the_page(comparison):
    from mnemos.report.results import comparison_page

    page = comparison_page({"<b>x</b>": comparison["models"]["b"], "c": comparison["models"]["c"]})
    assert "<b>x" not in page and "&lt;b&gt;x" in page


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["b", "c", "--plot", "x.png"], "take one model"),
        (["b", "c", "--watch", "1"], "take one model"),
        (["b", "b"], "every model may be named once"),
        (["b", "c", "--output", "text.txt"], "text.txt is not a results file"),
        (["b", "c", "--output", "none/x.json"], "give a file in an existing folder"),
        ([], "name at least one model"),
    ],
)
def test_impossible_comparisons_are_one_sentence(folder, flags, message, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["eval", *flags, "--suite", "capacity"]) == 2
    assert message in capsys.readouterr().err
    assert (folder / "text.txt").read_text() == TEXT


def test_models_of_one_name_are_shown_by_their_paths():
    assert short_names(["x/a", "y/a", "z/b"]) == ["x/a", "y/a", "b"]
