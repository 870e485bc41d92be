"""Dialogues in which a user states facts, lets the model read other text, and asks for the facts, as token ids."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from facts import ASK, REPLY, TELL, Fact

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
READ = {
    "train": ["Read this: {text}", "{text}", "Here is a text. {text}"],
    "test": ["Have a look at this text: {text}"],
}


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def reply(text: str) -> str:
    return f"{text}<|im_end|>\n"


def told(draw: random.Random, facts: list[Fact], split: str) -> str:
    """The turns in which facts are told, sometimes two or three in a turn."""
    turns, left = [], list(facts)
    while left:
        count = draw.choice([1, 1, 2, 3])
        now, left = left[:count], left[count:]
        turns.append(
            user(" ".join(fact.tell(draw.choice(TELL[split])) for fact in now)) + reply(draw.choice(REPLY[split]))
        )
    return "".join(turns)


def asked(draw: random.Random, fact: Fact, split: str) -> str:
    """The turn that asks for a fact, up to the answer."""
    return user(fact.ask(draw.choice(ASK[split])))


def read(draw: random.Random, text: str, split: str) -> str:
    """A turn in which the user shows a text."""
    return user(draw.choice(READ[split]).format(text=text)) + reply(draw.choice(REPLY[split]))


class Texts:
    """Pieces of files. share: the part of each file that is used, as (0.0, 0.9)."""

    def __init__(self, paths: list[Path], share: tuple[float, float]):
        self.texts = []
        for path in paths:
            text = path.read_text(errors="ignore")
            self.texts.append(text[int(share[0] * len(text)) : int(share[1] * len(text))])
        self.weights = [len(text) for text in self.texts]

    def piece(self, draw: random.Random, characters: int) -> str:
        (text,) = draw.choices(self.texts, self.weights)
        start = draw.randrange(max(1, len(text) - characters))
        return text[start : start + characters]


def tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids
