"""Dialogues in which a user states facts, later asks for them, and reads other text in between.

Names, values and the sentences that state and ask for facts are split: those of `split="test"` never occur in training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


def words(text: str) -> list[str]:
    return text.split()


NAMES = {
    "train": words(
        "Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Liam Maria Noah Olivia Peter Quinn Rosa "
        "Sam Tina Uma Victor Wendy Xavier Yara Zoe Adam Bella Carl Diana Eric Fiona George Hannah Ivan Julia "
        "Kevin Laura Mark Nina Oscar Paula Ralph Sarah Tom Ursula Vera Walter Alice Bruno Cora Dennis Elena "
        "Felix Gina Hugo Ida Jonas Karen Leo Mia Nathan Olga Paul Rita Simon Tara Louis Molly Ethan Amy Chris "
        "Daisy Edward Flora Gary Helen Isaac Jane Keith Lucy Martin Nora Owen Penny Robert Susan Tim Vivian"
    ),
    "test": words(
        "Arthur Bridget Conrad Dora Elliot Faye Gordon Hazel Igor Joanna Kurt Lydia Miles Naomi Oliver Phoebe "
        "Roger Stella Theo Violet William Abigail Bernard Celia Dominic Esther"
    ),
}
VALUES = {  # each begins with a token of its own
    "pet": "cat dog parrot rabbit horse turtle hamster snake goat lizard duck pig",
    "favorite color": "red blue green yellow purple orange black white pink brown silver gold",
    "home city": "Paris London Berlin Madrid Rome Vienna Tokyo Boston Chicago Dublin Moscow Sydney",
    "job": "teacher doctor farmer pilot lawyer nurse writer painter engineer chef singer dentist",
    "favorite food": "pizza pasta soup rice bread cheese salad fish cake curry eggs beans",
    "instrument": "piano violin guitar flute drums cello harp trumpet organ saxophone banjo clarinet",
    "favorite sport": "tennis football golf hockey swimming boxing chess running cycling skiing rowing baseball",
    "lucky number": "seven three nine twelve twenty eleven five thirteen forty fifteen sixty eight",
    "favorite month": "January February March April May June July August September October November December",
    "favorite drink": "tea coffee milk water juice wine beer cocoa lemonade cider soda rum",
}
RELATIONS = {name: words.split() for name, words in VALUES.items()}
TELL = {
    "train": [
        "{name}'s {relation} is {value}.",
        "Please remember that {name}'s {relation} is {value}.",
        "By the way, {name}'s {relation} is {value}.",
        "You should know that {name}'s {relation} is {value}.",
        "I heard that {name}'s {relation} is {value}.",
        "Remember: {name}'s {relation} is {value}.",
    ],
    "test": ["Keep in mind that {name}'s {relation} is {value}.", "One more thing: {name}'s {relation} is {value}."],
}
ASK = {
    "train": [
        "What is {name}'s {relation}?",
        "Do you remember {name}'s {relation}?",
        "Can you tell me {name}'s {relation}?",
        "Tell me {name}'s {relation}.",
    ],
    "test": ["I forgot {name}'s {relation}. What is it?", "Please remind me of {name}'s {relation}."],
}
REPLY = "Okay, I will remember that."
ANSWER = "{name}'s {relation} is"


@dataclass(frozen=True)
class Fact:
    name: str
    relation: str
    value: str

    def tell(self, template: str) -> str:
        return template.format(name=self.name, relation=self.relation, value=self.value)

    def ask(self, template: str) -> str:
        return template.format(name=self.name, relation=self.relation)

    @property
    def prefix(self) -> str:
        """The beginning of the answer, before the value."""
        return ANSWER.format(name=self.name, relation=self.relation)


def draw_facts(draw: random.Random, count: int, split: str) -> list[Fact]:
    """Facts with distinct pairs of name and relation; names and relations repeat, so that neither alone gives the answer.

    >>> [fact.name in NAMES["test"] for fact in draw_facts(random.Random(0), 2, "test")]
    [True, True]
    """
    names = draw.sample(NAMES[split], max(2, (count + 1) // 2))
    relations = draw.sample(sorted(RELATIONS), min(len(RELATIONS), max(2, (count + 1) // 2)))
    pairs = [(name, relation) for name in names for relation in relations]
    return [Fact(name, relation, draw.choice(RELATIONS[relation])) for name, relation in draw.sample(pairs, count)]


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def stated(draw: random.Random, facts: list[Fact], split: str) -> str:
    """The turns in which the facts are told, several in one turn at times."""
    turns, left = [], list(facts)
    while left:
        count = draw.choice([1, 1, 2])
        told, left = left[:count], left[count:]
        turns.append(user(" ".join(f.tell(draw.choice(TELL[split])) for f in told)) + REPLY + "<|im_end|>\n")
    return "".join(turns)


def asked(draw: random.Random, fact: Fact, split: str) -> str:
    """The turn that asks for a fact, up to the answer."""
    return user(fact.ask(draw.choice(ASK[split])))


def answered(fact: Fact) -> str:
    return f"{fact.prefix} {fact.value}."
