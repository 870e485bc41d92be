"""Questions about facts scattered in a long text, as in BABILong (Kuratov et al., 2024), with generated stories.

qa1  one fact: where is Mary?                       qa4  two-argument relations: what is north of the kitchen?
qa2  two facts: where is the apple?                 qa5  three-argument relations: who gave the milk to Fred?
qa3  three facts: where was the apple before the kitchen?

The stories follow bAbI (Weston et al., 2015): people walk, take, drop and give things. Each story is simulated, so its answer follows
from its facts. The facts keep their order in the background text, which mentions none of the people, places and things of the story.
A text can have any length: it is generated in pieces.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...choices import unknown
from .background import Background
from .text import encode

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
CARRIED_THINGS = ("apple", "football", "milk")
WALKERS = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
WALKS = ("went to", "moved to", "journeyed to", "travelled to", "went back to")
TAKES = ("got", "took", "grabbed", "picked up")
DROPS = ("dropped", "discarded", "left", "put down")
GIVES = ("gave", "passed", "handed")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
NAME_PATTERN = re.compile(rf"\b({'|'.join((*PLACES, *CARRIED_THINGS, *WALKERS, *GIVERS))})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Story:
    """Facts in order, a question, its answer, and all possible answers."""

    task: str
    facts: tuple[str, ...]
    question: str
    answer: str
    options: tuple[str, ...]


def story(task: str, seed: int = 0) -> Story:
    """A random story of the task qa1 .. qa5.

    >>> story("qa1", seed=3).answer in PLACES
    True
    """
    if task not in BABI_TASKS:
        raise unknown("task", task, BABI_TASKS)
    rng = random.Random(f"{task}:{seed}")
    while True:
        made = BABI_TASKS[task](rng)
        if made is not None:  # else the story has nothing to ask about: draw another
            return made


def mentions_names(sentence: str) -> bool:
    """Whether a sentence names a person, place or thing of the stories, and would act as a fact or a hint."""
    return NAME_PATTERN.search(sentence) is not None


class StoryWorld:
    """The state of a story: the place of each person, the holder of each thing, and the places where each thing has been."""

    def __init__(self, rng: random.Random, people: tuple[str, ...]):
        self.rng, self.people = rng, people
        self.facts: list[str] = []
        self.place: dict[str, str] = {}
        self.holder: dict[str, str | None] = {}  # only things that were taken
        self.been: dict[str, list[str]] = {thing: [] for thing in CARRIED_THINGS}

    def walk(self) -> None:
        who = self.rng.choice(self.people)
        where = self.rng.choice([p for p in PLACES if p != self.place.get(who)])
        self.place[who] = where
        self.facts.append(f"{who} {self.rng.choice(WALKS)} the {where}.")
        for thing, holder in self.holder.items():
            if holder == who:
                self.been[thing].append(where)

    def take(self) -> None:
        """A person takes a thing from their place: one that was never taken, or one dropped there."""
        able = [
            (who, thing)
            for who, where in self.place.items()
            for thing in CARRIED_THINGS
            if thing not in self.holder or (self.holder[thing] is None and self.been[thing][-1] == where)
        ]
        if not able:
            return self.walk()
        who, thing = self.rng.choice(able)
        if thing not in self.holder:
            self.been[thing].append(self.place[who])
        self.holder[thing] = who
        self.facts.append(f"{who} {self.rng.choice(TAKES)} the {thing} there.")

    def drop(self) -> None:
        held = [(thing, who) for thing, who in self.holder.items() if who is not None]
        if not held:
            return self.walk()
        thing, who = self.rng.choice(held)
        self.holder[thing] = None
        self.facts.append(f"{who} {self.rng.choice(DROPS)} the {thing}.")

    def steps(self, count: int, *actions: Callable[[], None]) -> None:
        while len(self.facts) < count:
            self.rng.choice(actions)()


def _one_fact(rng: random.Random) -> Story | None:
    world = StoryWorld(rng, WALKERS)
    world.steps(2 * rng.randint(1, 5), world.walk)
    who = rng.choice(sorted(world.place))
    return Story("qa1", tuple(world.facts), f"Where is {who}?", world.place[who], PLACES)


def _two_facts(rng: random.Random) -> Story | None:
    world = StoryWorld(rng, WALKERS)
    world.steps(rng.randint(4, 24), world.walk, world.walk, world.take, world.drop)
    known = sorted(world.holder)
    if not known:
        return None
    thing = rng.choice(known)
    return Story("qa2", tuple(world.facts), f"Where is the {thing}?", world.been[thing][-1], PLACES)


def _three_facts(rng: random.Random) -> Story | None:
    world = StoryWorld(rng, WALKERS)
    world.steps(rng.randint(6, 40), world.walk, world.walk, world.take, world.drop)
    asked = [
        (thing, been[i], been[i - 1])
        for thing, been in world.been.items()
        for i in range(1, len(been))
        if been.count(been[i]) == 1  # a place visited once, so that "before" is unambiguous
    ]
    if not asked:
        return None
    thing, place, before = rng.choice(asked)
    return Story("qa3", tuple(world.facts), f"Where was the {thing} before the {place}?", before, PLACES)


def _two_arguments(rng: random.Random) -> Story | None:
    first, middle, second = rng.sample(PLACES, 3)
    directions = rng.sample(sorted(OPPOSITE), 2)
    facts = []
    for place, direction in zip((first, second), directions):
        if rng.random() < 0.5:
            facts.append(f"The {place} is {direction} of the {middle}.")
        else:
            facts.append(f"The {middle} is {OPPOSITE[direction]} of the {place}.")
    asked, direction = rng.choice(list(zip((first, second), directions)))
    if rng.random() < 0.5:
        question = f"What is {direction} of the {middle}?"
    else:
        question = f"What is the {middle} {OPPOSITE[direction]} of?"
    return Story("qa4", tuple(facts), question, asked, PLACES)


def _three_arguments(rng: random.Random) -> Story | None:
    world = StoryWorld(rng, GIVERS)
    given: list[tuple[str, str, str]] = []

    def give() -> None:
        held = [(thing, who) for thing, who in world.holder.items() if who is not None]
        if not held:
            return world.take()
        thing, who = rng.choice(held)
        other = rng.choice([p for p in GIVERS if p != who])
        place = world.place.setdefault(other, world.place[who])  # a person without a place is where the thing is given
        if place != world.place[who]:
            return world.walk()
        world.holder[thing] = other
        given.append((who, thing, other))
        world.facts.append(f"{who} {rng.choice(GIVES)} the {thing} to {other}.")

    world.steps(rng.randint(3, 24), world.walk, world.take, world.drop, give, give)
    if not given:
        return None
    who, thing, other = given[-1]
    question, answer = rng.choice(
        [
            (f"What did {who} give to {other}?", thing),
            (f"Who did {who} give the {thing} to?", other),
            (f"Who gave the {thing} to {other}?", who),
            (f"Who gave the {thing}?", who),
            (f"Who received the {thing}?", other),
        ]
    )
    return Story("qa5", tuple(world.facts), question, answer, (*GIVERS, *CARRIED_THINGS))


BABI_TASKS: dict[str, Callable[[random.Random], Story | None]] = {
    "qa1": _one_fact,
    "qa2": _two_facts,
    "qa3": _three_facts,
    "qa4": _two_arguments,
    "qa5": _three_arguments,
}


class Hidden:
    """A story in a text of exactly `length` tokens, which `pieces` yields; `question` follows the text.

    places: background position in front of which each fact is inserted; facts: their ids.
    """

    def __init__(self, told: Story, length: int, background: Background | None, start: int, places, facts, question):
        self.story, self.length, self.background, self.start = told, length, background, start
        self.places: list[int] = places
        self.facts: list[np.ndarray] = facts
        self.question: np.ndarray = question

    def pieces(self, block: int = 1 << 16) -> Iterator[np.ndarray]:
        """The ids of the text, in pieces of at most `block` tokens; the whole text is never in memory."""
        at = self.start
        for place, fact in zip(self.places, self.facts):
            if self.background is not None:
                yield from self.background.take(at, place, block)
            yield fact
            at = place
        if self.background is not None:
            yield from self.background.take(at, self.start + self.length - sum(map(len, self.facts)), block)

    def ids(self) -> np.ndarray:
        """The whole text as one array; only for lengths that fit into memory."""
        return np.concatenate(list(self.pieces()))


def hide(told: Story, length: int, tokenizer: Any, background: Background | None = None, seed: int = 0) -> Hidden:
    """Scatter a story's facts over `length` tokens of background, in order, each in front of a sentence. length 0: the facts only.

    >>> from mnemos.data.tasks import NOISE, Background, ByteTokenizer
    >>> sample = hide(story("qa1"), 5000, ByteTokenizer(), Background(NOISE, ByteTokenizer()))
    >>> sum(len(piece) for piece in sample.pieces())
    5000
    """
    facts = [np.asarray(encode(tokenizer, fact + " "), dtype=np.int64) for fact in told.facts]
    question = np.asarray(encode(tokenizer, f"\nQuestion: {told.question}\nAnswer:"), dtype=np.int64)
    needed = sum(map(len, facts))
    if length == 0:
        return Hidden(told, needed, None, 0, [0] * len(facts), facts, question)
    if length < needed:
        raise ValueError(f"length={length} cannot hold the {needed} tokens of the facts; 0 means the facts only")
    if background is None:
        raise ValueError(f"length={length} needs a background text; 0 means the facts only")
    rng = np.random.default_rng(seed)
    start, stop = background.stretch(length - needed, rng)
    places = [background.place(int(p), start) for p in np.sort(rng.integers(start, stop + 1, len(facts)))]
    return Hidden(told, length, background, start, places, facts, question)
