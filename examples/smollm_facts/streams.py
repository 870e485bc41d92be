"""Streams for training: the states of told facts, of text, and of questions, from the files of features.py.

Shapes: R rows, L tokens of a told dialogue, Q questions, T tokens of a question, D width.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from facts import Fact
from features import Segment
from torch import Tensor


@dataclass
class Told:
    """A dialogue in the memory. row: in the batch; where: first index of each fact's value among the values of the row; tokens, ids:
    (N,) places and ids of the tokens of values."""

    row: int
    where: dict[Fact, int]
    tokens: Tensor
    ids: Tensor


@dataclass
class Question:
    """A question for a told dialogue. index: in the batch; own: index of the first token of its value among the values of the row."""

    index: int
    row: int
    own: int
    segment: Segment


@dataclass
class Batch:
    """write: what the memory reads of told dialogues (R, L, D), mask, is_value: (R, L). ask: of questions (Q, T, D), ask_mask (Q, T)."""

    write: Tensor
    mask: Tensor
    is_value: Tensor
    told: list[Told]
    ask: Tensor
    ask_mask: Tensor
    questions: list[Question]

    @property
    def owners(self) -> Tensor:
        """(Q,) the row of each question."""
        return torch.tensor([question.row for question in self.questions])


class Streams:
    """Draws batches from the files of features.py."""

    def __init__(self, paths: list[Path]):
        dialogues: dict[tuple, tuple[Segment, list[Segment]]] = {}
        self.texts: list[Segment] = []
        asked: list[Segment] = []
        for path in paths:
            with torch.serialization.safe_globals([Fact]):  # the one class that these files hold beside tensors
                kept = torch.load(path, weights_only=True, mmap=True)
            self.source, self.layer = kept["source"], kept["layer"]
            self.sink_source, self.sinks = kept["sinks"]
            for fields in kept["segments"]:
                segment = Segment(**fields)
                if segment.kind == "text":
                    self.texts.append(segment)
                elif segment.kind == "told":
                    dialogues[segment.facts] = (segment, [])
                else:
                    asked.append(segment)
        by_fact = {fact: entry for facts, entry in dialogues.items() for fact in facts}
        for segment in asked:
            by_fact[segment.facts[0]][1].append(segment)
        self.entries = [entry for entry in dialogues.values() if entry[1]]
        self.whole_entries = [entry for entry in self.entries if any(s.states is not None for s in entry[1])]
        self.whole_texts = [s for s in self.texts if s.states is not None]

    def draw(self, draw: random.Random, rows: int, questions: int, is_whole: bool = False) -> Batch:
        """rows dialogues and `questions` questions to each. is_whole: questions whose stream above is kept."""
        return self.batch(
            [(told, draw.sample(some, min(questions, len(some)))) for told, some in self._entries(draw, rows, is_whole)]
        )

    def _entries(self, draw: random.Random, rows: int, is_whole: bool):
        for told, asked in draw.sample(self.whole_entries if is_whole else self.entries, rows):
            yield told, [s for s in asked if s.states is not None] if is_whole else asked

    def batch(self, entries: list[tuple[Segment, list[Segment]]]) -> Batch:
        """The batch of these dialogues and their questions."""
        write, mask = pad([told.source for told, _ in entries])
        is_value, told, questions = torch.zeros_like(mask), [], []
        for row, (segment, asked) in enumerate(entries):
            where, tokens = {}, []
            for fact, (a, b) in zip(segment.facts, segment.spans):
                where[fact] = len(tokens)
                tokens += range(a, b)
            is_value[row, tokens] = True
            ids = torch.tensor([segment.ids[i] for i in tokens])
            told.append(Told(row, where, torch.tensor(tokens), ids))
            for s in asked:
                questions.append(Question(len(questions), row, where[s.facts[0]], s))
        ask, ask_mask = pad([question.segment.source for question in questions])
        return Batch(write, mask, is_value, told, ask, ask_mask, questions)


def pad(states: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(R, L, D), padded on the right, and its mask."""
    width = max(len(x) for x in states)
    out = torch.zeros(len(states), width, states[0].shape[-1], dtype=states[0].dtype)
    mask = torch.zeros(len(states), width, dtype=torch.bool)
    for row, x in enumerate(states):
        out[row, : len(x)] = x
        mask[row, : len(x)] = True
    return out, mask
