"""Accuracy over ids: MQAR and MAD, with a model that looks things up and with one that never does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mnemos.data.tasks import MAD_TASKS, Examples, mad
from mnemos.eval import MADDecoder, accuracy, mad_score, mqar_suite
from mnemos.models import MnemosForCausalLM, presets


class Induction:
    """Says what stood behind the first occurrence of the token it reads."""

    def __init__(self, vocab_size: int):
        self.config = SimpleNamespace(vocab_size=vocab_size)

    def __call__(self, input_ids, use_cache=False):
        said = torch.zeros_like(input_ids)
        for row, out in zip(input_ids.tolist(), said):
            behind = {}
            for t, token in enumerate(row):
                out[t] = behind.get(token, 0)
                if t + 1 < len(row):
                    behind.setdefault(token, row[t + 1])
        return SimpleNamespace(logits=F.one_hot(said, self.config.vocab_size).float())


class Constant:
    """Says the same token everywhere."""

    def __init__(self, vocab_size: int, token: int):
        self.config, self.token = SimpleNamespace(vocab_size=vocab_size), token

    def __call__(self, input_ids, use_cache=False):
        said = torch.full_like(input_ids, self.token)
        return SimpleNamespace(logits=F.one_hot(said, self.config.vocab_size).float())


def test_looking_up_solves_mqar_at_every_published_size():
    rows = mqar_suite(Induction(8192), "based-test", examples=3)
    assert [row["pairs"] for row in rows] == [4, 8, 16, 32, 64, 128, 256]
    assert all(row["accuracy"] == row["exact"] == 1 for row in rows)


def test_a_constant_model_has_chance_at_mqar():
    row = mqar_suite(Constant(64, 40), [(4, 64)], examples=2000)[0]
    assert row["chance"] == 1 / 32 and row["accuracy"] == pytest.approx(1 / 32, abs=0.008) and row["exact"] == 0
    assert row["asked"] == 8000


@pytest.mark.parametrize("task", ["in-context-recall", "noisy-in-context-recall"])
def test_looking_up_solves_recall(task):
    vocab = MAD_TASKS[task].baseline["vocab_size"]
    found = mad_score(Induction(vocab), task, examples=50)
    assert found["accuracy"] == found["classwise"] == found["exact"] == 1
    assert mad_score(Constant(vocab, 9), task, examples=400)["accuracy"] == pytest.approx(1 / 8, abs=0.03)


@pytest.mark.parametrize("task", sorted(set(MAD_TASKS) - {"compression"}))
def test_a_model_that_knows_the_labels_scores_1_on_every_task(task):
    examples = mad(task, 40, seed=1)
    told = {tuple(row): labels for row, labels in zip(examples.inputs.tolist(), examples.labels)}
    vocab = MAD_TASKS[task].baseline["vocab_size"]

    class Knows(Constant):
        def __call__(self, input_ids, use_cache=False):
            said = torch.from_numpy(np.stack([told[tuple(row)] for row in input_ids.tolist()])).clamp(min=0)
            return SimpleNamespace(logits=F.one_hot(said, vocab).float())

    found = mad_score(Knows(vocab, 0), task, examples=40)
    assert found["accuracy"] == found["exact"] == 1 and found["loss"] < np.log(vocab)


def test_a_constant_model_has_chance_at_memorization_and_copying():
    assert mad_score(Constant(256, 130), "memorization", examples=2000)["accuracy"] == pytest.approx(1 / 127, abs=0.003)
    assert mad_score(Constant(16, 3), "selective-copying", examples=500)["accuracy"] == pytest.approx(1 / 14, abs=0.01)


def test_accuracy_exact_and_classwise_are_what_they_say():
    inputs = np.zeros((3, 4), dtype=np.int64)
    labels = np.array([[1, 1, 1, -100], [1, 2, -100, -100], [-100, -100, -100, 2]])
    found = accuracy(lambda ids: F.one_hot(torch.ones_like(ids), 4).float(), Examples(inputs, labels), batch_size=2)
    assert found["accuracy"] == pytest.approx(4 / 6) and found["exact"] == pytest.approx(1 / 3)
    assert found["classwise"] == pytest.approx(0.5) and found["asked"] == 6 and found["examples"] == 3


def test_classwise_counts_a_label_that_was_said_and_never_asked_as_torchmetrics_macro_average_does():
    says = torch.tensor([[3, 3, 7]])
    found = accuracy(lambda ids: F.one_hot(says, 8).float(), Examples(np.zeros((1, 3), int), np.array([[3, 3, 4]])))
    assert found["classwise"] == pytest.approx(1 / 3)  # 3: all right, 4: none, 7: none
    assert found["accuracy"] == pytest.approx(2 / 3)


def test_compression_is_decoded_from_the_last_token_alone_and_can_be_learnt():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "memory_heads": 2}
    decoder = MADDecoder(MnemosForCausalLM(presets.config("titans-lmm", vocab_size=16, **sizes)))
    with pytest.raises(ValueError, match="MADDecoder"):
        mad_score(decoder.model, "compression")
    before = mad_score(decoder, "compression", examples=64, length=4)["accuracy"]
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=5e-3)
    for step in range(60):
        ids, labels = (torch.from_numpy(x) for x in mad("compression", 64, seed=100 + step, length=4))
        loss = F.cross_entropy(decoder(ids).flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    after = mad_score(decoder.eval(), "compression", examples=64, length=4)["accuracy"]
    assert before < 0.4 < 0.5 < after, (before, after)
    moved = decoder(torch.tensor([[3, 4, 5, 15]])) - decoder(torch.tensor([[2, 4, 5, 15]]))
    assert moved.abs().amax(-1).min() > 1e-4  # every position's answer comes through the last token


def test_what_does_not_fit_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="vocab_size=256, but the model has 16"):
        mad_score(Constant(16, 0), "memorization")
    with pytest.raises(ValueError, match="settings='zoo' is unknown"):
        mqar_suite(Constant(16, 0), "zoo")
    with pytest.raises(ValueError, match="vocab_size=99 is more than the model's 16"):
        mqar_suite(Constant(16, 0), [(2, 8)], vocab_size=99)
    with pytest.raises(ValueError, match="every label is -100"):
        accuracy(lambda ids: ids, Examples(np.zeros((1, 2), dtype=int), np.full((1, 2), -100)))


def test_sizes_that_do_not_fit_are_refused_before_any_is_measured():
    def model(**inputs):
        raise AssertionError("nothing is to be read")

    model.config = SimpleNamespace(vocab_size=256)
    with pytest.raises(
        ValueError, match="num_kv_pairs=128 are needed; the presets that fit are zoology-figure2-train, zoology-f"
    ):
        mqar_suite(model, "based-test", examples=1)
