"""The gain from learning at test time, where users see it: it is negative for a model whose writing does harm."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mnemos.cli import main
from mnemos.memory.freeze import frozen_memory
from mnemos.models import MnemosForCausalLM, presets
from mnemos.report.analyze import analyze
from mnemos.train import Trainer
from mnemos.train.display import Display
from mnemos.train.hooks import memory_off
from mnemos.train.probes import learning_gain
from mnemos.train.telemetry import read_metrics
from small import small


class Alone:
    """One process."""

    def sum(self, numbers):
        return numbers


@pytest.fixture(scope="module")
def harmed(tmp_path_factory):
    """A run whose model was trained without writes, and is validated once with writes of a large rate: they disturb what it learned."""
    folder = tmp_path_factory.mktemp("harmed")
    choices = {"steps": 40, "optim": {"lr": 1e-2}, "watch": {"validate_every": 41}}
    trainer = Trainer(small(folder, **choices))
    with frozen_memory(trainer.model):
        trainer.train()
    choices = {"steps": 41, "optim": {"lr": 1e-9}, "watch": {"validate_every": 41}}
    again = Trainer(small(folder, **choices), resume=True)
    again.train()
    return again


def test_a_model_whose_writing_harms_has_a_negative_gain(harmed):
    batches = [harmed.stepper.to_device(b) for b in harmed.data.validation]
    with harmed.validator.evaluating():
        found = learning_gain(harmed.model, harmed.spread.call, batches, harmed.world)
        with frozen_memory(harmed.model):
            frozen = _perplexity(harmed.model, batches, 8)
        with memory_off(harmed.model), frozen_memory(harmed.model):
            off = _perplexity(harmed.model, batches, 8)
    assert found is not None and found["perplexity_frozen"] == pytest.approx(frozen, rel=1e-4)
    assert found["gain"] < -0.005
    assert off > 1.01 * frozen  # turning the trained path off costs, although its writing harms: another number


def test_the_panel_runs_and_analyze_show_the_same_negative_gain(harmed, capsys):
    gain = read_metrics(harmed.path, "validate")[-1]["memory"]["gain"]
    assert gain < -0.005
    display = Display("a", 41, live=False)
    display.numbers = {"step": 41, "learning_gain": gain}
    with display.console.capture() as shown:
        display.console.print(display._panel(), width=80, markup=False)
    assert f"learning gain {gain:+.1%}" in shown.get()
    main(["runs", str(harmed.path), "--json"])
    assert json.loads(capsys.readouterr().out)["learning_gain"] == gain
    main(["runs", str(harmed.path)])
    table = capsys.readouterr().out
    assert "learning gain" in table and f"{gain:+.1%}" in table
    found = analyze(harmed.path, checkpoints=False)
    assert found.summary["learning_gain"] == gain
    assert "Learning at test time does harm" in [finding.title for finding in found.findings]


def test_a_model_without_attention_is_measured_on_all_tokens():
    model = MnemosForCausalLM(presets.config("titans-lmm", hidden_size=32, num_hidden_layers=1, memory_heads=2)).eval()
    batch = {"input_ids": torch.arange(60).view(1, 60)}
    batch["labels"] = batch["input_ids"]
    found = learning_gain(model, model, [batch], Alone())
    assert found is not None and found["beyond"] == 0
    assert found["perplexity"] == pytest.approx(_perplexity(model, [batch], 0), rel=1e-4)


def test_models_without_a_memory_have_no_gain():
    model = MnemosForCausalLM(presets.config("transformer", hidden_size=32, num_hidden_layers=1)).eval()
    assert learning_gain(model, model, [], Alone()) is None


@torch.no_grad()
def _perplexity(model, batches, window: int) -> float:
    """Over targets whose position exceeds the window."""
    losses = []
    for batch in batches:
        ids = batch["input_ids"]
        log_p = model(ids, use_cache=False).logits.float().log_softmax(-1)
        losses.append(-log_p[:, window:-1].gather(-1, ids[:, window + 1 :, None]).flatten())
    return math.exp(torch.cat(losses).mean().item())
