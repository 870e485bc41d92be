"""Gate polarisation where there is a gate to polarise, and where there is none."""

from __future__ import annotations

import pytest
import torch

from mnemos.train import Trainer
from mnemos.train.losses import polarisation_loss
from mnemos.train.telemetry import read_metrics
from small import SET, events, losses, small


@pytest.mark.parametrize("preset, extra", [("titans-mag", ("memory_layers=[]",)), ("titans-lmm", ()), ("swa", ())])
def test_a_model_without_gates_trains_as_without_polarisation_and_says_so(tmp_path, preset, extra):
    found = {}
    for strength in (0.0, 0.1):
        config = small(tmp_path, preset, steps=2, name=f"a{strength}", loss={"polarisation": strength})
        config.model.set = (*SET[:-1], *(() if preset == "swa" else ("memory={heads: 2, chunk_size: 8}",)), *extra)
        result = Trainer(config).train()
        found[strength] = losses(result.path)
        said = [event for event in events(result.path).splitlines() if "polarisation" in event]
        assert len(said) == (1 if strength else 0)
        assert all("has no effect" in event for event in said)
    assert found[0.0] == found[0.1]


def test_a_model_with_gates_is_polarised_without_a_warning(tmp_path):
    config = small(tmp_path, "titans-mag", steps=2, loss={"polarisation": 0.1})
    config.model.set = (*config.model.set, "gate_mode=convex")
    result = Trainer(config).train()
    assert "no effect" not in events(result.path)
    assert read_metrics(result.path, "train")[-1]["polarisation"] > 0.5


def test_no_gates_have_no_loss():
    assert polarisation_loss([]).item() == 0.0
    assert polarisation_loss([torch.tensor([0.5])]).item() == 1.0
