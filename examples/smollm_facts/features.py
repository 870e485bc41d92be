"""Hidden states of the frozen base below the memory, computed once and kept on disk.

The base does not change and nothing writes below the memory, so its layers up to the memory see each text once. Training then
touches the memory and the layers above it alone, and text between facts and questions costs only writes.

python features.py OUT --text FILE ... [--source 2] [--layer 29] [--dialogues 1200] [--text-tokens 300000] [--split train]
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dialogues import SYSTEM, Texts, asked, read, tokens, told
from facts import Fact, OpenWords, draw_facts
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mnemos.attach import smollm

SINKS = 4
WINDOW = 256
BATCH = 24
QUESTIONS = 6  # of a dialogue
POSITIONS = (80, 300, 1000, 3000, 6000, 10000, 16000)  # of the first token behind the sinks


@dataclass
class Segment:
    """Tokens that are read together behind the sinks. spans: of tokens (begin, end) of the values in it; answer: where the answer
    begins, for a question; ids: token ids; source (T, D): what the memory reads; states (T, D): of segments that are read as a whole, the
    stream in front of the layer to which the memory adds."""

    kind: str
    ids: list[int]
    spans: list[tuple[int, int]]
    answer: int = 0
    facts: tuple[Fact, ...] = ()
    position: int = 0
    is_whole: bool = False
    source: Tensor | None = None
    states: Tensor | None = None


def encode(tokenizer: Any, text: str, values: list[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and the spans of tokens that lie at spans of characters."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = []
    for begin, end in values:
        inside = [i for i, (a, b) in enumerate(found.offset_mapping) if a < end and b > begin]
        spans.append((inside[0], inside[-1] + 1))
    return found.input_ids, spans


def told_segment(tokenizer: Any, draw: random.Random, facts: list[Fact], split: str) -> Segment:
    text, spans = told(draw, facts, split), []
    lower = text.lower()
    for fact in facts:
        begin = lower.index(f"{fact.subject} is {fact.value}".lower()) + len(f"{fact.subject} is")
        spans.append((begin, begin + 1 + len(fact.value)))
    ids, found = encode(tokenizer, text, spans)
    return Segment("told", ids, found, facts=tuple(facts))


def question_segment(tokenizer: Any, draw: random.Random, fact: Fact, split: str, before: str = "") -> Segment:
    question = before + asked(draw, fact, split)
    begin = len(question) + len(fact.prefix)
    text = question + fact.answer + "<|im_end|>\n"
    ids, found = encode(tokenizer, text, [(begin, begin + 1 + len(fact.value))])
    return Segment("asked", ids, found, answer=len(tokens(tokenizer, question)), facts=(fact,))


def text_segment(tokenizer: Any, draw: random.Random, texts: Texts, split: str, length: int) -> Segment:
    text = read(draw, texts.piece(draw, 8 * length), split) if draw.random() < 0.2 else texts.piece(draw, 8 * length)
    return Segment("text", tokens(tokenizer, text)[:length], [])


class Below:
    """The layers of the base below `layer`, with the sinks at positions 0 to 3 and segments far behind them."""

    def __init__(self, model: Any, tokenizer: Any, source: int, layer: int):
        self.body, self.source, self.layer = model.model, source, layer
        self.sinks = tokens(tokenizer, SYSTEM)[:SINKS]

    @torch.no_grad()
    def __call__(self, segments: list[Segment], draw: random.Random) -> None:
        """Fill in the position and the states of segments, all of which are read as a whole, or none."""
        width, is_whole = max(len(s.ids) for s in segments), segments[0].is_whole
        for s in segments:
            s.position = draw.choice(POSITIONS)
        ids = torch.tensor([self.sinks + s.ids + [0] * (width - len(s.ids)) for s in segments])
        h = self.body.embed_tokens(ids)
        positions = positions_of([s.position for s in segments], width)
        angles, mask = self.body.rotary_emb(h, positions), causal(width + SINKS)
        for i in range(self.layer + 1 if is_whole else self.source + 1):
            if i == self.source:
                read = self.body.layers[i].input_layernorm(h)
                for s, row in zip(segments, read):
                    s.source = row[SINKS : SINKS + len(s.ids)].clone()
                self.sink_source = read[0, :SINKS].clone()
            if i == (self.layer if is_whole else self.source):
                break
            h = self.body.layers[i](h, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        if is_whole:
            for s, row in zip(segments, h):
                s.states = row[SINKS : SINKS + len(s.ids)].clone()
            self.sink_states = h[0, :SINKS].clone()


def positions_of(starts: list[int], width: int) -> Tensor:
    """(B, S + width): those of the sinks, then consecutive ones from each start."""
    sinks = torch.arange(SINKS).expand(len(starts), -1)
    return torch.cat([sinks, torch.tensor(starts).unsqueeze(1) + torch.arange(width)], dim=1)


def causal(width: int) -> Tensor:
    """(1, 1, T, T) bool: the window, and the sinks in front of it."""
    behind = torch.arange(width).unsqueeze(1) - torch.arange(width)
    return ((behind >= 0) & ((behind < WINDOW) | (torch.arange(width) < SINKS)))[None, None]


def make(tokenizer: Any, draw: random.Random, texts: Texts, options: Any) -> list[Segment]:
    """Segments of dialogues and text, without states. In a dialogue people share relations, and each has several."""
    segments, words = [], OpenWords.of(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    for n in range(options.dialogues):
        facts = draw_facts(
            draw, draw.choice([4, 8, 13, 16]), options.split, words=words if options.split == "train" else None
        )
        segments.append(told_segment(tokenizer, draw, facts, options.split))
        for fact in draw.sample(facts, min(QUESTIONS, len(facts))):
            before = (
                "" if draw.random() < 0.75 else read(draw, texts.piece(draw, draw.randrange(20, 300)), options.split)
            )
            segments.append(question_segment(tokenizer, draw, fact, options.split, before))
            segments[-1].is_whole = n * QUESTIONS < options.questions
    for n in range(options.text_tokens // 250):
        segments.append(text_segment(tokenizer, draw, texts, options.split, 250))
        segments[-1].is_whole = n * 250 < options.whole_text
    return segments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--source", type=int, default=2)
    parser.add_argument("--layer", type=int, default=29)
    parser.add_argument("--dialogues", type=int, default=1200)
    parser.add_argument("--text-tokens", type=int, default=300_000)
    parser.add_argument("--questions", type=int, default=1500, help="questions that are read up to --layer")
    parser.add_argument("--whole-text", type=int, default=30_000, help="tokens of text that are read up to --layer")
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    folder = smollm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    texts = Texts([Path(p) for p in options.text], (0.0, 0.9) if options.split == "train" else (0.9, 1.0))
    segments = make(tokenizer, draw, texts, options)
    below, begin, done = Below(model, tokenizer, options.source, options.layer), time.time(), 0
    batches = []
    for kind in (("told", False), ("asked", False), ("text", False), ("asked", True), ("text", True)):
        some = sorted((s for s in segments if (s.kind, s.is_whole) == kind), key=lambda s: len(s.ids))
        batches += [some[i : i + BATCH] for i in range(0, len(some), BATCH)]
    for n, part in enumerate(batches):
        below(part, draw)
        done += sum(len(s.ids) for s in part)
        if n % 20 == 0:
            print(
                f"{n + 1}/{len(batches)} batches, {done:,} tokens, {done / (time.time() - begin):.0f} tokens/s",
                flush=True,
            )
    kept = {"source": options.source, "layer": options.layer, "sinks": (below.sink_source, below.sink_states)}
    torch.save(kept | {"segments": [vars(s) for s in segments]}, options.out)


if __name__ == "__main__":
    main()
