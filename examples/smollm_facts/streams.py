"""Streams for training: the states of told facts, of text behind them, and of questions, from the files of features.py.

Shapes: R rows, L tokens of a stream, T tokens of a question, D width.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from facts import Fact
from features import Segment
from torch import Tensor


@dataclass
class Batch:
    """write: what the memory reads (R, L, D) that are written before the questions, with ids and mask (R, L). is_told, is_value: (R, L), the tokens of dialogues and of values in them.
    ask, states: what the memory reads and the stream above, (Q, T, D), with ids and mask (Q, T), of the questions; owner: (Q,) their rows; answer: (Q, T), the tokens of answers; value:
    (Q, T), those of the values in it; start: positions. pairs: (P, 4), row and token of a told value, question and token of the same."""

    write: Tensor
    write_ids: Tensor
    mask: Tensor
    is_told: Tensor
    is_value: Tensor
    ask: Tensor
    states: Tensor
    ids: Tensor
    ask_mask: Tensor
    owner: Tensor
    answer: Tensor
    value: Tensor
    start: list[int]
    pairs: Tensor


@dataclass
class Windows:
    """keys: what the memory reads up to each told value (R, N, W, D), with ids and mask (R, N). queries: the same up to the token in front
    of a value in an answer (P, W, D). pairs: (P, 2), row and index of the told value."""

    keys: Tensor
    ids: Tensor
    mask: Tensor
    queries: Tensor
    pairs: Tensor


class Streams:
    """Draws batches. Dialogues are combined freely: each told segment was read for itself.

    layer: the streams of questions are those in front of this layer, by default the highest of the files; other files give facts and
    texts alone.
    """

    def __init__(self, paths: list[Path], layer: int | None = None):
        self.dialogues: dict[tuple, tuple[Segment, list[Segment]]] = {}
        self.texts: list[Segment] = []
        asked: list[Segment] = []
        with torch.serialization.safe_globals(
            [Fact]
        ):  # the one class that these files hold beside tensors; nothing else is opened
            files = [torch.load(path, weights_only=True, mmap=True) for path in paths]
        self.layer = max(kept["layer"] for kept in files) if layer is None else layer
        for kept in sorted(files, key=lambda kept: kept["layer"]):
            self.source, self.sink_source = kept["source"], kept["sinks"][0]
            if kept["layer"] == self.layer:
                self.sinks = kept["sinks"][1]
            for fields in kept["segments"]:
                segment = Segment(**fields)
                if kept["layer"] != self.layer:
                    segment.states = None  # of another layer: good for keys and queries alone
                if segment.kind == "text":
                    self.texts.append(segment)
                elif segment.kind == "told":
                    self.dialogues[segment.facts] = (segment, [])
                else:
                    asked.append(segment)
        by_fact = {fact: entry for facts, entry in self.dialogues.items() for fact in facts}
        for segment in asked:
            by_fact[segment.facts[0]][1].append(segment)
        self.entries = [entry for entry in self.dialogues.values() if entry[1]]

    def draw(self, draw: random.Random, rows: int, most_told: int, between: int, questions: int = 2) -> Batch:
        """rows streams of 1 to most_told dialogues and up to `between` tokens of text, and `questions` questions to each."""
        written, written_ids, values, asks, owner, pairs = [], [], [], [], [], []
        while len(written) < rows:
            row, told = len(written), self._different(draw, draw.randint(1, most_told))
            candidates = [s for entry in told for s in entry[1] if s.states is not None]
            if not candidates:
                continue
            parts: list[Segment] = [entry[0] for entry in told]
            room = 0 if not between else draw.randint(0, between)
            while room > 0 and self.texts:
                text = draw.choice(self.texts)
                place = draw.randint(0, len(parts)) if draw.random() < 0.3 else len(parts)
                parts.insert(place, text)
                room -= len(text.ids)
            begin, where, spans, told_at = 4, {}, [], [(0, 4)]
            for part in parts:
                for fact, (a, b) in zip(part.facts, part.spans):
                    where[fact] = (begin + a, begin + b)
                    spans.append((begin + a, begin + b))
                if part.kind == "told":
                    told_at.append((begin, begin + len(part.ids)))
                begin += len(part.ids)
            written.append(torch.cat([self.sink_source, *(part.source for part in parts)]))
            written_ids.append([0] * 4 + [i for part in parts for i in part.ids])
            values.append((spans, told_at))
            for segment in draw.sample(candidates, min(questions, len(candidates))):
                (a, b), (c, _) = where[segment.facts[0]], segment.spans[0]
                pairs += [(row, a + i, len(asks), c + i) for i in range(b - a)]
                asks.append(segment)
                owner.append(row)
        write, mask = _pad(written)
        is_value, write_ids = torch.zeros(mask.shape, dtype=torch.bool), torch.zeros(mask.shape, dtype=torch.int64)
        for row, some in enumerate(written_ids):
            write_ids[row, : len(some)] = torch.tensor(some)
        is_told = torch.zeros_like(is_value)
        for row, (spans, told_at) in enumerate(values):
            for marks, found in ((is_value, spans), (is_told, told_at)):
                for a, b in found:
                    marks[row, a:b] = True
        (ask, ask_mask), (states, _) = _pad([s.source for s in asks]), _pad([s.states for s in asks])
        ids = torch.zeros(ask_mask.shape, dtype=torch.int64)
        answer, value = torch.zeros_like(ask_mask), torch.zeros_like(ask_mask)
        for q, s in enumerate(asks):
            ids[q, : len(s.ids)] = torch.tensor(s.ids)
            answer[q, s.answer : len(s.ids)] = True
            value[q, s.spans[0][0] : s.spans[0][1]] = True
        start = [s.position for s in asks]
        return Batch(
            write,
            write_ids,
            mask,
            is_told,
            is_value,
            ask,
            states,
            ids,
            ask_mask,
            torch.tensor(owner),
            answer,
            value,
            start,
            torch.tensor(pairs),
        )

    def whole_texts(self, draw: random.Random, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
        """Texts as what the memory reads and the stream above (N, T, D), with ids and mask (N, T), and their positions."""
        some = draw.sample([s for s in self.texts if s.states is not None], count)
        (source, mask), (states, _) = _pad([s.source for s in some]), _pad([s.states for s in some])
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        for row, s in enumerate(some):
            ids[row, : len(s.ids)] = torch.tensor(s.ids)
        return source, states, ids, mask, [s.position for s in some]

    def gate_tokens(self, draw: random.Random, dialogues: int, texts: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the memory reads at told values, at other tokens of dialogues, and in texts: (N, D) each."""
        values, others = [], []
        for _ in range(dialogues):
            told, asked = draw.choice(self.entries)
            is_value = torch.zeros(len(told.ids), dtype=torch.bool)
            for a, b in told.spans:
                is_value[a:b] = True
            values.append(told.source[is_value])
            others += [told.source[~is_value], asked[0].source[: asked[0].answer]]
        return torch.cat(values), torch.cat(others), torch.cat([draw.choice(self.texts).source for _ in range(texts)])

    def windows(self, draw: random.Random, rows: int, dialogues: int, width: int) -> Windows:
        """All told values of a few dialogues, as if nothing else had been written, and questions for some of them."""
        keys, ids, queries, pairs = [], [], [], []
        for row in range(rows):
            own: list[Tensor] = []
            own_ids: list[int] = []
            for told, asked in self._different(draw, dialogues):
                place = {}
                for fact, (a, b) in zip(told.facts, told.spans):
                    place[fact] = len(own)
                    own += [_last(told.source, i + 1, width) for i in range(a, b)]
                    own_ids += told.ids[a:b]
                for segment in asked:
                    for i in range(*segment.spans[0]):
                        pairs.append((row, place[segment.facts[0]] + i - segment.spans[0][0]))
                        queries.append(_last(segment.source, i, width))
            keys.append(torch.stack(own))
            ids.append(own_ids)
        most = max(map(len, ids))
        mask = torch.stack([torch.arange(most) < len(x) for x in ids])
        padded = torch.stack([F.pad(x, (0, 0, 0, 0, 0, most - len(x))) for x in keys])
        return Windows(
            padded,
            torch.tensor([x + [0] * (most - len(x)) for x in ids]),
            mask,
            torch.stack(queries),
            torch.tensor(pairs),
        )

    def _different(self, draw: random.Random, count: int) -> list:
        """Dialogues without a common name."""
        found, names = [], set()
        while len(found) < count:
            entry = draw.choice(self.entries)
            new = {fact.name for fact in entry[0].facts}
            if not new & names:
                found.append(entry)
                names |= new
        return found


def _last(states: Tensor, end: int, width: int) -> Tensor:
    """(width, D): the states in front of `end`, zeros before the first."""
    found = states[max(0, end - width) : end]
    return torch.cat([states.new_zeros(width - len(found), states.shape[1]), found])


def _pad(states: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(R, L, D), padded on the right, and its mask."""
    width = max(len(x) for x in states)
    out = torch.zeros(len(states), width, states[0].shape[-1], dtype=states[0].dtype)
    mask = torch.zeros(len(states), width, dtype=torch.bool)
    for row, x in enumerate(states):
        out[row, : len(x)] = x
        mask[row, : len(x)] = True
    return out, mask
