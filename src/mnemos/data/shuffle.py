"""Pseudorandom orders fixed by a key. They need no memory: any position is computed on demand."""

from __future__ import annotations

import numpy as np

UINT64_MASK = 2**64 - 1
ROUNDS = 6


def mix(*numbers: int) -> int:
    """A 64-bit number that depends on all of `numbers` (splitmix64).

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    x = 0
    for number in numbers:
        x = (x + number + 0x9E3779B97F4A7C15) & UINT64_MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & UINT64_MASK
        x ^= x >> 31
    return x


def uniform(*numbers: int) -> float:
    """A number in [0, 1) that depends on all of `numbers`.

    >>> 0 <= uniform(1, 2, 3) < 1
    True
    """
    return (mix(*numbers) >> 11) / 2**53


def permute(places: np.ndarray, n: int, key: int) -> np.ndarray:
    """The images of `places` (from 0..n-1) under the permutation of 0..n-1 that `key` selects.

    A Feistel network over the next even power of two; a value outside the range is permuted again until it lies inside.

    >>> sorted(permute(np.arange(5), 5, key=7).tolist())
    [0, 1, 2, 3, 4]
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = np.uint64(2**half - 1)
    keys = [np.uint64(mix(key, i)) for i in range(ROUNDS)]
    result = places.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        x = result[outside]
        left, right = x >> np.uint64(half), x & low
        for k in keys:
            left, right = right, left ^ (_mixed(right ^ k) & low)
        result[outside] = (left << np.uint64(half)) | right
        outside = outside[result[outside] >= n]
    return result.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
