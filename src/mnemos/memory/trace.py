"""A record of a memory, token by token: for inspection, not for training.

Shapes: B batch, T time, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Trace:
    """One call of a `NeuralMemory`, cut from the graph. Masked tokens have surprise and norms 0.

    surprise: (B, T, H), the inner loss of each token at the anchor, before it is written.
    gradient_norm: (B, T, H), momentary surprise: Frobenius norm, over all fast maps, of the token's gradient, summed over its window
    and before lr. momentum_norm: (B, T, H), past surprise: the same norm of the accumulator after the token.
    lr, momentum, retain, gate: (B, T, H), the gates as used (momentum 0, retain 1, gate 1 where the memory has none).
    weight_norms: (B, P, H, maps), Frobenius norm of every fast map after the first ends[0], ends[1], … tokens of the call:
    wherever a row ends a chunk, and at the end.
    """

    surprise: Tensor
    gradient_norm: Tensor
    momentum_norm: Tensor
    lr: Tensor
    momentum: Tensor
    retain: Tensor
    gate: Tensor
    weight_norms: Tensor
    ends: list[int]
