"""Recall of facts by a whole model: pairs are given in one text, then each one is queried, from the same state."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from ..data.tasks.needle import draw
from .model_adapter import LanguageModel, Past
from .recall import ProgressCallback

FACT = "The code of {key} is {value}. "
QUESTION = "\nThe code of {key} is"


def memory_capacity_test(
    model: Any,
    tokenizer: Any,
    num_pairs: int = 100,
    distractors: int = 9,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Give `num_pairs` pairs of a name and a four-digit number, query each, and count those that are recalled.

    recalled: pairs whose number is the greedy continuation. chosen: pairs whose number is the likeliest among `distractors` numbers of
    other pairs (random if there are too few), with chance. The text is read once; every query starts from the state after it.

    >>> from mnemos.data.tasks import ByteTokenizer
    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> found = memory_capacity_test(MnemosForCausalLM(presets.config("titans-lmm")), ByteTokenizer(), num_pairs=2)
    >>> found["pairs"], found["chance"]
    (2, 0.1)
    """
    if num_pairs < 1:
        raise ValueError(f"num_pairs={num_pairs} must be at least 1")
    lm, rng = LanguageModel.of(model, tokenizer), random.Random(seed)
    pairs = _pairs(num_pairs, rng)
    told = [lm.encode(FACT.format(key=key, value=value)) for key, value in pairs.items()]
    past = lm.read(told)
    recalled, chosen = 0, 0.0

    def asked() -> Iterator[tuple[Past, int, tuple[str, ...]]]:
        nonlocal chosen
        for key, value in pairs.items():
            after = lm.read([lm.encode(QUESTION.format(key=key))], past)
            others = [v for v in pairs.values() if v != value]
            rng.shuffle(others)
            wrong = (others + _numbers(distractors, rng, {value, *others}))[:distractors]
            options = [value, *wrong]
            rng.shuffle(options)
            chosen += lm.choice(after, options, options.index(value))
            yield after, len(lm.encode(f" {value}")), ()
            if progress is not None:
                progress(1)

    for said, value in zip(lm.continue_all(asked()), pairs.values()):
        recalled += said.strip() == value
    return {
        "pairs": num_pairs,
        "tokens": past.length,
        "recalled": int(recalled),
        "recall": recalled / num_pairs,
        "chosen": chosen / num_pairs,
        "chance": 1 / (distractors + 1),
    }


def capacity_suite(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[int] = (1, 4, 16, 64),
    distractors: int = 9,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> list[dict[str, Any]]:
    """`memory_capacity_test` at each number of pairs."""
    return [memory_capacity_test(model, tokenizer, n, distractors, seed, progress) for n in pairs]


def _pairs(count: int, rng: random.Random) -> dict[str, str]:
    """`count` distinct names and `count` distinct numbers."""
    keys: dict[str, None] = {}
    if count > 9000:
        raise ValueError(f"num_pairs={count} is more than the 9000 numbers of four digits")
    while len(keys) < count:
        keys[draw("word", rng)] = None
    return dict(zip(keys, map(str, rng.sample(range(1000, 10000), count))))


def _numbers(count: int, rng: random.Random, taken: set[str]) -> list[str]:
    return [str(n) for n in rng.sample(range(1000, 10000), min(9000, count + len(taken))) if str(n) not in taken][
        :count
    ]
