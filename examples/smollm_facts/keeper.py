"""`Keeper`: the memory of an attached model in training, computed from kept states, and the layers of the base above it.

The delta rule is computed for written tokens alone: with kernel K of their keys, strengths b and values V, the memory after all of them is
Σ u_j φ(k_j)ᵀ with (I + diag(b) tril(K, -1)) U = diag(b) V. A token whose strength is 0 takes no part, as in the memory itself.

Shapes: B rows, T tokens, D width, H heads, K key dim, V value dim, N written tokens, P queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from closed_form import whitening
from features import SINKS, causal, positions_of
from torch import Tensor

from mnemos.memory import NeuralMemory
from mnemos.nn.conv import causal_conv

NEAR = 11  # tokens that keys and queries sum up at first; from there a query may learn to look back to the question


@dataclass
class Seen:
    """What the memory sees of x (B, T, D): q, k (B, T, H, K), v (B, T, H, V), and logits (B, T, H): of what is written, of what is read."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    logits: Tensor
    opening: Tensor


class Keeper:
    """The one memory of an attached model, and the layers of its base from its own on."""

    def __init__(self, model: Any):
        self.model = model
        ((layer, self.added),) = model.memories.items()
        self.layer, self.memory = int(layer), self.added.memory
        self.body, self.head = model.base.model, model.base.lm_head
        if self.layer != len(self.body.layers) - 1:
            raise ValueError("this recipe adds the memory to the last layer, above which tokens do not see each other")

    def see(self, source: Tensor, mask: Tensor) -> Seen:
        memory, gating = self.memory, self.memory.gating
        x = self.added.norm(source.to(self.added.gate.dtype)) * mask.unsqueeze(-1)
        state = memory.initial_state(x.shape[0])
        q, k, v, _ = memory.project(x, state, None, None)
        width = gating.config.gate_hidden
        hidden, _ = causal_conv(gating.hidden(x), memory.conv.weight[:, -width:])
        bias = gating.offset[-width:]
        logits = F.linear(F.silu(hidden + bias), gating.token.weight, gating._token_start.plus(gating.token_offset))
        return Seen(x, q, k, v, logits, gating.read_logits(hidden))

    def values(self, x: Tensor) -> Tensor:
        """The values (N, H, V) of tokens x (N, D), which depend on no other token."""
        memory = self.memory
        q, k, v = memory.splits
        mixed = (x @ memory.qkv.weight[q + k : q + k + v].T) * memory.conv.weight[-1, q + k : q + k + v]
        found = F.silu(mixed).unflatten(-1, (memory.heads, -1))
        return found * torch.rsqrt(found.square().sum(-1, keepdim=True) / memory.config.value_bound**2 + 1)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """φ(q)·φ(k) of q (P, H, K) and k (N, H, K): (H, P, N)."""
        cosine = torch.einsum("phk,nhk->hpn", q, k)
        features = self.memory.features
        if features is None:
            return cosine
        weights = features.log_coefficients.exp()
        weights = weights / weights.sum(-1, keepdim=True)
        return sum(weights[:, i, None, None] * cosine**i for i in range(weights.shape[-1]))

    def shares(self, q: Tensor, k: Tensor, strength: Tensor | None = None) -> Tensor:
        """The share of each written value in what is read: (H, P, N). strength: (N, H); None: 1."""
        among = self.kernel(k, k).tril(-1)
        reads = self.kernel(q, k)
        if strength is not None:
            b = strength.T.unsqueeze(-1)  # H N 1
            among = b * among
        eye = torch.eye(k.shape[0])
        found = torch.linalg.solve_triangular(eye + among, reads, upper=False, left=False, unitriangular=True)
        return found if strength is None else found * strength.T.unsqueeze(1)

    def normed(self, source: Tensor) -> Tensor:
        return self.added.norm(source.to(self.added.gate.dtype))

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """What is added to the stream (N, D), of reads y (N, H, V) by x (N, D)."""
        return self.memory._output(y.unsqueeze(0), None, x.unsqueeze(0))[0] * self.added.gate

    def behind_attention(self, states: Tensor, sinks: Tensor, start: list[int]) -> Tensor:
        """The stream in front of the memory's layer (B, T, D) -> behind its attention, where the memory is added (B, T, D)."""
        B, T, _ = states.shape
        h = torch.cat([sinks.expand(B, -1, -1), states], dim=1)
        positions = positions_of(start, T)
        layer, angles = self.body.layers[self.layer], self.body.rotary_emb(h, positions)
        y, _ = layer.self_attn(
            layer.input_layernorm(h),
            attention_mask=causal(T + SINKS),
            position_embeddings=angles,
            position_ids=positions,
        )
        return (h + y)[:, SINKS:]

    def logits(self, h: Tensor) -> Tensor:
        """The stream behind the attention of the last layer (N, D) -> logits (N, vocabulary)."""
        layer = self.body.layers[-1]
        h = h.to(self.head.weight.dtype)
        return self.head(self.body.norm(h + layer.mlp(layer.post_attention_layernorm(h)))).float()


@torch.no_grad()
def initialise_projections(memory: NeuralMemory, x: Tensor) -> None:
    """Keys and queries begin as one random map of whitened states, summed over the last tokens; values as another, of the token alone.

    x: (N, D), what the memory reads of some tokens.
    """
    width, (q, k, v), taps = x.shape[1], memory.splits, memory.conv.width
    white = whitening(x)
    keys = torch.nn.init.orthogonal_(torch.empty(max(q, width), width))[:q] @ white.T
    keys *= 0.5 / (x[:2000] @ keys.T).std()
    memory.qkv.weight[:q] = keys
    memory.qkv.weight[q : q + k] = keys
    weight = memory.conv.weight
    weight[:, : q + k + v] = 0.0
    near = min(taps - 1, NEAR)
    shape = torch.zeros(taps - 1, q)
    shape[-near:] = near**-0.5 * (1 + 0.3 * torch.randn(near, q))
    weight[1:, :q] = shape  # a query in front of a value and the key of the value see the same tokens
    weight[:-1, q : q + k] = shape
    weight[-1, q + k : q + k + v] = 1.0
    values = torch.nn.init.orthogonal_(torch.empty(max(v, width), width))[:v] @ white.T
    size = (x[:2000] @ values.T).norm(dim=1).mean()
    memory.qkv.weight[q + k : q + k + v] = values * (0.8 / size)  # small: SiLU is nearly linear there
    if memory.features is not None:
        offset = memory.features.log_coefficients_offset
        offset.zero_()
        offset[:, :-1] = -12.0  # the highest power alone: an unrelated key has no share


@torch.no_grad()
def initialise_gates(memory: NeuralMemory) -> None:
    """Sparse gates begin near one half for every token."""
    gating = memory.gating
    gating.linear.weight[: memory.heads].zero_()
    torch.nn.init.normal_(gating.linear.weight[-gating.config.gate_hidden :], std=gating.config.dim**-0.5)
    for part in (gating.token, gating.read):
        torch.nn.init.normal_(part.weight, std=0.3 * gating.config.gate_hidden**-0.5)
