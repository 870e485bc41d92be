"""The facts game: sentences about people and things, as tokens of the demo's model.

The model's vocabulary is 32 people and 32 things, one token each. A fact is a person and a thing; a question is a person, behind
a few bytes of text, as in its training.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..choices import nearest
from .facts import PEOPLE, THINGS, VOCABULARY, word

IDS: dict[str, int] = {name.lower(): 256 + i for i, name in enumerate((*PEOPLE, *THINGS))}
FIRST_THING = 256 + len(PEOPLE)
FILLERS = frozenset("remember that is has have owns the a an and now what does did who whose thing of please".split())  # noqa: SIM905
BEFORE_QUESTION = " and then "  # bytes; without text between facts and questions the model takes a question for a fact


def is_question(text: str) -> bool:
    """Whether a line asks.

    >>> is_question("what is Alice"), is_question("Alice?"), is_question("Alice is lamp")
    (True, True, False)
    """
    words = text.lower().split()
    return text.rstrip().endswith("?") or words[:1] in (["what"], ["what's"], ["who"])


def person_in(text: str) -> str | None:
    """The first person of a line."""
    return next((word(i) for i in _known(text) if i < FIRST_THING), None)


class FactsTokenizer:
    """Facts and questions as tokens. A sentence that is neither raises a ValueError.

    >>> tokenizer = FactsTokenizer()
    >>> tokenizer.encode("remember Alice is lamp"), tokenizer.decode([288])
    ([256, 288], 'lamp')
    >>> tokenizer.encode("remember Alice is dog")
    Traceback (most recent call last):
    ValueError: the model has no word 'dog': it has only 32 people, such as Alice, and 32 things, such as lamp (/help lists them)
    """

    name = "facts"
    vocab_size = VOCABULARY
    eos_token_id = bos_token_id = pad_token_id = None

    def encode(self, text: str) -> list[int]:
        """Tokens of one or more facts, or of one question."""
        found = [_id(name) for name in _words(text)]
        if is_question(text):
            if len(found) != 1 or found[0] >= FIRST_THING:
                raise ValueError("a question names exactly one person: what is Alice?")
            return [*BEFORE_QUESTION.encode(), *found]
        people, things = found[0::2], found[1::2]
        right = len(people) == len(things) and max(people, default=VOCABULARY) < FIRST_THING
        if not right or min(things) < FIRST_THING:
            raise ValueError("a fact is a person and a thing: remember Alice is lamp")
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Words of tokens, and text of bytes."""
        text = ""
        for i in ids:
            text += f" {word(i)} " if i >= 256 else bytes([i]).decode(errors="replace")
        return " ".join(text.split())


def _words(text: str) -> list[str]:
    """The words of a line that carry meaning."""
    found = re.findall(r"[\w']+", text)
    return [name.removesuffix("'s") for name in found if name.lower().removesuffix("'s") not in FILLERS]


def _known(text: str) -> list[int]:
    return [IDS[name.lower()] for name in _words(text) if name.lower() in IDS]


def _id(name: str) -> int:
    if name.lower() in IDS:
        return IDS[name.lower()]
    close = nearest(name, (*PEOPLE, *THINGS))
    hint = f" (did you mean {close}?)" if close else ""
    raise ValueError(
        f"the model has no word {name!r:.40}{hint}: it has only {len(PEOPLE)} people, such as {PEOPLE[0]}, and {len(THINGS)} things, "
        f"such as {THINGS[0]} (/help lists them)"
    )
