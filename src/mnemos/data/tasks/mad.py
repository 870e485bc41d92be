"""The six tasks of MAD (Poli et al., 2024, "Mechanistic Design and Scaling of Hybrid Architectures"), with its settings.

in-context-recall        pairs k v with repeated keys; the target is the value of each key that was shown before
noisy-in-context-recall  the same, with pairs of noise ids in between
fuzzy-in-context-recall  keys and values are motifs of several tokens
selective-copying        tokens among blanks; after the copy token, output the tokens in order
compression              output the whole sequence from the hidden state after its last token
memorization             a map from keys to values that is the same in every example

Labels are at the positions of their logits, as in `Examples`. `training=True` makes every next token a target in the recall tasks.

Layout, ids, sizes and distributions are those of the published code (athms/mad-lab, `mad/data/instances.py`, with the settings of its
`configs/tasks`), but not its random numbers. Differences:

* `multi_query` is always on, as in all published settings: no copy token, and every repeated key is scored, not only the last one;
* only recall has noise, as in the published settings;
* a recall example always has a pair that is not noise, and a motif that is scored was always shown. In the published code, the pair to be
  kept can lie after all drawn pairs (an error if all of them are noise), and a short motif can be due after the last position;
* blanks of selective copying are drawn from the seed (in the published code, from numpy's global generator);
* recall and memorization raise an error for odd lengths, as recall does in the published code.

Shapes: N examples, T length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...choices import unknown
from .examples import IGNORED, Examples, fraction, whole

TaskRow = tuple[list[int], list[int]]


@dataclass(frozen=True)
class MADTask:
    """A task: its generator, the published baseline, the published changes (one at a time), and the number of training examples."""

    name: str
    make: Callable[..., Examples]
    baseline: dict[str, Any]
    changes: dict[str, list] = field(default_factory=dict)
    train_examples: int = 12_800
    test_examples: int = 1_280

    def settings(self) -> list[dict[str, Any]]:
        """The baseline and each single change of it: a MAD score is the mean over these. `train_examples` is one more change."""
        return [self.baseline] + [self.baseline | {name: x} for name, values in self.changes.items() for x in values]


def mad(task: str, num_examples: int, seed: int = 0, **settings) -> Examples:
    """Examples of a MAD task at its baseline, or with some settings changed.

    >>> mad("selective-copying", 2, length=64, num_tokens_to_copy=8).inputs.shape
    (2, 64)
    """
    if task not in MAD_TASKS:
        raise unknown("task", task, MAD_TASKS)
    known = MAD_TASKS[task]
    return known.make(num_examples, seed=seed, **(known.baseline | settings))


def recall(
    num_examples: int,
    vocab_size: int = 16,
    length: int = 128,
    noise_vocab_size: int = 0,
    frac_noise: float = 0.0,
    training: bool = False,
    seed: int = 0,
) -> Examples:
    """In-context recall: (N, length - 1), because the last value is a target only. Ids: keys, values, then noise."""
    whole("num_examples", num_examples, 1)
    fraction("frac_noise", frac_noise)
    if whole("length", length, 4) % 2:
        raise ValueError(f"length={length} must be even: it counts pairs")
    usable = vocab_size - whole("noise_vocab_size", noise_vocab_size, 1 if frac_noise else 0)
    if usable < 2:
        raise ValueError(
            f"vocab_size={vocab_size} leaves no keys and values beside noise_vocab_size={noise_vocab_size}"
        )
    rng = np.random.default_rng(seed)
    rows = [_recall_row(rng, usable, length // 2, noise_vocab_size, frac_noise) for _ in range(num_examples)]
    return _shifted(rows, training)


def _recall_row(rng: np.random.Generator, usable: int, pairs: int, noise_vocab: int, frac_noise: float) -> TaskRow:
    keys = usable // 2
    values: dict[int, int] = {}
    tokens, asked = [], []
    surely = rng.integers(pairs - 1)  # a pair that is not noise, so that at least one key is scored
    for i in range(pairs - 1):
        if i != surely and frac_noise and rng.random() < frac_noise:
            tokens += (usable + rng.integers(noise_vocab, size=2)).tolist()
            asked += [IGNORED, IGNORED]
            continue
        key = int(rng.integers(keys))
        known = key in values
        value = values.setdefault(key, int(rng.integers(keys, usable)))
        tokens += [key, value]
        asked += [IGNORED, value if known else IGNORED]
    key = int(rng.choice(list(values)))
    return [*tokens, key, values[key]], [*asked, IGNORED, values[key]]


def fuzzy_recall(
    num_examples: int,
    vocab_size: int = 16,
    length: int = 128,
    k_motif_size: int = 3,
    v_motif_size: int = 3,
    training: bool = False,
    seed: int = 0,
) -> Examples:
    """In-context recall of motifs: (N, length), padded in front with the last id.

    Keys have k_motif_size tokens (1 to k_motif_size if training), values 1 to v_motif_size. No token is repeated within a motif.
    """
    whole("num_examples", num_examples, 1)
    K, V = whole("k_motif_size", k_motif_size, 1), whole("v_motif_size", v_motif_size, 1)
    usable = vocab_size - 1
    if usable // 2 < K or usable - usable // 2 < V:
        raise ValueError(f"vocab_size={vocab_size} is too small for motifs of {K} and {V} different tokens")
    if length < 4 * (K + V):
        raise ValueError(f"length={length} must be at least {4 * (K + V)} for motifs of {K} and {V} tokens")
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_examples):
        tokens, asked = _fuzzy_row(rng, usable, length, K, V, training)
        pad = length + 1 - len(tokens)
        rows.append(([usable] * pad + tokens, [IGNORED] * pad + asked))
    return _shifted(rows, training)


def _fuzzy_row(rng: np.random.Generator, usable: int, length: int, K: int, V: int, training: bool) -> TaskRow:
    def key() -> tuple[int, ...]:
        size = int(rng.integers(1, K + 1)) if training else K
        return tuple(rng.permutation(usable // 2)[:size].tolist())

    def value() -> tuple[int, ...]:
        return tuple((usable // 2 + rng.permutation(usable - usable // 2)[: rng.integers(1, V + 1)]).tolist())

    probe = key()
    values = {probe: value()}
    limit = length - len(probe) - len(values[probe]) - (K + V)
    when = rng.integers(limit - (K + V) + 1)  # early enough that the probe is always shown
    shown: set[tuple[int, ...]] = set()
    tokens, asked = [], []
    while len(tokens) < limit:
        due = len(tokens) >= when and probe not in shown
        k = probe if due else key()
        v = values.setdefault(k, value())
        tokens += [*k, *v]
        asked += [IGNORED] * len(k) + (list(v) if k in shown else [IGNORED] * len(v))
        shown.add(k)
    v = values[probe]
    return [*tokens, *probe, *v], [*asked, *[IGNORED] * len(probe), *v]


def selective_copying(
    num_examples: int, vocab_size: int = 16, length: int = 256, num_tokens_to_copy: int = 16, seed: int = 0
) -> Examples:
    """Tokens among blanks, the copy token, then a blank for each target: (N, length). Ids: tokens, blank, copy."""
    n = whole("num_tokens_to_copy", num_tokens_to_copy, 1)
    whole("num_examples", num_examples, 1), whole("vocab_size", vocab_size, 3)
    if length <= 2 * n + 1:
        raise ValueError(f"length={length} must be more than 2 * num_tokens_to_copy + 1 = {2 * n + 1}")
    blank, copy = vocab_size - 2, vocab_size - 1
    rng = np.random.default_rng(seed)
    inputs = np.full((num_examples, length), blank, dtype=np.int64)
    labels = np.full((num_examples, length), IGNORED, dtype=np.int64)
    front = length - n - 1
    inputs[:, front] = copy
    for row, ask in zip(inputs, labels):
        tokens = rng.integers(blank, size=n)
        before = np.sort(rng.integers(n, size=front - n))  # blanks precede these tokens; none follows the last one
        row[np.arange(n) + np.searchsorted(before, np.arange(n), side="right")] = tokens
        ask[front + 1 :] = tokens
    return Examples(inputs, labels)


def compression(num_examples: int, vocab_size: int = 16, length: int = 32, seed: int = 0) -> Examples:
    """Random tokens and the compression token: (N, length). The labels are the inputs, all predicted from the hidden state after the
    last token (`mnemos.eval.mad.MADDecoder`)."""
    whole("num_examples", num_examples, 1), whole("vocab_size", vocab_size, 2), whole("length", length, 2)
    tokens = np.random.default_rng(seed).integers(vocab_size - 1, size=(num_examples, length))
    tokens[:, -1] = vocab_size - 1
    return Examples(tokens, tokens.copy())


def memorization(
    num_examples: int, vocab_size: int = 256, length: int = 32, map_seed: int = 12345, seed: int = 0
) -> Examples:
    """Keys, each followed by the insert token, where its value is the target: (N, length). `map_seed` alone determines the map."""
    whole("num_examples", num_examples, 1), whole("vocab_size", vocab_size, 3)
    if whole("length", length, 2) % 2:
        raise ValueError(f"length={length} must be even: it counts keys and insert tokens")
    facts = memorization_map(vocab_size, map_seed)
    inputs = np.full((num_examples, length), vocab_size - 1, dtype=np.int64)
    labels = np.full((num_examples, length), IGNORED, dtype=np.int64)
    keys = np.random.default_rng(seed).integers(len(facts), size=(num_examples, length // 2))
    inputs[:, ::2], labels[:, 1::2] = keys, facts[keys]
    return Examples(inputs, labels)


def memorization_map(vocab_size: int, map_seed: int = 12345) -> np.ndarray:
    """The value of each key 0 .. K-1: (K,); no value is used twice."""
    usable = vocab_size - 1
    return usable // 2 + np.random.default_rng(map_seed).permutation(usable - usable // 2)[: usable // 2]


def _shifted(rows: list[TaskRow], training: bool) -> Examples:
    tokens, asked = (np.array(part, dtype=np.int64) for part in zip(*rows))
    return Examples(tokens[:, :-1], (tokens if training else asked)[:, 1:])


LENGTH_SWEEP = {"length": [256, 512, 1024]}
VOCABULARY_SWEEP = {"vocab_size": [32, 64, 128]}
MAD_TASKS = {
    task.name: task
    for task in (
        MADTask("in-context-recall", recall, {"vocab_size": 16, "length": 128}, VOCABULARY_SWEEP | LENGTH_SWEEP),
        MADTask(
            "noisy-in-context-recall",
            recall,
            {"vocab_size": 32, "noise_vocab_size": 16, "length": 128, "frac_noise": 0.2},
            {"vocab_size": [48, 80, 144]} | LENGTH_SWEEP | {"frac_noise": [0.4, 0.6, 0.8]},
        ),
        MADTask(
            "fuzzy-in-context-recall",
            fuzzy_recall,
            {"vocab_size": 16, "length": 128, "k_motif_size": 3, "v_motif_size": 3},
            VOCABULARY_SWEEP | LENGTH_SWEEP,
        ),
        MADTask(
            "selective-copying",
            selective_copying,
            {"vocab_size": 16, "length": 256, "num_tokens_to_copy": 16},
            VOCABULARY_SWEEP | {"length": [512, 1024], "num_tokens_to_copy": [32, 64, 96]},
        ),
        MADTask(
            "compression",
            compression,
            {"vocab_size": 16, "length": 32},
            VOCABULARY_SWEEP | {"length": [64, 128, 256]},
        ),
        MADTask(
            "memorization",
            memorization,
            {"vocab_size": 256, "length": 32},
            {"vocab_size": [512, 1024, 2048, 4096, 8192]},
            train_examples=256,
        ),
    )
}
