"""The kept model of the demo: good ones only, never replaced, damaged ones refused; and the words of the game."""

from __future__ import annotations

import time

import pytest
import torch

from mnemos.demo import kept
from mnemos.demo.game import FactsTokenizer, is_question
from mnemos.demo.kept import game_recall, is_kept, keep, kept_folder, open_kept
from mnemos.demo.results import DemoPlan
from mnemos.models import MnemosForCausalLM


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MNEMOS_CACHE", str(tmp_path))


def model(seed: int = 0) -> MnemosForCausalLM:
    torch.manual_seed(seed)
    return MnemosForCausalLM(DemoPlan().memory_config()).eval()


def test_a_model_that_has_not_learnt_the_game_is_not_kept():
    assert game_recall(model()) < 0.3 and not keep(model()) and not is_kept()
    with pytest.raises(ValueError, match="has not learnt its task in 1 seconds"):
        open_kept(seconds=1)
    assert not is_kept()


def test_training_counts_processor_time_so_that_a_busy_machine_learns_as_much():
    class Stop(Exception): ...

    seen: list[float] = []

    def progress(done, curve):
        time.sleep(1.5)  # as if other processes had the processor
        seen.append(curve.seconds)
        if len(seen) == 3:
            raise Stop

    with pytest.raises(Stop):
        open_kept(progress, seconds=60)
    assert 0 < seen[2] - seen[0] < 2.0  # without the two pauses of 1.5 seconds


def test_a_kept_model_is_opened_as_it_was_and_never_replaced(monkeypatch, tmp_path):
    monkeypatch.setattr(kept, "LEAST_RECALL", 0.0)
    first = model()
    assert keep(first) and not keep(model(1))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.endswith(".part")) == []
    opened = open_kept()
    assert not opened.training
    for name, x in first.state_dict().items():
        assert torch.equal(x, opened.state_dict()[name])


def test_a_damaged_kept_model_is_refused_with_its_folder(monkeypatch):
    monkeypatch.setattr(kept, "LEAST_RECALL", 0.0)
    keep(model())
    (kept_folder() / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"delete the folder .*demo-facts-1 to train"):
        open_kept()


@pytest.mark.parametrize(
    "line", ["Alice is lamp", "remember that Alice has the lamp.", "ALICE: Lamp", "Alice owns a lamp!"]
)
def test_a_fact_is_a_person_and_a_thing_in_many_words(line):
    assert FactsTokenizer().encode(line) == [256, 288] and not is_question(line)


@pytest.mark.parametrize("line", ["what is Alice?", "Alice?", "What does Alice have", "what's Alice's thing?"])
def test_a_question_is_a_person_behind_some_text(line):
    assert FactsTokenizer().encode(line) == [*b" and then ", 256] and is_question(line)
