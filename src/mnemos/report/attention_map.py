"""The earlier tokens that a read resembles: the coefficients of the dual form, over a whole text.

A read of the first fast map is (docs/theory.md, section 4.1)

    x_t W_t = beta_t (x_t W0) - sum_i C[t,i] (x_t . a_i) d_i          x_t = phi(q_t), a_i = phi(k_i)

so w[t,i] = C[t,i] (phi(q_t) . phi(k_i)) is the weight of token i's correction, -d_i, in the read. C depends on the gates only:

    n_t = momentum_t n_{t-1} + lr_t Gamma_t        C_t = retain_t C_{t-1} + n_t

With a window, a token is written c times; C sums over its writes. With rule "muon" a commit adds lr NS(S), which is not a sum over
tokens: n has no lr, and at each commit C grows by lr times n, normalised to a sum of 1. This weighs the inputs of NS, not its output.

Shapes: T tokens, H heads, F lifted key dim, c window, L tokens of a block, k tokens kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory import Gates, MemorySpec

BLOCK_QUERIES = 64


@dataclass
class Writes:
    """The gates that determine the coefficients: lr, momentum, retain, gate (T, H); lag (T, H, c), the weight of the token j back, or None."""

    lr: Tensor
    momentum: Tensor
    retain: Tensor
    gate: Tensor
    lag: Tensor | None


@dataclass
class Resemblance:
    """For every token the k earlier tokens with the largest |w|, best first. Row 0 is over all heads, by their mean |w|; row 1 + h is head h.

    token: (1+H, T, k), -1 for none; weight: the same shape, w (over all heads: the mean |w|); own: (1+H, T), w of the token's own write.
    """

    token: Tensor
    weight: Tensor
    own: Tensor


def coefficients(writes: Writes, spec: MemorySpec) -> Iterator[Tensor]:
    """C of every read, token by token: (H, T) each, 0 for tokens not written yet.

    >>> gates = [torch.full((3, 1), x) for x in (1.0, 0.0, 0.5, 1.0)]
    >>> spec = MemorySpec(key_dim=4, value_dim=4, structure="linear")
    >>> torch.stack(list(coefficients(Writes(*gates, None), spec)))[:, 0].tolist()
    [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]]
    """
    T, H = writes.lr.shape
    n, C = writes.lr.new_zeros(2, H, T)
    roles = spec.update_rule.roles(Gates(writes.lr, writes.momentum, writes.retain), spec)
    kept = torch.ones_like(writes.lr) if roles.retain is None else roles.retain
    carried = torch.zeros_like(writes.lr) if roles.momentum is None else roles.momentum
    for t in range(T):
        first = max(0, t - spec.window + 1)
        window = writes.gate[first : t + 1].mT  # H c
        if writes.lag is not None:
            window = window * writes.lag[t, :, : t + 1 - first].flip(-1)
        before = C.clone() if spec.read == "before" else C
        window = window if roles.strength is None else roles.strength[t, :, None] * window
        n = carried[t, :, None] * n
        n[:, first : t + 1] += window
        C = kept[t, :, None] * C
        if roles.rate is None:
            C = C + n
        elif (t + 1) % spec.commit == 0 and spec.update_rule.unit_step:
            parts = n
            if spec.nesterov:
                parts = carried[t, :, None] * n
                parts[:, first : t + 1] += window
            C = C + roles.rate[t, :, None] * parts / parts.sum(-1, keepdim=True).clamp(min=1e-30)
        elif (t + 1) % spec.commit == 0:  # the weights are a function of the accumulator
            C = n.clone()
        yield before if spec.read == "before" else C


def resemblance(
    q: Tensor, k: Tensor, writes: Writes, spec: MemorySpec, offset: Tensor | None, count: int
) -> Resemblance:
    """The `count` strongest earlier tokens of every read. q, k: (T, H, F), lifted. offset: (H,), for features "exp", whose kernel is exp(q·k + offset)."""
    T, H = k.shape[:2]
    keys, rows = k.transpose(0, 1), coefficients(writes, spec)  # H T F
    token = torch.full((1 + H, T, count), -1)
    weight, own = k.new_zeros(1 + H, T, count), k.new_zeros(1 + H, T)
    for start in range(0, T, BLOCK_QUERIES):
        stop = min(T, start + BLOCK_QUERIES)
        C = torch.stack([next(rows) for _ in range(start, stop)], 1)  # H L T
        scores = q[start:stop].transpose(0, 1) @ keys.mT
        if spec.is_kv_cache:
            scores = (scores if offset is None else scores + offset[:, None, None]).exp()
        w = C * scores
        w = torch.cat([w.abs().mean(0, keepdim=True), w])  # 1+H L T
        here = torch.arange(start, stop)
        own[:, start:stop] = w[:, torch.arange(stop - start), here]
        earlier = torch.arange(T) < here[:, None]
        w = w.masked_fill(~earlier, 0.0)
        best = w.abs().topk(min(count, T), -1).indices
        chosen = w.gather(-1, best)
        kept = slice(0, best.shape[-1])
        token[:, start:stop, kept] = best.masked_fill(chosen == 0, -1)
        weight[:, start:stop, kept] = chosen
    return Resemblance(token, weight, own)
