"""Vitality: whether a memory can still learn, after everything it has read. For inspection, not for training.

A memory dies when its weights reach a place without gradients: both maps of a network near 0, or all keys in one direction.
Three measures show it: the effective rank of the fast maps, their distance from W0, and what a chunk teaches the memory, compared with
what it teaches a fresh one.

Shapes: B batch, T time, H heads, maps: fast maps that are matrices.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .layer import NeuralMemory
from .scan import inner_loss
from .state import MemoryState


def effective_rank(W: Tensor) -> Tensor:
    """The number of directions that a matrix uses, W (..., d_in, d_out) -> (...).

    It is exp of the entropy of the singular values, normalised to a sum of 1 (Roy and Vetterli 2007): 1 for one direction,
    n for n directions of equal size, 0 for a matrix of zeros, NaN for a matrix that is not finite.

    >>> effective_rank(torch.stack([torch.eye(4), torch.ones(4, 4), torch.zeros(4, 4)])).round()
    tensor([4., 1., 0.])
    """
    wide = W.detach().to(torch.promote_types(W.dtype, torch.float32))
    finite = wide.isfinite().all(-1).all(-1)
    values = torch.linalg.svdvals(torch.where(finite[..., None, None], wide, 0.0))
    return torch.where(finite, spectrum_rank(values), math.nan)


def spectrum_rank(values: Tensor) -> Tensor:
    """`effective_rank` of matrices with the singular values (..., n).

    >>> spectrum_rank(torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    tensor([2., 0.])
    """
    total = values.sum(-1, keepdim=True)
    p = torch.where(total > 0, values / total, 0.0)
    return torch.where(total.squeeze(-1) > 0, torch.special.entr(p).sum(-1).exp(), 0.0)


def effective_ranks(state: MemoryState) -> Tensor:
    """Effective rank of every fast map of every head: (B, H, maps).

    >>> mem = NeuralMemory(dim=32, heads=2)
    >>> effective_ranks(mem.initial_state(batch=3)).shape
    torch.Size([3, 2, 2])
    """
    if not state.weights:
        return state.window_key.new_zeros(state.batch, state.heads, 0)
    return torch.stack([effective_rank(w) for w in state.weights], -1)


def lowest_rank(state: MemoryState) -> float:
    """Effective rank of the fast map with the lowest, a mean over batch rows and heads; NaN for a memory without matrices.

    One collapsed map is enough to end learning, because errors and keys pass through all of them.

    >>> mem = NeuralMemory(dim=32, heads=2)
    >>> 8 < lowest_rank(mem.write(torch.randn(1, 64, 32))) <= 16
    True
    """
    ranks = effective_ranks(state)
    return ranks.mean((0, 1)).min().item() if ranks.shape[-1] else math.nan


@torch.no_grad()
def distance_from_w0(layer: NeuralMemory, state: MemoryState) -> Tensor:
    """|W - W0| / |W0| of every head, in Frobenius norms over all its fast maps: (B, H).

    W0 is the initial weights as the layer uses them. The distance is 1 for weights that have shrunk to 0, large for a memory
    that begins near zero, and infinite for one that begins with 0.

    >>> mem = NeuralMemory(dim=32, heads=2)
    >>> distance_from_w0(mem, mem.initial_state(batch=1)).tolist()
    [[0.0, 0.0]]
    """
    like = state.window_key.new_zeros(state.batch, state.heads)
    moved, size = like, like[:1]
    for w, w0 in zip(state.weights, layer.initial_state(1).weights):
        moved = moved + (w - w0).square().sum((-2, -1))
        size = size + w0.square().sum((-2, -1))
    return torch.where(moved == 0, 0.0, (moved / size).sqrt())  # NaN stays NaN


@dataclass(frozen=True)
class Relearning:
    """Fall of the inner loss by one more pass over a chunk, (B, H) each, means over chunks; see `relearning`.

    before, after: inner loss of a chunk's tokens before and after they are written. learned: its fall, minus the fall of the inner loss of
    the other chunks, which are not written. fresh_learned: the same for a fresh memory.
    """

    before: Tensor
    after: Tensor
    learned: Tensor
    fresh_learned: Tensor

    @property
    def ratio(self) -> float:
        """learned / fresh_learned, means over batch rows and heads: 0 for a dead memory, NaN if a fresh one learns nothing either."""
        fresh = self.fresh_learned.mean().item()
        return self.learned.mean().item() / fresh if fresh > 0 else math.nan


@torch.no_grad()
def relearning(layer: NeuralMemory, x: Tensor, state: MemoryState) -> Relearning:
    """Fall of the inner loss by one more pass over a chunk, for a memory in `state` and for a fresh one. `state` stays as it is.

    x (B, T, dim): one or more chunks of `chunk_size` tokens; a rest is left out. Each is written by itself after `state`, and its inner loss
    is measured at the weights before and after: at the start of a chunk, the surprise of a trace. Part of the fall is
    common to all chunks, for example by their mean value, and an old memory holds that part already, so the fall of the other chunks is subtracted.
    The fresh memory begins with W0 and gets the same keys, values, gates and ends of chunks.

    >>> mem = NeuralMemory(dim=32, heads=2, chunk_size=16)
    >>> found = relearning(mem, torch.randn(1, 64, 32), mem.initial_state(1))
    >>> found.before.shape, round(found.ratio, 3)
    (torch.Size([1, 2]), 1.0)
    """
    C = layer.spec.chunk_size
    B, n = x.shape[0], x.shape[1] // C
    if n == 0:
        raise ValueError(f"x has {x.shape[1]} tokens, but relearning shows whole chunks of chunk_size={C}")
    fresh = dataclasses.replace(layer.initial_state(B), conv=state.conv)
    if not layer.spec.is_kv_cache:  # whose position is the length of its list
        fresh = dataclasses.replace(fresh, position=state.position, chunk_offset=state.chunk_offset)
    chunks = x[:, : n * C].unflatten(1, (n, C))  # B n C dim
    before, after, learned = _one_pass(layer, chunks, state)
    return Relearning(before, after, learned, _one_pass(layer, chunks, fresh)[2])


def _one_pass(layer: NeuralMemory, chunks: Tensor, state: MemoryState) -> tuple[Tensor, Tensor, Tensor]:
    """Inner loss of chunks (B, n, C, dim) before and after each is written by itself, and its fall beyond that of the others: (B, H) each."""
    B, n = chunks.shape[:2]
    x, state = chunks.flatten(0, 1), state.select([row for row in range(B) for _ in range(n)])  # R = B n rows
    _, k, v, _ = layer.project(x, state, None, None)
    key, value = k.to(state.dtype), layer.spec.loss_value(v.to(state.dtype), layer.gates(x, state, None, None))
    before = inner_loss(key, value, state, layer.spec, layer.features).mean(1).unflatten(0, (B, n))  # B n H
    key, value = (t.unflatten(0, (B, n)).flatten(1, 2).repeat_interleave(n, 0) for t in (key, value))  # R nC H .
    after = inner_loss(key, value, layer.write(x, state), layer.spec, layer.features)
    after = after.unflatten(1, (n, -1)).mean(2).unflatten(0, (B, n))  # B n n H: written, measured
    fall = before.unsqueeze(1) - after
    own, others = fall.diagonal(dim1=1, dim2=2).mean(-1), 0.0
    if n > 1:
        others = (fall.sum((1, 2)) - n * own) / (n * (n - 1))
    return before.mean(1), after.diagonal(dim1=1, dim2=2).mean(-1), own - others


@torch.no_grad()
def measure_vitality(layer: NeuralMemory, x: Tensor, state: MemoryState, chunks: int = 4) -> dict[str, float]:
    """Vitality of the first row of `state`, which has read inputs such as x (B, T, dim).

    effective_rank: of the fast map with the lowest. distance: |W - W0| / |W0|. relearning: `Relearning.ratio` of chunks of noise with the mean
    and spread of x, which no memory can know; left out for features "exp", which keep every token.

    >>> mem = NeuralMemory(dim=32, heads=2, chunk_size=16)
    >>> x = torch.randn(1, 100, 32)
    >>> sorted(measure_vitality(mem, x, mem.write(x)))
    ['distance', 'effective_rank', 'relearning']
    """
    x, state, C = x[:1], state.select([0]), layer.spec.chunk_size
    found = {"effective_rank": lowest_rank(state), "distance": distance_from_w0(layer, state).mean().item()}
    if layer.spec.is_kv_cache:
        return found
    rest = -int(state.position[0]) % C  # until the next chunk begins
    noise = noise_like(x, rest + chunks * C)
    state = layer.write(noise[:, :rest], state) if rest else state
    return found | {"relearning": relearning(layer, noise[:, rest:], state).ratio}


def noise_like(x: Tensor, tokens: int, seed: int = 0) -> Tensor:
    """Noise (B, tokens, dim) with the mean and the standard deviation of every channel of x (B, T, dim); the same for the same seed.

    >>> noise_like(3 + torch.randn(1, 50, 8), 1000).mean().round()
    tensor(3.)
    """
    drawn = torch.randn(x.shape[0], tokens, x.shape[-1], generator=torch.Generator().manual_seed(seed))
    return (x.mean(1, keepdim=True) + x.std(1, keepdim=True, correction=0) * drawn.to(x)).to(x.dtype)
