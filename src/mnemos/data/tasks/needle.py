"""Needle in a haystack: the single-needle tasks of RULER (Hsieh et al., 2024), and user-defined needles.

passkey  a number in noise (S-NIAH-1, niah_single_1)
number   a number in essays (S-NIAH-2, niah_single_2)
uuid     a UUID in essays (S-NIAH-3, niah_single_3)
word     a word in essays

"Essays" is any text. A prompt has exactly `length` tokens, including the question but not the answer.
`depth` is the position of the needle: 0 at the start of the haystack, 1 at its end, rounded up to the beginning of a sentence.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...choices import unknown
from .background import NOISE, Background
from .text import encode
from .words import ADJECTIVES, NOUNS

HEAD = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
SENTENCE = "One of the special magic {kind}s for {key} is: {value}. "
TAIL = (
    "\nWhat is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)


@dataclass(frozen=True)
class NeedleTask:
    """A task. kind: the hidden value, number, uuid or word. noise: whether the haystack is noise or a text."""

    name: str
    kind: str
    noise: bool
    ruler: str


NEEDLE_TASKS = {
    task.name: task
    for task in (
        NeedleTask("passkey", "number", True, "niah_single_1"),
        NeedleTask("number", "number", False, "niah_single_2"),
        NeedleTask("uuid", "uuid", False, "niah_single_3"),
        NeedleTask("word", "word", False, "-"),
    )
}


@dataclass(frozen=True)
class Needle:
    """A prompt (`ids`) and its answer. options: candidate answers; the answer is options[right]. sentence: the needle, which is in front
    of the token at `position`."""

    ids: np.ndarray
    sentence: str
    answer: str
    options: tuple[str, ...]
    right: int
    position: int
    depth: float


def needle(
    task: str,
    length: int,
    depth: float,
    tokenizer: Any,
    background: Background | None = None,
    distractors: int = 9,
    seed: int = 0,
) -> Needle:
    """Generate a sample of one of RULER's single-needle tasks. All but `passkey` need a background.

    >>> from mnemos.data.tasks import ByteTokenizer
    >>> sample = needle("passkey", 1024, 0.5, ByteTokenizer())
    >>> len(sample.ids), len(sample.options), sample.answer in ByteTokenizer().decode(sample.ids)
    (1024, 10, True)
    """
    if task not in NEEDLE_TASKS:
        raise unknown("task", task, NEEDLE_TASKS)
    known, rng = NEEDLE_TASKS[task], random.Random(f"{task}:{seed}")
    if known.noise:
        background = Background(NOISE, tokenizer)
    elif background is None:
        raise ValueError(f"task {task!r} needs a background text to hide its needle in")
    values: list[str] = []
    while len(values) <= distractors:
        value = draw(known.kind, rng)
        if value not in values and value not in background.text:
            values.append(value)
    key = draw("word", rng)
    while key in values:  # else the question would contain the answer
        key = draw("word", rng)
    words = {"kind": known.kind, "key": key, "value": values[0]}
    anywhere = None if known.noise else np.random.default_rng(rng.getrandbits(32))
    parts = (HEAD.format(**words), SENTENCE.format(**words), TAIL.format(**words))
    return _assemble(*parts, values, length, depth, tokenizer, background, anywhere, rng)


def needle_of(
    sentence: str,
    question: str,
    answer: str,
    length: int,
    depth: float,
    tokenizer: Any,
    background: Background,
    options: tuple[str, ...] = (),
    seed: int = 0,
) -> Needle:
    """A sample with a user-defined needle, question and answer. options: wrong answers (default: nine of the same form)."""
    if answer.lower() not in sentence.lower():
        raise ValueError(f"the answer {answer!r} is not part of the needle {sentence!r}")
    for name, text in (("haystack", background.text), ("question", question)):  # scores ignore case
        if answer.lower() in text.lower():
            raise ValueError(f"the answer {answer!r} already occurs in the {name}; choose another needle")
    rng = random.Random(f"own:{seed}")
    values = [answer, *(options or similar(answer, 9, rng))]
    return _assemble("", f"{sentence} ", f"\n{question}", values, length, depth, tokenizer, background, None, rng)


def draw(kind: str, rng: random.Random) -> str:
    """A random number of seven digits, a word "adjective-noun", or a UUID."""
    if kind == "number":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def similar(answer: str, count: int, rng: random.Random) -> list[str]:
    """Wrong answers of the same form: with other digits, or with other words if the answer has no digits."""
    found: list[str] = []
    while len(found) < count:
        if any(c.isdigit() for c in answer):
            other = "".join(str(rng.randint(0, 9)) if c.isdigit() else c for c in answer)
            if sum(c.isdigit() for c in answer) == 1 and count > 9:
                raise ValueError(f"there are not {count} other answers like {answer!r}; give options")
        else:
            other = " ".join(rng.choice(NOUNS) for _ in answer.split())
        if other != answer and other not in found:
            found.append(other)
    return found


def _assemble(head, sentence, tail, values, length, depth, tokenizer, background, anywhere, rng) -> Needle:
    """Build a prompt of exactly `length` tokens: head, haystack with the needle, tail. values[0] is the answer."""
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth!r} must lie between 0, the start of the haystack, and 1, its end")
    first, hidden, last = (np.asarray(encode(tokenizer, part), dtype=np.int64) for part in (head, sentence, tail))
    straw = length - len(first) - len(hidden) - len(last)
    if straw < 0:
        raise ValueError(f"length={length} cannot hold the {length - straw} tokens of instruction, needle and question")
    start, stop = background.stretch(straw, anywhere)
    place = background.place(start + round(depth * straw), start)
    before, after = background.take(start, place), background.take(place, stop)
    ids = np.concatenate([first, *before, hidden, *after, last])
    order = list(range(len(values)))
    rng.shuffle(order)
    return Needle(
        ids,
        sentence.strip(),
        values[0],
        tuple(values[i] for i in order),
        order.index(0),
        len(first) + place - start,
        depth,
    )
