"""Models broken on purpose: each fails exactly its own check. Healthy ones fail none."""

from __future__ import annotations

import constructed
import pytest
import torch
from constructed import Echo, KnowsTheAnswers, Recurrent, TinyAttention

from mnemos.audit import CHECKS, run
from mnemos.audit.needle import questions
from mnemos.data import ByteTokenizer

FAULTS = {  # model -> the check that it fails
    "LeaksOneToken": "causality",
    "LeaksInsideSegment": "causality",
    "LeaksAtOneEdge": "causality",
    "LeaksWithACache": "causality",
    "LeaksAlmostNothing": "causality",
    "ScoresTheTokenItself": "loss",
    "RestartsPositions": "cached",
    "ForgetsItsTail": "splits",
    "MixesRows": "batch",
    "CountsPadding": "padding",
    "HidesState": "swap",
    "Grows": "state",
    "GrowsInALIst": "state",
    "HasADeadParameter": "gradients",
    "HasADeadMemory": "memory",
    "KeepsSomethingBetweenCalls": "calls",
}
SAMPLES = 10
NEEDLES = {  # a model that recalls, and the same with a fault
    "recalls": (lambda: Echo(), 64, None),
    "carries nothing": (lambda: constructed.EchoesNearbyAlone(), 64, "needle"),
    "knows the answers": (lambda: KnowsTheAnswers([q.options[0] for q in questions(SAMPLES, 0)]), 64, "needle"),
    "sees further than it says": (lambda: Echo(window=10**6), 64, "needle"),
}
LEAKY = [
    {"prompt": "The key is 42. Grass is green. The key is", "answer": "42", "needle": "The key is 42."},
    {"prompt": "The key is 17. Grass is green. Is it 17 or 18?", "answer": "17", "needle": "The key is 17."},
]


def failures(model, *args, **options) -> dict[str, str]:
    return {row.check: row.text for row in run(model, *args, **options).failures}


@pytest.mark.parametrize("name, check", FAULTS.items())
def test_a_fault_fails_exactly_its_own_check(name, check):
    found = failures(getattr(constructed, name)(), length=32)
    assert list(found) == [check], found


def test_a_memory_that_writes_only_certain_texts_is_tested_on_such_a_text(tmp_path):
    model, checks = constructed.ActsBehindAMark(), ["memory", "gradients"]
    found = failures(model, checks=checks, length=32)
    assert list(found) == ["gradients", "memory"] and "--text FILE" in found["memory"]
    text = tmp_path / "facts.txt"
    text.write_text("".join("###" + str(10**28 + i**9) for i in range(7)))  # pieces of 32 tokens
    assert failures(model, ByteTokenizer(), checks=checks, length=32, text=str(text)) == {}


def test_a_text_that_cannot_be_used_is_named(tmp_path):
    model, short = TinyAttention(), tmp_path / "short.txt"
    short.write_text("short")
    for tokenizer, text, words in [
        (None, short, "needs a tokenizer"),
        (ByteTokenizer(), short, "has 5 tokens, but must have at least 64"),
        (ByteTokenizer(), tmp_path / "none.txt", "cannot be read"),
    ]:
        with pytest.raises(ValueError, match=words):
            run(model, tokenizer, checks=["memory"], length=32, text=str(text))


def test_every_check_has_a_model_that_fails_it():
    assert {*FAULTS.values(), "needle", "prompts"} == {*CHECKS}


@pytest.mark.parametrize("model", [TinyAttention, constructed.GatedAtZero, Recurrent], ids=lambda kind: kind.__name__)
def test_a_healthy_model_passes(model):
    result = run(model(), length=40)
    assert result.ok, result.failures
    tested = [check for check, status in result.statuses.items() if status == "pass"]
    assert {"causality", "cached", "splits", "batch", "swap", "state", "gradients"} <= {*tested}


@pytest.mark.parametrize("name", NEEDLES)
def test_recall_must_be_the_memorys_own(name):
    make, window, fault = NEEDLES[name]
    result = run(make(), ByteTokenizer(), checks=["needle"], window=window, samples=SAMPLES, length=64)
    assert [row.check for row in result.failures] == ([fault] if fault else []), result.failures
    if fault is None:
        row = result["needle"]
        assert row.status == "pass" and row.details["far"] == 1 and row.details["unwritten"] <= 0.5
    expected = {
        "recalls": "with nothing written",
        "carries nothing": "carries no fact",
        "knows the answers": "another answer",
        "sees further than it says": "nothing is written",
    }
    assert expected[name] in result["needle"].text


def test_a_model_that_cannot_recall_is_not_blamed_for_its_memory():
    torch.manual_seed(0)
    row = run(lambda ids: torch.randn(256, 256)[ids], ByteTokenizer(), checks=["needle"], window=8, samples=8)["needle"]
    assert row.status == "not applicable"


def test_a_window_without_a_memory_promises_no_recall():
    class Window(constructed.EchoesNearbyAlone):
        knock_out = None

        def votes(self, ids):
            self.switched_off = "reads"
            return super().votes(ids)

    row = run(Window(), ByteTokenizer(), checks=["needle"], window=64, samples=SAMPLES, length=64)["needle"]
    assert row.status == "not applicable" and "no memory is known" in row.text


def test_leaked_answers_are_found_with_the_number_of_the_prompt():
    model = TinyAttention()
    result = run(model, prompts=LEAKY)
    assert [row.check for row in result.failures] == ["prompts"]
    assert result["prompts"].number == 1 and result["prompts"].details["prompts"] == [2]
    assert run(model, prompts=LEAKY[:1], checks=["prompts"]).ok


def test_own_prompts_of_the_audit_leak_nothing():
    assert run(Echo(), ByteTokenizer(), checks=["prompts"], length=32)["prompts"].status == "pass"
