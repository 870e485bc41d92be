"""The MAD tasks against their definitions, by solvers that see the inputs alone."""

from __future__ import annotations

import numpy as np
import pytest

from mnemos.data.tasks import IGNORED, MAD_TASKS, mad
from mnemos.data.tasks.mad import memorization_map


def recall_answers(row: np.ndarray, usable: int) -> np.ndarray:
    """Pairs stand at even places; the value of a key seen before is asked where the key stands. Noise ids are >= usable."""
    known: dict[int, int] = {}
    answers = np.full(len(row), IGNORED)
    for t in range(0, len(row), 2):
        key = int(row[t])
        if key >= usable:
            continue
        if key in known:
            answers[t] = known[key]
        if t + 1 < len(row):
            known.setdefault(key, int(row[t + 1]))
    return answers


@pytest.mark.parametrize("task, usable", [("in-context-recall", 16), ("noisy-in-context-recall", 16)])
def test_recall_asks_for_every_key_seen_before_and_for_nothing_else(task, usable):
    examples = mad(task, 50)
    assert examples.inputs.shape == (50, 127)
    for row, labels in zip(examples.inputs, examples.labels):
        assert (labels == recall_answers(row, usable)).all()
        assert labels[-1] != IGNORED


def test_noise_has_ids_of_its_own_and_the_share_asked_for():
    inputs = mad("noisy-in-context-recall", 400, frac_noise=0.6, length=256).inputs
    noise = inputs[:, :-1:2] >= 16
    assert abs(noise.mean() - 0.6) < 0.02
    assert ((inputs[:, 1::2] >= 16) == noise[:, : inputs.shape[1] // 2]).all()
    assert inputs.max() == 31
    assert (mad("noisy-in-context-recall", 200, frac_noise=0.99, length=16).answers() >= 1).all()


def fuzzy_answers(row: np.ndarray, usable: int) -> np.ndarray:
    """Runs of key tokens and of value tokens alternate; a run of keys is a key, the run behind it its value."""
    half = usable // 2
    known: dict[tuple, list[int]] = {}
    answers = np.full(len(row), IGNORED)
    t = int(np.argmax(row != usable))
    while t < len(row):
        stop = t
        while stop < len(row) and row[stop] < half:
            stop += 1
        key, end = tuple(row[t:stop]), stop
        while end < len(row) and half <= row[end] < usable:
            end += 1
        if key in known:
            for i, value in enumerate(known[key]):
                if stop - 1 + i < len(row):
                    answers[stop - 1 + i] = value
        else:
            known[key] = list(row[stop:end])
        t = end
    return answers


@pytest.mark.parametrize("settings", [{}, {"length": 256}, {"vocab_size": 64}, {"k_motif_size": 2, "v_motif_size": 1}])
def test_fuzzy_recall_asks_for_all_tokens_of_the_values_of_keys_seen_before(settings):
    examples = mad("fuzzy-in-context-recall", 100, **settings)
    chosen = MAD_TASKS["fuzzy-in-context-recall"].baseline | settings
    assert examples.inputs.shape == (100, chosen["length"])
    for row, labels in zip(examples.inputs, examples.labels):
        assert (labels == fuzzy_answers(row, chosen["vocab_size"] - 1)).all()
        assert labels[-1] != IGNORED


def test_no_token_comes_twice_within_a_motif_and_keys_have_full_length_when_testing():
    for row in mad("fuzzy-in-context-recall", 50).inputs:
        body = row[row != 15]
        runs = np.split(body, np.flatnonzero(np.diff((body < 7).astype(int))) + 1)
        assert all(len(set(run)) == len(run) for run in runs)
        assert all(len(run) == 3 for run in runs if run[0] < 7)


@pytest.mark.parametrize("settings", [{}, {"num_tokens_to_copy": 96}, {"length": 512, "vocab_size": 128}])
def test_selective_copying_asks_for_the_tokens_in_their_order(settings):
    examples = mad("selective-copying", 50, **settings)
    chosen = MAD_TASKS["selective-copying"].baseline | settings
    n, blank, copy = chosen["num_tokens_to_copy"], chosen["vocab_size"] - 2, chosen["vocab_size"] - 1
    assert examples.inputs.shape == (50, chosen["length"])
    for row, labels in zip(examples.inputs, examples.labels):
        at = int(np.flatnonzero(row == copy)[0])
        tokens = row[:at][row[:at] != blank]
        assert at == len(row) - n - 1 and len(tokens) == n
        assert (labels[at + 1 :] == tokens).all() and (labels[: at + 1] == IGNORED).all()
        assert (row[at + 1 :] == blank).all()


def test_blanks_are_spread_between_the_tokens():
    rows = mad("selective-copying", 300).inputs[:, :239] != 14
    assert rows[:, -1].all()  # none behind the last
    assert 0.3 < np.argmax(rows, axis=1).mean() / (223 / 16) < 3


def test_compression_asks_for_the_row_itself_and_ends_with_its_token():
    examples = mad("compression", 20)
    assert (examples.labels == examples.inputs).all() and examples.inputs.shape == (20, 32)
    assert (examples.inputs[:, -1] == 15).all() and examples.inputs[:, :-1].max() == 14


def test_memorization_has_one_map_for_every_example_and_seed():
    told: dict[int, int] = {}
    for seed in (0, 1):
        for row, labels in zip(*mad("memorization", 256, seed=seed)):
            assert (row[1::2] == 255).all() and (labels[::2] == IGNORED).all()
            for key, value in zip(row[::2], labels[1::2]):
                assert told.setdefault(int(key), int(value)) == value
    assert len(set(told.values())) == len(told) == 127
    assert (np.array([told[k] for k in range(127)]) == memorization_map(256)).all()
    assert (memorization_map(256, 1) != memorization_map(256, 2)).any()


@pytest.mark.parametrize("task", ["in-context-recall", "noisy-in-context-recall", "fuzzy-in-context-recall"])
def test_training_asks_for_every_next_token(task):
    examples = mad(task, 5, training=True)
    assert (examples.labels[:, :-1] == examples.inputs[:, 1:]).all()


@pytest.mark.parametrize("task", MAD_TASKS)
def test_every_published_setting_can_be_made_reproducibly(task):
    for settings in MAD_TASKS[task].settings():
        one, same, other = (MAD_TASKS[task].make(3, seed=seed, **settings) for seed in (4, 4, 5))
        assert (one.inputs == same.inputs).all() and (one.labels == same.labels).all()
        assert (one.inputs != other.inputs).any()
        assert one.inputs.min() >= 0 and one.inputs.max() < settings["vocab_size"]


def test_the_published_sizes_are_these():
    sizes = {name: (t.baseline["vocab_size"], t.baseline["length"], t.train_examples) for name, t in MAD_TASKS.items()}
    assert sizes == {
        "in-context-recall": (16, 128, 12_800),
        "noisy-in-context-recall": (32, 128, 12_800),
        "fuzzy-in-context-recall": (16, 128, 12_800),
        "selective-copying": (16, 256, 12_800),
        "compression": (16, 32, 12_800),
        "memorization": (256, 32, 256),
    }


@pytest.mark.parametrize(
    "task, wrong, words",
    [
        ("copying", {}, "task 'copying' is unknown"),
        ("in-context-recall", {"length": 7}, "length=7 must be even"),
        ("noisy-in-context-recall", {"frac_noise": 1.0}, "frac_noise=1.0 must be >= 0 and < 1"),
        ("fuzzy-in-context-recall", {"vocab_size": 4}, "vocab_size=4 is too small"),
        ("fuzzy-in-context-recall", {"length": 20}, "must be at least 24"),
        ("selective-copying", {"length": 33}, "must be more than"),
        ("memorization", {"length": 3}, "length=3 must be even"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(task, wrong, words):
    with pytest.raises(ValueError, match=words):
        mad(task, 2, **wrong)
