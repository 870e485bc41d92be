"""Suites by name: progress that counts what it said it would, errors that stay with their suite, and examples that train."""

from __future__ import annotations

import json

import pytest
import torch
from oracles import BYTES, uniform

from mnemos.data.tasks import mqar
from mnemos.eval import SUITES, EvalSettings, Evaluator, mqar_suite, run_suites
from mnemos.eval.model_adapter import LanguageModel
from mnemos.eval.suites import Context
from mnemos.models import MnemosForCausalLM, presets


@pytest.mark.parametrize("suite", ["needle", "capacity", "length"])
def test_progress_counts_as_far_as_it_said(suite, tmp_path, text):
    (tmp_path / "t.txt").write_text(text)
    settings = EvalSettings(
        text=str(tmp_path / "t.txt"), lengths=(400, 500), depths=(0.5, 1.0), samples=1, pairs=(1, 3), generate=False
    )
    lm, counted = LanguageModel(uniform(), BYTES), []
    expected = SUITES[suite].work(Context(lm, settings))
    SUITES[suite].run(Context(lm, settings), counted.append)
    assert sum(counted) == expected > 0


def test_a_suite_that_fails_leaves_its_reason_and_the_others_go_on(tmp_path):
    output = tmp_path / "r.json"
    told = []
    settings = EvalSettings(pairs=(1,))
    run_suites(
        uniform(),
        BYTES,
        ["perplexity", "capacity"],
        settings,
        output,
        report=lambda name, what, work: told.append((name, what)),
    )
    found = json.loads(output.read_text())["suites"]
    assert "needs a text" in found["perplexity"]["error"] and found["capacity"]["rows"][0]["pairs"] == 1
    assert told[-1] == ("capacity", "done") and ("perplexity", f"failed: {found['perplexity']['error']}") in told


def test_the_whole_evaluation_in_python_is_kept_in_its_file(tmp_path, text):
    (tmp_path / "t.txt").write_text(text)
    choices = {"text": str(tmp_path / "t.txt"), "lengths": (400,), "samples": 1, "depths": (0.5,), "pairs": (1,)}
    evaluator = Evaluator(uniform())
    found = evaluator.run_full_evaluation(["capacity", "length"], tmp_path / "r.json", **choices)
    assert json.loads((tmp_path / "r.json").read_text()) == found
    evaluator.plot_results(found, tmp_path / "r.svg")
    assert (tmp_path / "r.svg").read_text().lstrip().startswith("<?xml")
    with pytest.raises(ValueError, match="none of the suites that can be plotted"):
        evaluator.plot_results({"suites": {}}, tmp_path / "r.svg")


def test_a_small_model_learns_mqar_from_the_generator_and_the_suite_sees_it():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "memory_heads": 2, "vocab_size": 16}
    model = MnemosForCausalLM(presets.config("deltanet", **sizes))
    before = mqar_suite(model, [(2, 8)], examples=200, seed=1)[0]["accuracy"]
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for step in range(150):
        ids, labels = (torch.from_numpy(x) for x in mqar(64, 8, 2, 16, seed=100 + step).for_language_model())
        optimiser.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimiser.step()
    after = mqar_suite(model.eval(), [(2, 8)], examples=200, seed=1)[0]["accuracy"]
    assert before < 0.3 and after > 0.9, (before, after)


@pytest.mark.parametrize(("old", "new"), [("Settings", "EvalSettings"), ("Decoder", "MADDecoder")])
def test_old_names_still_work_with_a_warning(old, new):
    import mnemos.eval

    with pytest.warns(DeprecationWarning, match=f"mnemos.eval.{old} is called {new} now"):
        assert getattr(mnemos.eval, old) is getattr(mnemos.eval, new)
