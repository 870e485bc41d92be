"""Needle in a haystack, depth by length; the answer is scored by generation and by likelihood."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..choices import unknown
from ..data.tasks import NEEDLE_TASKS, Background, Needle, needle, needle_of
from .model_adapter import LanguageModel, Past
from .recall import ProgressCallback
from .settings import DEPTHS


def score_needles(
    lm: LanguageModel, samples: Sequence[Needle], generate: bool = True, progress: ProgressCallback | None = None
) -> list[dict[str, Any]]:
    """Score samples. generated: the greedy continuation contains the answer, as RULER scores. likelihood: the answer is the likeliest option
    per token. A prompt is read once, in pieces, for both."""
    found: list[dict[str, Any]] = []

    def asked() -> Iterator[tuple[Past, int, tuple[str, ...]]]:
        for sample in samples:
            past = lm.read([sample.ids])
            found.append({"likelihood": lm.choice(past, sample.options, sample.right)})
            if generate:
                yield past, max(len(lm.encode(f" {option}")) for option in sample.options) + 8, ()
            if progress is not None:
                progress(1)

    for i, said in enumerate(lm.continue_all(asked())):
        found[i] |= {"generated": float(samples[i].answer.lower() in said.lower()), "said": said}
    return found


def needle_suite(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str] = ("passkey",),
    lengths: Sequence[int] = (1024, 2048, 4096),
    depths: Sequence[float] = DEPTHS,
    samples: int = 5,
    background: Background | None = None,
    distractors: int = 9,
    generate: bool = True,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> list[dict[str, Any]]:
    """The scores of every task, length and depth: {"task", "length", "depth", "samples", "generated", "likelihood", "chance"}.

    >>> from mnemos.data.tasks import ByteTokenizer
    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("titans-lmm"))
    >>> row = needle_suite(model, ByteTokenizer(), lengths=[512], depths=[0.5], samples=1, generate=False)[0]
    >>> row["task"], row["length"], row["chance"]
    ('passkey', 512, 0.1)
    """
    lm = LanguageModel.of(model, tokenizer)
    wrong = [task for task in tasks if task not in NEEDLE_TASKS]
    if wrong:
        raise unknown("task", wrong[0], NEEDLE_TASKS)
    rows = []
    for task in tasks:
        for length in lengths:
            for depth in depths:
                seeds = range(seed * 100_003, seed * 100_003 + samples)
                made = [needle(task, length, depth, lm.tokenizer, background, distractors, seed=i) for i in seeds]
                found = score_needles(lm, made, generate, progress)
                row = {"task": task, "length": length, "depth": depth, "samples": samples}
                row |= {"chance": 1 / (distractors + 1), "likelihood": _mean(found, "likelihood")}
                rows.append(row | ({"generated": _mean(found, "generated")} if generate else {}))
    return rows


def needle_in_haystack_test(
    model: Any,
    tokenizer: Any,
    needle: str,
    haystack: str,
    question: str,
    answer: str | None = None,
    positions: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
    max_length: int = 2048,
    options: Sequence[str] = (),
    seed: int = 0,
) -> dict[str, Any]:
    """Hide a sentence in a text at several depths, ask for it, and score the answer. Each prompt has exactly max_length tokens; a short
    haystack is repeated.

    answer: the text to find (default: the part of the needle after its last " is " or ":"). options: wrong answers.
    """
    lm = LanguageModel.of(model, tokenizer)
    answer = answer or answer_of(needle)
    background = Background(haystack, lm.tokenizer)
    others = tuple(options)
    made = [
        needle_of(needle, question, answer, max_length, p, lm.tokenizer, background, others, seed) for p in positions
    ]
    rows = [{"position": p, "length": max_length} | row for p, row in zip(positions, score_needles(lm, made))]
    return {
        "answer": answer,
        "generated": _mean(rows, "generated"),
        "likelihood": _mean(rows, "likelihood"),
        "chance": 1 / len(made[0].options),
        "positions": rows,
    }


def answer_of(needle: str) -> str:
    """The part of a needle after its last " is ", " are " or ":".

    >>> answer_of("The best thing to do in Rome is to eat pizza.")
    'to eat pizza'
    """
    found = re.split(r"\bis\b|\bare\b|:", needle)
    answer = found[-1].strip().strip(".!?\"'")
    if len(found) < 2 or not answer:
        raise ValueError(f'the needle {needle!r} has no " is ", " are " or ":" before its answer: give answer=')
    return answer


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)
