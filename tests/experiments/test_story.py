"""Stories scattered in a text: what is told, what is asked, what counts as an answer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from driver.story import WORDS, accuracy, labelled, tell
from mnemos.data.tasks.babilong import WALKERS


def test_the_last_fact_about_a_person_is_the_answer():
    text = np.full(400, 7, np.uint8)
    for number in range(20):
        words = [WORDS[i - 256] if i >= 256 else None for i in tell(text, 300, seed=3, number=number)]
        assert len(words) == 300 and words[:290].count(None) > 200  # facts lie in the text
        told = [i for i, word in enumerate(words[:290]) if word == "."]
        place = {}
        for end in told:
            begin = max(i for i in range(end) if words[i] in WALKERS)
            assert None not in words[begin:end]  # a fact is not cut
            place[words[begin]] = words[end - 1]
        for i in (290, 295):
            assert words[i : i + 2] == ["Where", "is"] and words[i + 3] == "?"
            assert words[i + 4] == place[words[i + 2]]
        assert words[292] != words[297]


def test_what_is_learned_from_asks_on_the_way_for_what_was_told_by_then():
    text, asked = np.full(400, 7, np.uint8), 0
    for number in range(20):
        row = tell(text, 300, seed=5, number=number, asides=True)
        words, place, facts = [WORDS[i - 256] if i >= 256 else None for i in row], {}, 0
        for i in range(290):
            if words[i] == ".":
                who = max(j for j in range(i) if words[j] in WALKERS)
                place[words[who]], facts = words[i - 1], facts + 1
            if words[i] == "?":
                assert facts % 2 == 0 and words[i + 1] == place[words[i - 1]]
                asked += 1
        answers = labelled(torch.from_numpy(row)[None])[0]
        assert [words[i] for i in (answers != -100).nonzero().flatten() - 1] == ["?"] * (facts // 2 + 2)
    assert asked > 40


def test_only_answers_are_learned_and_asked_for():
    ids = torch.from_numpy(np.stack([tell(np.zeros(400, np.uint8), 120, seed=0, number=i) for i in range(3)]))
    labels = labelled(ids)
    assert (labels != -100).nonzero()[:, 1].tolist() == [114, 119] * 3
    assert (labels[:, [114, 119]] == ids[:, [114, 119]]).all()

    class Knows:  # says the answer of every question
        def state(self, piece, cache):
            return piece

        def __call__(self, questions, past_key_values, use_cache):
            following = torch.roll(questions, -1, 1)
            return SimpleNamespace(logits=torch.nn.functional.one_hot(following, 512).float())

    assert accuracy(Knows(), ids) == 1.0
