"""The stories, answered by a reader that sees their sentences alone; and how they are hidden."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from babi_reader import answer
from mnemos.data.tasks import BABI_TASKS, Background, ByteTokenizer, hide, story
from mnemos.data.tasks.babilong import mentions_names

BYTES = ByteTokenizer()
TEXT = "The senate met early. It spoke of roads and of the army! Was peace at hand? The office was closed. " * 20


@pytest.mark.parametrize("task", BABI_TASKS)
def test_a_reader_of_the_facts_alone_finds_every_answer(task):
    for seed in range(400):
        told = story(task, seed)
        assert answer(task, told.facts, told.question) == told.answer
        assert told.answer in told.options and told.answer.lower() not in told.question.lower().replace("?", "").split()


@pytest.mark.parametrize("task", BABI_TASKS)
def test_no_answer_can_be_guessed_much_better_than_the_others(task):
    counts = Counter(story(task, seed).answer for seed in range(600))
    assert set(counts) == set(story(task).options)
    assert max(counts.values()) / 600 < 2 / len(counts)


@pytest.mark.parametrize("task", ["qa1", "qa2", "qa3"])
def test_the_last_place_that_anyone_went_to_is_mostly_not_the_answer(task):
    wrong = 0
    for seed in range(200):
        told = story(task, seed)
        walks = [fact for fact in told.facts if re.search(r"went|moved|journeyed|travelled", fact)]
        wrong += told.answer not in walks[-1]
    assert wrong > 80


def test_seeds_reproduce_and_differ():
    assert story("qa3", 7) == story("qa3", 7) != story("qa3", 8)
    background = Background(TEXT, BYTES, mentions_names)
    one, same, other = (hide(story("qa1", 1), 2000, BYTES, background, seed).ids() for seed in (1, 1, 2))
    assert (one == same).all() and (one != other).any()


@pytest.mark.parametrize("length", [0, 1500, 1501, 20_000])
@pytest.mark.parametrize("task", BABI_TASKS)
def test_facts_keep_their_order_in_a_text_of_exactly_the_length(task, length):
    background = Background(TEXT, BYTES, mentions_names)
    for seed in range(5):
        told = story(task, seed)
        sample = hide(told, length, BYTES, background, seed)
        pieces = list(sample.pieces(block=256))
        text = BYTES.decode(np.concatenate(pieces))
        assert len(text) == sample.length == (length or sum(len(f) + 1 for f in told.facts))
        assert max(map(len, pieces)) <= 256
        hidden = re.findall("|".join(map(re.escape, sorted(set(told.facts), key=len, reverse=True))), text)
        assert hidden == list(told.facts)
        assert answer(task, hidden, told.question) == told.answer
        rest = text
        for fact in told.facts:
            rest = rest.replace(fact + " ", "", 1)
        assert not mentions_names(rest), "the background must say nothing of the story"
        assert BYTES.decode(sample.question).endswith(f"{told.question}\nAnswer:")


def test_facts_lie_in_front_of_sentences_and_all_over_the_text():
    background = Background(TEXT, BYTES, mentions_names)
    places = []
    for seed in range(100):
        sample = hide(story("qa1", seed), 5000, BYTES, background, seed)
        text = BYTES.decode(sample.ids())
        for fact in set(sample.story.facts):
            at = text.index(fact)
            places.append(at / 5000)
            assert at == 0 or text[:at].rstrip()[-1] in ".!?"
    quarters = np.histogram(places, 4, (0, 1))[0] / len(places)
    assert quarters.min() > 0.15


def test_ten_million_tokens_are_made_without_ever_existing_at_once():
    import tracemalloc

    background = Background(TEXT, BYTES, mentions_names)
    sample = hide(story("qa2", 1), 10_000_000, BYTES, background)
    tracemalloc.start()
    total = sum(len(piece) for piece in sample.pieces())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 10_000_000 and peak < 2**20


def test_what_cannot_be_made_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="task 'qa6' is unknown; choose one of qa1"):
        story("qa6")
    with pytest.raises(ValueError, match="cannot hold the"):
        hide(story("qa3"), 20, BYTES, Background(TEXT, BYTES))
    with pytest.raises(ValueError, match="needs a background"):
        hide(story("qa1"), 2000, BYTES)
