"""Needles: where they lie, how long the prompt is, and that the answer stands nowhere else."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mnemos.data.tasks import NEEDLE_TASKS, NOISE, Background, ByteTokenizer, needle, needle_of

BYTES = ByteTokenizer()
ESSAY = "It was late. The rain had stopped and the road shone! Who would come? Nobody knew it then. " * 40


class Words:
    """A tokenizer of words: not every cut of a text is a cut between its tokens."""

    def __init__(self):
        self.ids: dict[str, int] = {}

    def encode(self, text):
        return [self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"\s+|\S+", text)]

    def decode(self, ids):
        words = list(self.ids)
        return "".join(words[i] for i in ids)


@pytest.fixture(params=["bytes", "words"])
def tokenizer(request):
    return BYTES if request.param == "bytes" else Words()


@pytest.mark.parametrize("task", NEEDLE_TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_prompt_has_exactly_its_length_and_the_answer_can_be_read_off_it(task, depth, tokenizer):
    for seed in range(5):
        sample = needle(task, 700, depth, tokenizer, Background(ESSAY, tokenizer), seed=seed)
        assert len(sample.ids) == 700
        text = tokenizer.decode(sample.ids.tolist())
        found = re.findall(r"One of the special magic (\w+)s for (\S+) is: (\S+)\.", text)
        assert len(found) == 1
        kind, key, value = found[0]
        asked = re.search(r"What is the special magic (\w+) for (\S+) mentioned", text)
        assert asked is not None and asked.groups() == (kind, key)
        assert value == sample.answer == sample.options[sample.right]
        assert text.count(sample.answer) == 1 and text.endswith(f"for {key} mentioned in the provided text is")
        assert len(set(sample.options)) == 10
        assert not any(option in text for option in sample.options if option != sample.answer)


def test_the_needle_lies_where_depth_says_and_in_front_of_a_sentence():
    essay = Background(ESSAY, BYTES)
    for depth in np.linspace(0, 1, 9):
        sample = needle("number", 2000, float(depth), BYTES, essay, seed=3)
        text = BYTES.decode(sample.ids)
        place = text.index("One of the special magic")
        assert place == sample.position
        start, stop = text.index("\n") + 1, text.rindex("\nWhat is")
        straw = stop - start - len(sample.sentence) - 1
        assert abs((place - start) / straw - depth) <= 40 / straw  # a sentence is at most 39 bytes away
        assert text[:place].rstrip()[-1] in ".!?"


def test_kinds_have_the_form_that_ruler_gives_them():
    forms = {
        "passkey": r"\d{7}",
        "number": r"\d{7}",
        "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        "word": r"[a-z]+-[a-z]+",
    }
    for task, form in forms.items():
        sample = needle(task, 900, 0.5, BYTES, Background(ESSAY, BYTES))
        assert all(re.fullmatch(form, option) for option in sample.options)
    assert NOISE.split(". ")[0] in BYTES.decode(needle("passkey", 900, 0.5, BYTES).ids)


def test_the_right_option_stands_anywhere_among_the_options():
    places = [needle("passkey", 400, 0.5, BYTES, seed=seed).right for seed in range(200)]
    assert set(places) == set(range(10))


def test_seeds_reproduce_and_differ():
    one, same, other = (needle("passkey", 500, 0.5, BYTES, seed=seed) for seed in (1, 1, 2))
    assert (one.ids == same.ids).all() and one.options == same.options
    assert one.answer != other.answer


def test_a_value_that_stands_in_the_haystack_is_neither_answer_nor_option():
    drawn = needle("number", 900, 0.5, BYTES, Background(ESSAY, BYTES), seed=4)
    told = Background(ESSAY + " ".join(f"I counted {option} ships." for option in drawn.options), BYTES)
    sample = needle("number", 900, 0.5, BYTES, told, seed=4)
    assert not set(sample.options) & set(drawn.options)


@pytest.mark.parametrize("seed", [618, 1316])  # keys that were once the same word as an option, and as the answer
def test_a_key_is_none_of_the_options(seed):
    sample = needle("word", 900, 0.5, BYTES, Background(ESSAY, BYTES), seed=seed)
    text = BYTES.decode(sample.ids)
    assert text.count(sample.answer) == 1
    assert not any(option in text for option in sample.options if option != sample.answer)


@pytest.mark.parametrize("leak", ["haystack", "question"])
def test_an_answer_that_is_given_away_is_refused_in_any_case(leak):
    text = ESSAY + "We met in ROME." * (leak == "haystack")
    question = "Which town was it?" if leak == "haystack" else "Was it rome or Paris?"
    with pytest.raises(ValueError, match=f"'Rome' already occurs in the {leak}"):
        needle_of("The town is Rome.", question, "Rome", 300, 0.5, BYTES, Background(text, BYTES))


def test_a_needle_of_ones_own_is_hidden_and_scored_on_its_answer():
    sample = needle_of("The code is 4711.", "What is the code?", "4711", 300, 0.5, BYTES, Background(ESSAY, BYTES))
    text = BYTES.decode(sample.ids)
    assert len(sample.ids) == 300 and text.endswith("What is the code?") and text.count("4711") == 1
    assert all(re.fullmatch(r"\d{4}", option) for option in sample.options)


def test_the_background_repeats_and_is_never_made_longer_than_a_piece():
    noise = Background(NOISE, BYTES)
    joined = np.concatenate(list(noise.take(0, 1000, block=64)))
    assert len(joined) == 1000 and BYTES.decode(joined) == ((NOISE + " ") * 12)[:1000]
    assert max(len(piece) for piece in noise.take(5, 1000, block=64)) <= 64
    assert noise.next_start(91) == len(noise) + 20 and noise.next_start(0) == 0
    assert noise.next_start(80) == len(noise)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: needle("key", 500, 0.5, BYTES), "task 'key' is unknown"),
        (lambda: needle("number", 500, 0.5, BYTES), "needs a background"),
        (lambda: needle("passkey", 100, 0.5, BYTES), "length=100 cannot hold"),
        (lambda: needle("passkey", 500, 1.5, BYTES), "depth=1.5"),
        (lambda: needle_of("A b.", "?", "c", 99, 0.5, BYTES, Background(ESSAY, BYTES)), "is not part of the needle"),
        (
            lambda: needle_of("It was late", "?", "late", 99, 0.5, BYTES, Background(ESSAY, BYTES)),
            "occurs in the haystack",
        ),
        (lambda: Background("", BYTES), "no usable sentence"),
        (lambda: Background.from_path("nowhere.txt", BYTES), "neither a file nor a folder"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
