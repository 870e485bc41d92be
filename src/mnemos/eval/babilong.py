"""BABILong-style questions: facts scattered over 0 to millions of tokens, read through the state, with a question at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..data.tasks import BABI_TASKS, Background, Hidden, Story, hide, story
from ..parsing import parse_json
from .model_adapter import LanguageModel, Past, state_bytes
from .recall import ProgressCallback


def is_right(said: str, answer: str, question: str, options: Sequence[str]) -> bool:
    """Whether a continuation gives the answer, by BABILong's score: its first sentence names this answer and no other possible answer,
    except those that the question names.

    >>> is_right(" the kitchen. Mary", "kitchen", "Where is Mary?", ("kitchen", "garden"))
    True
    >>> is_right(" kitchen or garden", "kitchen", "Where is Mary?", ("kitchen", "garden"))
    False
    """
    first, question = said.lower().split(".")[0], question.lower()
    named = {option for option in options if option.lower() in first and option.lower() not in question}
    return {option.lower() for option in named} == {answer.lower()}


def ask(
    lm: LanguageModel, samples: Iterable[Hidden], generate: bool = True, progress: ProgressCallback | None = None
) -> list[dict[str, Any]]:
    """Read samples in pieces, ask their questions, and score the answers both ways. Also returns the state's bytes and tokens per second."""
    found: list[dict[str, Any]] = []
    stories: list[Story] = []

    def asked() -> Iterator[tuple[Past, int, tuple[str, ...]]]:
        for sample in samples:
            told, began = sample.story, time.perf_counter()
            past = lm.read(sample.pieces())
            seconds = time.perf_counter() - began
            row = {"tokens_per_second": sample.length / seconds, "state_bytes": state_bytes(past.state)}
            past = lm.read([sample.question], past)
            row["likelihood"] = lm.choice(past, told.options, told.options.index(told.answer))
            found.append(row)
            stories.append(told)
            if generate:
                yield past, max(len(lm.encode(f" {option}")) for option in told.options) + 8, (".", "\n")
            if progress is not None:
                progress(1)

    for said, row, told in zip(lm.continue_all(asked()), found, stories):
        row |= {"generated": float(is_right(said, told.answer, told.question, told.options)), "said": said}
    return found


def babilong_suite(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str] = tuple(BABI_TASKS),
    lengths: Sequence[int] = (0, 1000, 2000, 4000),
    samples: int = 10,
    background: Background | None = None,
    generate: bool = True,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> list[dict[str, Any]]:
    """Every task at every length (in tokens; 0: the facts only): accuracy by likelihood and by generation, and chance.

    The background should not mention the people and things of the stories: Background(text, tokenizer, drop=mentions_names).
    If a sample's facts do not fit into a length, that text is as long as its facts.

    >>> from mnemos.data.tasks import ByteTokenizer
    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("titans-lmm"))
    >>> babilong_suite(model, ByteTokenizer(), ["qa4"], [0], samples=1, generate=False)[0]["length"]
    0
    """
    lm = LanguageModel.of(model, tokenizer)
    rows = []
    for task in tasks:
        for length in lengths:
            seeds = range(seed * 100_003, seed * 100_003 + samples)
            found = ask(lm, (_sample(lm, task, length, background, i) for i in seeds), generate, progress)
            rows.append({"task": task, "length": length, "chance": 1 / len(story(task).options)} | _means(found))
    return rows


def _sample(lm: LanguageModel, task: str, length: int, background: Background | None, seed: int) -> Hidden:
    told = story(task, seed)
    needed = sum(len(lm.encode(fact + " ")) for fact in told.facts)
    return hide(told, max(length, needed) if length else 0, lm.tokenizer, background, seed)


def public_babilong(
    model: Any,
    tokenizer: Any,
    records: Iterable[dict[str, str]],
    task: str,
    generate: bool = True,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Score records of the public data set ({"input", "question", "target"}), such as those of `load_public`."""
    lm = LanguageModel.of(model, tokenizer)
    options = story(task).options
    room = max(len(lm.encode(f" {option}")) for option in options) + 8
    kept = list(records)
    found: list[dict[str, Any]] = []

    def asked() -> Iterator[tuple[Past, int, tuple[str, ...]]]:
        for record in kept:
            answer = record["target"].strip()
            if answer not in options:
                raise ValueError(f"{task} has a target {answer!r}, which is not one of {', '.join(options)}")
            question = f"\nQuestion: {record['question']}\nAnswer:"
            past = lm.read([lm.encode(f"{record['input'].strip()} "), lm.encode(question)])
            found.append({"likelihood": lm.choice(past, options, options.index(answer))})
            if generate:
                yield past, room, (".", "\n")
            if progress is not None:
                progress(1)

    for said, row, record in zip(lm.continue_all(asked()), found, kept):
        row["generated"] = float(is_right(said, record["target"].strip(), record["question"], options))
    if not found:
        raise ValueError("there are no records to score")
    return {"task": task, "chance": 1 / len(options)} | _means(found)


def load_public(task: str, length: str = "4k", source: str = "RMT-team/babilong") -> Any:
    """The records of a task (qa1 ..) and length ("0k", "4k", "1M") of the public data set, from a folder of <length>/<task>.json(l) or
    .parquet files, or by name from a hub (extra `data`)."""
    folder = Path(source)
    if folder.is_dir():
        for file in (folder / length / f"{task}.jsonl", folder / length / f"{task}.json"):
            if file.is_file():
                text = file.read_text(encoding="utf-8", errors="replace")
                return (
                    parse_json(text, str(file))
                    if text.lstrip().startswith("[")
                    else [parse_json(x, f"a line of {file}") for x in text.splitlines() if x]
                )
        found = sorted([*(folder / length).glob(f"{task}.parquet"), *(folder / length).glob(f"{task}-*.parquet")])
        if not found:
            raise ValueError(f"{folder} has no {length}/{task}.json, .jsonl or .parquet")
        from datasets import load_dataset

        return load_dataset("parquet", data_files=[str(f) for f in found], split="train")
    from datasets import load_dataset

    return load_dataset(source, length, split=task)


def _means(found: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"samples": len(found)}
    for name in ("likelihood", "generated", "tokens_per_second"):
        if name in found[0]:
            result[name] = sum(row[name] for row in found) / len(found)
    if found[0].get("state_bytes") is not None:
        result["state_bytes"] = max(row["state_bytes"] for row in found)
    return result
