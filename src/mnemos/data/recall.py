"""A synthetic recall task: facts hidden in a long text, and a question about one of them at the end."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils.data import Dataset

from .labels import IGNORED
from .long_context import token_ids
from .tasks.text import check_tokenizer
from .tokenizer import ByteTokenizer, Tokenizer

SUBJECTS = (
    "The old clock",
    "A quiet river",
    "The night train",
    "Our neighbour",
    "The tall lighthouse",
    "A small garden",
)
VERBS = ("waits beside", "passes", "is older than", "stands near", "looks like", "was built before")
OBJECTS = ("the market", "a stone bridge", "the empty house", "the northern road", "a field of wheat", "the harbour")


class RecallDataset(Dataset):
    """Samples of `context_length` tokens: filler with `num_facts` facts at random positions, then "Question: What is the answer of
    fact 1234? Answer: 567." Only the answer has labels. Sample i depends only on the seed and i.

    >>> sample = RecallDataset(num_samples=3, context_length=512)[0]
    >>> len(sample["input_ids"]), sample["question"] in sample["facts"]
    (512, True)
    """

    def __init__(
        self,
        num_samples: int = 1000,
        context_length: int = 2048,
        num_facts: int = 5,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
    ):
        if num_samples < 1 or not 1 <= num_facts <= 9000:
            raise ValueError(
                f"num_samples must be >= 1 and num_facts in 1..9000, but are {num_samples} and {num_facts}"
            )
        self.num_samples, self.context_length, self.num_facts, self.seed = num_samples, context_length, num_facts, seed
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        check_tokenizer(self.tokenizer)
        self[0]  # raises now if the context is too short for its facts

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """input_ids, labels, attention_mask (context_length,); facts {number: answer}, question (a number), answer (a string)."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        chance = random.Random(f"{self.seed} {index}")
        facts = {number: chance.randrange(100, 1000) for number in chance.sample(range(1000, 10000), self.num_facts)}
        question = chance.choice(list(facts))
        answer = token_ids(self.tokenizer, f" {facts[question]}.")
        asked = token_ids(self.tokenizer, f"Question: What is the answer of fact {question}? Answer:")
        told = [token_ids(self.tokenizer, f"Fact {number}: The answer is {value}. ") for number, value in facts.items()]
        room = self.context_length - len(asked) - len(answer) - sum(map(len, told))
        if room < 0:
            least = self.context_length - room
            raise ValueError(
                f"context_length must be at least {least} tokens for {self.num_facts} facts, but is {self.context_length}"
            )
        filler = self._filler(chance, room)
        places = sorted(chance.randrange(len(filler) + 1) for _ in told)
        ids: list[int] = []
        for place, sentence in enumerate([*filler, []]):
            for fact in (fact for at, fact in zip(places, told) if at == place):
                ids += list(fact)
            ids += list(sentence)
        ids += [*asked, *answer]
        input_ids = torch.tensor([int(x) for x in ids])
        labels = input_ids.clone()
        labels[: len(ids) - len(answer)] = IGNORED
        return {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": torch.ones_like(input_ids),
            "facts": facts,
            "question": question,
            "answer": str(facts[question]),
        }

    def _filler(self, chance: random.Random, room: int) -> list[list[int]]:
        """Filler sentences with `room` tokens in total; the first one is cut to fit."""
        sentences = []
        while room > 0:
            text = f"{chance.choice(SUBJECTS)} {chance.choice(VERBS)} {chance.choice(OBJECTS)}. "
            ids = list(token_ids(self.tokenizer, text))[-room:]
            sentences.append(ids)
            room -= len(ids)
        return sentences[::-1]
