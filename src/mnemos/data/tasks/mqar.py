"""Multi-query associative recall (MQAR), as Zoology (Arora, Eyuboglu et al., 2023) defines it.

First all pairs, key value key value ...; then every key once more, at an even offset, where its value is the target:

    inputs   k1 v1 k2 v2 .  .  k2 .  k1 .
    labels   -  -  -  -  -  -  v2 -  v1 -

The offset of a key's second occurrence follows a power law (`power` 0.01: mostly soon after the pairs; 1: uniform).
Keys are ids 1 .. V/2-1, values V/2 .. V-1; the other positions hold random ids (`fill="random"`) or 0.

Shapes: N examples, T length, P pairs, V vocabulary.
"""

from __future__ import annotations

import numpy as np

from .examples import IGNORED, Examples, whole

# (pairs, length, examples), vocabulary 8192: Figure 2 of Zoology, and the training and test sets of Based.
MQAR_PRESETS: dict[str, list[tuple[int, int, int]]] = {
    "zoology-figure2-train": [(4, 64, 100_000), (8, 128, 100_000), (16, 256, 100_000), (64, 512, 100_000)],
    "zoology-figure2-test": [(4, 64, 3_000), (8, 128, 3_000), (16, 256, 3_000), (64, 512, 3_000)],
    "based-train": [(4, 64, 100_000), (8, 128, 20_000), (16, 256, 20_000), (32, 256, 20_000), (64, 256, 20_000)],
    "based-test": [
        (4, 64, 1_000),
        (8, 64, 1_000),
        (16, 64, 1_000),
        (32, 128, 1_000),
        (64, 256, 1_000),
        (128, 512, 1_000),
        (256, 1024, 1_000),
    ],
}


def mqar(
    num_examples: int,
    length: int = 64,
    num_kv_pairs: int = 4,
    vocab_size: int = 8192,
    power: float = 0.01,
    fill: str = "random",
    seed: int = 0,
) -> Examples:
    """Generate MQAR examples: inputs and labels (N, T).

    >>> mqar(3, length=16, num_kv_pairs=2, vocab_size=32).answers().tolist()
    [2, 2, 2]
    """
    N, T, P, V = whole("num_examples", num_examples, 1), length, num_kv_pairs, vocab_size
    whole("num_kv_pairs", P, 1)
    if whole("length", T, 4) % 2 or 4 * P > T:
        raise ValueError(f"length={T} must be even and at least 4 * num_kv_pairs = {4 * P}")
    if whole("vocab_size", V, 4) // 2 - 1 < P:
        raise ValueError(f"vocab_size={V} has {V // 2 - 1} keys, but num_kv_pairs={P} are needed")
    if not power > 0:
        raise ValueError(f"power={power!r} must be > 0")
    if fill not in ("random", "zero"):
        raise ValueError(f"fill={fill!r} is unknown; choose random or zero")
    rng = np.random.default_rng(seed)
    keys = _distinct(rng, 1, V // 2, N, P)
    values = _distinct(rng, V // 2, V, N, P)
    inputs = np.zeros((N, T), dtype=np.int64)
    inputs[:, 0 : 2 * P : 2], inputs[:, 1 : 2 * P : 2] = keys, values
    asked = 2 * P + 2 * _slots(rng, (T - 2 * P) // 2, power, N, P)
    np.put_along_axis(inputs, asked, keys, axis=1)
    labels = np.full((N, T), IGNORED, dtype=np.int64)
    np.put_along_axis(labels, asked, values, axis=1)
    if fill == "random":
        inputs = np.where(inputs == 0, rng.integers(0, V, (N, T)), inputs)
    return Examples(inputs, labels)


def _distinct(rng: np.random.Generator, low: int, high: int, rows: int, count: int) -> np.ndarray:
    """`count` distinct ids of [low, high) in each row: (rows, count)."""
    return low + np.stack([rng.choice(high - low, count, replace=False) for _ in range(rows)])


def _slots(rng: np.random.Generator, space: int, power: float, rows: int, count: int) -> np.ndarray:
    """`count` distinct slots of [0, space), drawn without replacement with p(i) ~ (i+1)^(power-1): (rows, count).

    Gumbel-top-k: the largest values of log p + Gumbel noise are these draws, in order.
    """
    log_p = (power - 1) * np.log(np.arange(1, space + 1))
    result = np.empty((rows, count), dtype=np.int64)
    for row in range(rows):
        noisy = log_p + rng.gumbel(size=space)
        result[row] = np.argsort(-noisy)[:count]
    return result
