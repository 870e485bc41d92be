"""Needle, BABILong, capacity, length: an oracle scores 1, a model that finds all alike scores chance."""

from __future__ import annotations

import json
import re

import pytest
import torch
from oracles import BYTES, Scripted, answering, uniform

from babi_reader import answer
from helpers import randomise
from mnemos.data.tasks import BABI_TASKS, Background, hide, story
from mnemos.data.tasks.babilong import mentions_names
from mnemos.eval import (
    Evaluator,
    LanguageModel,
    babilong_suite,
    bare_capacity,
    context_length_scaling,
    memory_capacity_test,
    needle_in_haystack_test,
    needle_suite,
    public_babilong,
)
from mnemos.eval.babilong import is_right, load_public
from mnemos.eval.capacity import bound, linear_spec
from mnemos.models import MnemosForCausalLM, presets


def find_needle(text: str):
    asked = re.search(r"for (\S+) mentioned in the provided text\? .* mentioned in the provided text is", text)
    if asked is None:
        return None
    return asked[0], re.search(rf"for {asked[1]} is: (\S+)\.", text)[1]


def answer_story(text: str):
    asked = re.search(r"\nQuestion: (.*)\nAnswer:", text)
    if asked is None:
        return None
    facts = [s for s in re.split(r"(?<=[.!?]) ", text[: asked.start()].strip()) if mentions_names(s)]
    task = next(t for t, form in FORMS.items() if re.match(form, asked[1]))
    return asked[0], answer(task, facts, asked[1])


FORMS = {
    "qa1": r"Where is \w+\?",
    "qa2": r"Where is the",
    "qa3": r"Where was",
    "qa4": r"What is ",
    "qa5": r"Who|What did",
}


def small(preset: str = "titans-lmm") -> MnemosForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "memory_heads": 2, "num_attention_heads": 2}
    return randomise(MnemosForCausalLM(presets.config(preset, **sizes)), 0.05).eval()


@pytest.mark.parametrize("task", ["passkey", "number", "uuid", "word"])
def test_a_model_that_finds_the_needle_scores_1_at_every_depth_and_length(task, text):
    rows = needle_suite(
        answering(find_needle), BYTES, [task], [500, 700], (0.0, 0.6, 1.0), 1, Background(text, BYTES), distractors=2
    )
    assert [(r["length"], r["depth"]) for r in rows] == [(n, d) for n in (500, 700) for d in (0.0, 0.6, 1.0)]
    assert all(row["generated"] == row["likelihood"] == 1 for row in rows)


def test_a_model_that_finds_all_alike_scores_chance_on_needles():
    row = needle_suite(uniform(), BYTES, ["passkey"], [500], [0.5], 4)[0]
    assert row["likelihood"] == pytest.approx(0.1) == row["chance"] and row["generated"] == 0


def test_a_model_that_says_another_number_scores_0():
    def wrong(text):
        found = find_needle(text)
        return found and (found[0], found[1][::-1])

    row = needle_suite(answering(wrong), BYTES, ["passkey"], [500], [0.5], 3)[0]
    assert row["generated"] == 0 and row["likelihood"] <= 1 / 3


def test_a_prompt_is_read_once_in_pieces_for_all_of_its_options():
    model = uniform()
    needle_suite(LanguageModel(model, BYTES, 128), None, ["passkey"], [500], [0.5], 1, generate=False)
    assert model.calls == [(1, 128), (1, 128), (1, 128), (1, 116), (10, 7)]


def test_the_score_of_an_option_is_its_log_probability_in_one_pass(text):
    model = small()
    lm = LanguageModel(model, BYTES, 50)
    past = lm.read([BYTES.encode(text[:170])])
    options = [BYTES.encode(f" {word}") for word in ("yes", "certainly", "no")]
    for option, score in zip(options, lm.score(past, options)):
        ids = torch.tensor([[*BYTES.encode(text[:170]), *option]])
        with torch.no_grad():
            log_p = model(ids).logits[0, :-1].log_softmax(-1)
        expected = log_p.gather(1, ids[0, 1:, None]).squeeze(1)[-len(option) :].sum().item()
        assert score == pytest.approx(expected, abs=1e-4)


def test_continuing_says_what_generate_says(text):
    model = small()
    lm = LanguageModel(model, BYTES, 50)
    ids = torch.tensor([BYTES.encode(text[:120])])
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False)[0, 120:].tolist()
    assert lm.continue_from(lm.read([ids[0]]), 12) == BYTES.decode(theirs)


@pytest.mark.parametrize("preset", ["titans-lmm", "titans-mag", "titans-mac", "transformer"])
def test_continuations_decoded_together_are_those_of_each_alone(preset, text):
    """Pasts of different lengths, rooms and stops; of a cache that grows with what was read one at a time is kept."""
    lm = LanguageModel(small(preset), BYTES, 50)
    calls, call = [], lm.call
    lm.call = lambda ids, *rest, **more: calls.append(len(ids)) or call(ids, *rest, **more)
    asked = [(n, room, stop) for n, room, stop in ((31, 9, ()), (120, 4, ()), (64, 12, ("e", "\x00")), (7, 0, ()))]
    alone = [lm.continue_from(lm.read([BYTES.encode(text[:n])]), room, stop) for n, room, stop in asked]
    assert set(calls) == {1}
    calls.clear()
    together = list(lm.continue_all((lm.read([BYTES.encode(text[:n])]), room, stop) for n, room, stop in asked))
    assert together == alone
    assert max(calls) == (1 if preset == "transformer" else 4)


def test_ones_own_needle_is_scored_on_its_answer_at_every_position(text):
    def find(read):
        return ("What is the code?", "4711") if "What is the code?" in read and "is 4711." in read else None

    found = needle_in_haystack_test(
        answering(find), BYTES, "The code is 4711.", text, "What is the code?", max_length=600
    )
    assert found["answer"] == "4711" and found["generated"] == found["likelihood"] == 1
    assert [row["position"] for row in found["positions"]] == [0.1, 0.3, 0.5, 0.7, 0.9]
    lost = needle_in_haystack_test(uniform(), BYTES, "The code is 4711.", text, "What is the code?", max_length=600)
    assert lost["generated"] == 0 and lost["likelihood"] == pytest.approx(lost["chance"]) == pytest.approx(0.1)


def test_a_needle_without_an_answer_asks_for_one(text):
    with pytest.raises(ValueError, match="give answer="):
        needle_in_haystack_test(uniform(), BYTES, "Nothing here", text, "What?")


@pytest.mark.parametrize("task", BABI_TASKS)
def test_a_reader_of_the_story_scores_1_and_a_model_that_finds_all_alike_scores_chance(task, text):
    background = Background(text, BYTES, mentions_names)
    rows = babilong_suite(answering(answer_story), BYTES, [task], [0, 1800], 2, background)
    assert all(row["likelihood"] == row["generated"] == 1 for row in rows)
    chance = babilong_suite(uniform(), BYTES, [task], [0], 3)[0]
    same_length = {len(option) for option in story(task).options} == {1}
    assert not same_length and chance["likelihood"] == pytest.approx(chance["chance"]) and chance["generated"] == 0


def test_an_answer_is_right_if_it_is_the_only_one_that_is_named():
    options = story("qa1").options
    assert is_right(" the office", "office", "Where is Mary?", options)
    assert not is_right(" the office or the garden", "office", "Where is Mary?", options)
    assert is_right(" the office. The garden is", "office", "Where is Mary?", options)
    assert is_right(
        " before the garden it was in the office", "office", "Where was the milk before the garden?", options
    )


@pytest.mark.parametrize("form", ["json", "jsonl", "parquet"])
def test_the_public_data_set_is_read_from_a_folder_and_scored(form, tmp_path, text):
    told = [story("qa1", seed) for seed in range(3)]
    records = [{"input": " ".join(t.facts), "question": t.question, "target": t.answer} for t in told]
    (tmp_path / "4k").mkdir()
    if form == "parquet":
        from datasets import Dataset

        Dataset.from_list(records).to_parquet(str(tmp_path / "4k" / "qa1-00000-of-00001.parquet"))
        Dataset.from_list(records * 2).to_parquet(str(tmp_path / "4k" / "qa10-00000-of-00001.parquet"))
    else:
        lines = json.dumps(records) if form == "json" else "\n".join(map(json.dumps, records))
        (tmp_path / "4k" / f"qa1.{form}").write_text(lines)
    found = public_babilong(answering(answer_story), BYTES, load_public("qa1", "4k", str(tmp_path)), "qa1")
    assert found["samples"] == 3 and found["generated"] == found["likelihood"] == 1
    with pytest.raises(ValueError, match=r"has no 8k/qa1\.json"):
        load_public("qa1", "8k", str(tmp_path))


def test_a_long_sample_is_read_with_a_state_that_does_not_grow(text):
    lm = LanguageModel(small(), BYTES)
    background = Background(text, BYTES, mentions_names)
    sizes = [lm.read(hide(story("qa4", 1), n, BYTES, background).pieces()).state.nbytes for n in (300, 9000)]
    assert sizes[0] == sizes[1]


def recite(text: str):
    asked = re.search(r"\nThe code of (\S+) is", text)
    if asked is None:
        return None
    return asked[0], re.search(rf"The code of {asked[1]} is (\d+)\.", text)[1]


def test_capacity_counts_the_pairs_that_come_back():
    found = memory_capacity_test(answering(recite), BYTES, num_pairs=12)
    assert (found["recalled"], found["recall"], found["chosen"]) == (12, 1, 1)
    lost = memory_capacity_test(uniform(), BYTES, num_pairs=12)
    assert lost["recalled"] == 0 and lost["chosen"] == pytest.approx(0.1) == lost["chance"]


def test_capacity_of_a_model_that_keeps_the_last_five_facts_is_five():
    def forgetful(text):
        kept = re.findall(r"The code of \S+ is \d+\. ", text)[-5:]
        return recite("".join(kept) + text[text.index("\n") :]) if "\n" in text and _kept(text, kept) else None

    def _kept(text, kept):
        return any(f"{text[text.index(chr(10)) + 1 :].split(' is')[0]} is" in fact for fact in kept)

    assert memory_capacity_test(answering(forgetful), BYTES, num_pairs=12)["recalled"] == 5


def test_a_bare_memory_holds_as_many_pairs_as_its_bound():
    assert bound(linear_spec("identity", dim=6)) == 6
    found = bare_capacity(linear_spec("monomials", dim=4), seeds=2)
    assert found["bound"] == 14 == found["least squares"]
    assert found["1 pass"] == 1 < found["64 passes"] < found["2^20 passes"] <= 14
    with pytest.raises(ValueError, match="has no closed form"):
        bare_capacity(presets.config("titans-lmm").memory_config.spec)


def test_lengths_are_seen_on_the_way_of_one_pass(text):
    model = small()
    rows = context_length_scaling(LanguageModel(model, BYTES, 100), None, text, [50, 333, 900], tail=40)
    ids = torch.tensor([BYTES.encode(text[:900])])
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    for row in rows:
        n = row["length"]
        assert row["loss"] == pytest.approx(losses[: n - 1].mean().item(), abs=1e-5)
        assert row["tail_perplexity"] == pytest.approx(losses[n - 41 : n - 1].mean().exp().item(), rel=1e-4)
    assert len({row["state_bytes"] for row in rows}) == 1
    calls = uniform()
    context_length_scaling(LanguageModel(calls, BYTES, 100), None, text, [50, 333])
    assert sum(n for _, n in calls.calls) == 333


def test_a_text_that_is_too_short_is_refused_or_repeated():
    with pytest.raises(ValueError, match="the text has 6 tokens, but lengths asks for 100"):
        context_length_scaling(uniform(), BYTES, "abcdef", [100])
    rows = context_length_scaling(uniform(), BYTES, "abcdef", [20, 100], repeat=True)
    assert rows[-1]["perplexity"] == pytest.approx(256)


def test_the_evaluator_offers_the_names_that_others_use(text):
    evaluator = Evaluator(uniform())
    assert evaluator.compute_perplexity([text[:50]]) == pytest.approx(256)
    assert evaluator.memory_capacity_test(num_pairs=2)["pairs"] == 2
    assert [r["length"] for r in evaluator.context_length_scaling_test(text, lengths=[64, 128])] == [64, 128]
    assert evaluator.needle_in_haystack_test("The code is 4711.", text, "The code?", max_length=500)["generated"] == 0
    assert evaluator.needle(lengths=[500], depths=[0.5], samples=1)[0]["task"] == "passkey"
    assert evaluator.babilong(tasks=["qa1"], lengths=[0], samples=1)[0]["task"] == "qa1"
    assert evaluator.perplexity_by_context(text, [8, 16])[1]["context"] == 16


def test_reading_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to read"):
        LanguageModel(Scripted(lambda ids: None), BYTES).read([])
