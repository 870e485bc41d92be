"""Every preset with a finite memory learns a chunk after 100,000 tokens as it does when fresh, untrained and after a short training."""

from __future__ import annotations

import pytest
import torch

from mnemos.data import ByteTokenizer
from mnemos.eval import vitality_suite
from mnemos.memory import NeuralMemoryConfig
from mnemos.models import MnemosForCausalLM, presets
from mnemos.trials import TrialConfig, train
from mnemos.trials.text import corpus, rows
from vitality_cases import DIM, DYING_TRAINED, DYING_UNTRAINED, HEADS, LEAST, each_preset

TOKENS, STEPS, ROWS, ROW = 100_000, 60, 4, 512


def model_of(name: str, memory: NeuralMemoryConfig) -> MnemosForCausalLM:
    torch.manual_seed(0)
    small = {"hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": HEADS, "memory_heads": HEADS}
    return MnemosForCausalLM(presets.config(name, "nano", memory_retention=memory.retention, **small))


def relearned(model: MnemosForCausalLM) -> float:
    text, held_out = corpus("embedded")
    row = vitality_suite(model, ByteTokenizer(), held_out[:ROW], text[:TOKENS], [TOKENS])[0]
    return row["relearning"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "memory"), each_preset(DYING_UNTRAINED))
def test_an_untrained_model_relearns_after_100_000_tokens(name, memory):
    assert relearned(model_of(name, memory)) > LEAST


@pytest.mark.slow
@pytest.mark.parametrize(("name", "memory"), each_preset(DYING_TRAINED))
def test_a_trained_model_relearns_after_100_000_tokens(name, memory):
    model, text = model_of(name, memory), corpus("embedded")[0]

    def batch(step: int):
        ids = rows(text, ROWS, ROW, step)
        return ids, ids

    train(model, TrialConfig(STEPS, 3e-3, batch))
    assert relearned(model) > LEAST
