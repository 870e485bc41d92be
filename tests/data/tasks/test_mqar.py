"""MQAR against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from mnemos.data.tasks import IGNORED, MQAR_PRESETS, mqar


def solve(row: np.ndarray, pairs: int) -> dict[int, int]:
    """Keys to values, read off the front of a row."""
    return {int(row[2 * i]): int(row[2 * i + 1]) for i in range(pairs)}


@pytest.mark.parametrize("fill", ["random", "zero"])
@pytest.mark.parametrize("pairs, length, vocab", [(1, 4, 8), (4, 64, 64), (16, 64, 8192), (8, 130, 8192)])
def test_every_answer_is_the_value_told_for_the_key_that_is_asked(pairs, length, vocab, fill):
    examples = mqar(50, length, pairs, vocab, fill=fill)
    assert examples.inputs.shape == examples.labels.shape == (50, length)
    for row, labels in zip(examples.inputs, examples.labels):
        known = solve(row, pairs)
        assert len(known) == pairs == len(set(known.values()))
        asked = np.flatnonzero(labels != IGNORED)
        assert sorted(int(row[t]) for t in asked) == sorted(known)
        assert all(labels[t] == known[int(row[t])] for t in asked)
        assert all(t >= 2 * pairs and (t - 2 * pairs) % 2 == 0 for t in asked)
        assert all(1 <= k < vocab // 2 for k in known) and all(vocab // 2 <= v < vocab for v in known.values())


def test_without_filling_nothing_but_pairs_and_questions_stands_there():
    examples = mqar(20, 64, 4, 8192, fill="zero")
    behind = examples.inputs[:, 8:]
    assert ((behind != 0) == (examples.labels[:, 8:] != IGNORED)).all()


def test_gaps_follow_the_power_law_and_are_uniform_at_power_1():
    near, even = (mqar(4000, 204, 1, 1024, power=power, fill="zero").labels for power in (0.01, 1.0))
    slots = [(np.argmax(labels != IGNORED, axis=1) - 2) // 2 for labels in (near, even)]
    p = np.arange(1, 102) ** (0.01 - 1.0)
    p /= p.sum()
    for slot, expected in zip(slots, (p[0], 1 / 101)):
        share = (slot == 0).mean()
        assert abs(share - expected) < 4 * np.sqrt(expected / 4000)
    assert abs(slots[1].mean() - 50) < 2 and slots[0].mean() < 25
    assert abs(slots[0].mean() - (p * np.arange(101)).sum()) < 2


def test_draws_without_replacement_have_the_probabilities_of_drawing_one_by_one():
    labels = mqar(20_000, 12, 2, 64, power=0.5, fill="zero")
    first = labels.inputs[:, 4:] == labels.inputs[:, [0]]
    slot = np.argmax(first, axis=1) // 2
    p = np.arange(1, 5) ** -0.5
    assert np.abs(np.bincount(slot, minlength=4) / 20_000 - p / p.sum()).max() < 0.015


def test_seeds_reproduce_and_differ():
    assert (mqar(5, seed=1).inputs == mqar(5, seed=1).inputs).all()
    assert (mqar(5, seed=1).inputs != mqar(5, seed=2).inputs).any()


def test_labels_for_a_language_model_are_shifted_by_one():
    examples = mqar(3, 16, 2, 32)
    ids, labels = examples.for_language_model(filler=7)
    assert ids.shape == labels.shape == (3, 17) and (ids[:, -1] == 7).all()
    assert (labels[:, 1:] == examples.labels).all() and (labels[:, 0] == IGNORED).all()


def test_the_published_sizes_fit():
    for sizes in MQAR_PRESETS.values():
        for pairs, length, _ in sizes:
            assert mqar(1, length, pairs).inputs.shape == (1, length)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"length": 15}, "length=15 must be even"),
        ({"length": 14, "num_kv_pairs": 4}, "at least 4 \\* num_kv_pairs = 16"),
        ({"vocab_size": 8, "num_kv_pairs": 4}, "has 3 keys"),
        ({"power": 0}, "power=0 must be > 0"),
        ({"fill": "blank"}, "fill='blank' is unknown"),
        ({"num_examples": 0}, "num_examples=0"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(wrong, words):
    with pytest.raises(ValueError, match=words):
        mqar(**{"num_examples": 2} | wrong)
