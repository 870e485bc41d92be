"""`run`, `assert_passes`, checks of one's own, and what an audit leaves behind."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from constructed import EchoesNearbyAlone, LeaksOneToken, Recurrent, RestartsPositions, TinyAttention
from small_models import attached, preset

from mnemos.audit import (
    CHECKS,
    AuditSettings,
    Probe,
    Watch,
    assert_passes,
    difference,
    failed,
    passed,
    register_check,
    run,
)
from mnemos.audit.needle import _answer_logits
from mnemos.audit.prompts import read_prompts
from mnemos.audit.states import select_rows, state_bytes
from mnemos.data import ByteTokenizer


def test_the_model_is_left_as_it_was():
    model = TinyAttention().train()
    model.mlp.eval()
    before = copy.deepcopy(model.state_dict())
    run(model, length=16, dtype="keep")
    assert model.training and model.embed.training and not model.mlp.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_assert_passes_names_what_failed():
    assert_passes(Recurrent(), checks=["splits"], length=16)
    with pytest.raises(AssertionError, match=r"1 of \d+ checks failed\n  cached: calls of"):
        assert_passes(RestartsPositions(), checks=["swap"], length=16)


def test_a_check_runs_behind_those_that_it_needs():
    result = run(LeaksOneToken(), checks=["splits"], length=16)
    assert list(result.statuses) == ["calls", "causality", "cached", "splits"]
    assert not result.ok and result["splits"].text == "not tested: cached must hold first"


def test_a_check_of_ones_own_takes_part():
    try:

        @register_check("small", "logits are small", needs=["calls"])
        def small(probe):
            number = probe.own.logits(probe.ids(1)).abs().max().item()
            return passed("small", number, 9.0) if number <= 9 else failed("large", number, 9.0)

        assert run(lambda ids: 10.0 * torch.eye(9)[ids], length=16, checks=["small"])["small"].status == "fail"
        with pytest.raises(ValueError, match="is registered already"):
            register_check("small", "again")
        register_check("other", "", needs=["cals"])(small)
        with pytest.raises(ValueError, match="check 'cals' is unknown; did you mean calls"):
            run(TinyAttention(), checks=["other"])
    finally:
        CHECKS.pop("small", None)
        CHECKS.pop("other", None)


@pytest.mark.parametrize("first", ["knock_outs", "read_prompts", "Probe"])
def test_the_order_of_checks_does_not_depend_on_what_is_imported_first(first):
    code = f"from mnemos.audit import {first}, CHECKS; print(*CHECKS)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert printed.split() == [*CHECKS] and printed.startswith("calls causality loss cached splits batch padding swap")


def test_the_claim_of_a_constant_state_can_be_made_by_the_user():
    model = TinyAttention()
    assert run(model, checks=["state"], length=16).ok
    row = run(model, checks=["state"], length=16, state="constant")["state"]
    assert row.status == "fail" and row.number == 128.0  # 2 · 16 numbers of 4 bytes
    assert row.details["bytes"] == {16: 2048, 32: 4096, 64: 8192, 128: 16384}


def test_bytes_are_counted_wherever_they_are():
    class Kept:
        __slots__ = ("tensor",)

        def __init__(self):
            self.tensor = torch.zeros(3)

    shared = torch.zeros(4, dtype=torch.float64)
    assert state_bytes([shared, (shared, {"a": [1, 2.0]}), Kept(), None, "text"]) == 32 + 16 + 12
    assert state_bytes([shared[:2], shared[2:]]) == 32


def test_rows_of_unknown_states_cannot_be_chosen():
    assert select_rows({"a": torch.arange(2)}, torch.tensor([1]))["a"].tolist() == [1]
    assert select_rows({"a": object()}, torch.tensor([0])) is None


def test_wrong_options_are_one_sentence():
    for options, sentence in (
        ({"lenght": 8}, "option 'lenght' is unknown; did you mean length?"),
        ({"settings": AuditSettings(), "length": 9}, "not both"),
        ({"boundaries": (1,)}, "whole numbers of at least 2"),
        ({"prompts": [{"prompt": "a"}]}, 'prompt 1 must be an object with "prompt" and "answer"'),
        ({"prompts": [{"prompt": "a", "answer": " "}]}, '"answer" must be a text that is not empty'),
        ({"prompts": [{"prompt": "a", "answer": 4}]}, '"answer" must be a text'),
        ({"prompts": [{"prompt": "a", "answer": "b", "needle": "c"}]}, "the needle is not a part of the prompt"),
    ):
        with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
            run(TinyAttention(), **options)
    with pytest.raises(ValueError, match="must be a language model"):
        run("gpt2")


def test_answers_are_found_as_whole_words_only():
    leaks = [
        p.leaks
        for p in read_prompts([{"prompt": "The cat sat. What sat?", "answer": a} for a in ("at", "CAT", "the  cat")])
    ]
    assert leaks == [False, True, True]


def test_an_edge_that_no_text_reaches_is_named():
    model = TinyAttention()
    row = run(model, checks=["causality"], length=16, boundaries=(64,))["causality"]
    assert row.status == "pass" and "64 tokens of a window or chunk are not reached: --length 160" in row.text


def test_a_watch_follows_every_check():
    seen: list[tuple] = []

    class Seen(Watch):
        def started(self, about, checks):
            seen.append((about["tokens"], *checks))

        def running(self, check):
            seen.append((check,))

        def part(self):
            seen.append(("part",))

        def finished(self, row):
            seen.append((row.check, row.status))

    result = run(TinyAttention(), checks=["causality"], length=16, watch=Seen())
    assert seen[:3] == [(16, "calls", "causality"), ("calls",), ("calls", "pass")]
    assert seen[3] == ("causality",) and seen[-1] == ("causality", "pass") and ("part",) in seen
    assert [row.check for row in result.rows] == ["calls", "causality"]


def test_a_large_model_gets_shorter_texts_unless_a_length_is_given(monkeypatch):
    assert Probe(TinyAttention()).length == 160
    monkeypatch.setattr("mnemos.audit.probe.LARGE", 10)
    assert Probe(TinyAttention()).length == 96
    assert Probe(TinyAttention(), None, AuditSettings(length=20)).length == 20


def test_a_large_model_is_asked_until_the_verdict_is_certain(monkeypatch):
    options = dict(checks=["needle"], window=64, samples=12, length=64)
    asked = []
    monkeypatch.setattr("mnemos.audit.needle._is_right", lambda *_: asked.append(1) or len(asked) % 12 != 3)
    whole = run(EchoesNearbyAlone(), ByteTokenizer(), **options)["needle"]
    assert len(asked) == 36 and "recalled 11 of 12 from" in whole.text
    asked.clear()
    monkeypatch.setattr("mnemos.audit.probe.LARGE", -1)
    short = run(EchoesNearbyAlone(), ByteTokenizer(), **options)["needle"]
    assert short.status == whole.status == "fail" and "another answer" in short.text and "another answer" in whole.text
    assert len(asked) < 36 and "recalled 9 of" in short.text  # 9 of 12 are above chance


@pytest.mark.parametrize("make", [lambda: preset("titans-mag"), lambda: attached(window=6, sinks=2)])
def test_answers_behind_a_repeated_state_have_the_logits_of_whole_prompts(make):
    probe = Probe(make())
    ids, answers = probe.ids(1, 40)[0], probe.ids(4, 5, seed=3)
    whole = _answer_logits(probe, ids, answers)
    probe.outcomes["cached"] = passed("as if it had run")
    repeated = _answer_logits(probe, ids, answers)
    assert whole.shape == repeated.shape == (4, 5, 61) and not torch.equal(whole, whole.roll(1, 0))
    assert difference(repeated, whole) < 1e-3


def test_importing_the_package_needs_no_torch():
    code = "import sys, mnemos.audit, mnemos.audit.settings; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
