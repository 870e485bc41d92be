"""Queries projected onto the space of the keys seen so far: a Gram memory, M_t = M_p + Σ_i decay^(t-i) gate_i k_i k_iᵀ.

    normalise="sum"      q'_t = M_t q_t / (n_p + Σ_i decay^(t-i) gate_i ‖k_i‖²)
    normalise="per_key"  q'_t = M_t q_t, with every k kᵀ divided by its own ‖k‖²

M_p = Σ_p k_p k_pᵀ and n_p = Σ_p ‖k_p‖² come from learned persistent keys, which do not decay. The sums run over
all tokens up to t, or over a window of them. M_t is never built inside a chunk: M_t q_t = Σ_i w_{t,i} (q_t·k_i) k_i.
Shapes: B batch, T time, H heads, D head dim, P persistent keys, N chunks, C chunk size, c window.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import reach
from .cache import RowCache
from .derivatives import full_precision
from .norm import l2_normalize

MAX_DIM = 2**20  # sizes may come from a file and must not exhaust the machine


@dataclass
class QKCache(RowCache):
    """Statistics of the keys of B batch rows, float32 or wider, of a fixed size.

    Without a window: gram (B, H, D, D) and norm (B, H), the sums without their persistent part. With a window c: the last
    c-1 keys (B, c-1, H, D) and their gates (B, c-1, H), in order of time; before the first token the gate is 0.
    """

    gram: Tensor | None = None
    norm: Tensor | None = None
    key: Tensor | None = None
    gate: Tensor | None = None


def check_choices(
    persistent: Any = 64,
    window: Any = None,
    decay: Any = 0.95,
    gate_hidden: Any = 64,
    normalise: Any = "sum",
    chunk_size: Any = 64,
    eps: Any = 1e-6,
) -> None:
    """Raise a ValueError for choices of a `QKProjection` of a wrong type or size; they may come from a file."""

    def whole(value: Any, least: int) -> bool:
        return type(value) is int and least <= value <= MAX_DIM

    if normalise not in ("sum", "per_key"):
        raise ValueError(f"normalise={normalise!r:.60} must be 'sum' or 'per_key'")
    if window is not None and not whole(window, 1):
        raise ValueError(f"window={window!r:.60} must be a whole number >= 1, or None for all tokens")
    if decay is not None and not (type(decay) is float and 0.0 < decay < 1.0):
        raise ValueError(f"decay={decay!r:.60} must lie between 0 and 1, or be None for no decay")
    if not whole(persistent, 0) or not whole(chunk_size, 1):
        raise ValueError(f"persistent={persistent!r:.60} must be >= 0 and chunk_size={chunk_size!r:.60} >= 1")
    if gate_hidden is not None and not whole(gate_hidden, 0):
        raise ValueError(f"gate_hidden={gate_hidden!r:.60} must be a whole number >= 0, or None for no gate")
    if type(eps) not in (int, float) or not 0 < eps < 1e30:
        raise ValueError(f"eps={eps!r:.60} must be a number > 0")


class QKProjection(nn.Module):
    """A layer around the Gram memory. x (B, T, dim) -> y (B, T, dim), and the cache to resume from.

    q, k projections, gate = σ(MLP(x)) per token and head → `project` → output map. Call `project` for heads of your own.

    persistent: the number of learned keys. window: the number of tokens in the sum, the current one included;
    None for all. decay: initial value of the learned decay per head, None for no decay. gate_hidden: width of the gate's MLP, None for
    gate 1. normalise: "sum" or "per_key". chunk_size: affects speed alone.

    >>> layer = QKProjection(dim=32, heads=4)
    >>> x = torch.randn(2, 100, 32)
    >>> y, _ = layer(x)
    >>> first, cache = layer(x[:, :37])
    >>> second, cache = layer(x[:, 37:], cache)
    >>> torch.allclose(y, torch.cat([first, second], 1), atol=1e-5), cache.gram.shape
    (True, torch.Size([2, 4, 8, 8]))
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        persistent: int = 64,
        window: int | None = None,
        decay: float | None = 0.95,
        gate_hidden: int | None = 64,
        normalise: str = "sum",
        chunk_size: int = 64,
        eps: float = 1e-6,
    ):
        super().__init__()
        if heads < 1 or (head_dim is None and dim % heads):
            raise ValueError(f"heads={heads} must divide dim={dim}, or give head_dim")
        check_choices(persistent, window, decay, gate_hidden, normalise, chunk_size, eps)
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads if head_dim is None else head_dim
        self.window, self.normalise, self.chunk_size, self.eps = window, normalise, chunk_size, eps
        self.qk = nn.Linear(dim, 2 * heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.gate = (
            nn.Sequential(nn.Linear(dim, gate_hidden), nn.SiLU(), nn.Linear(gate_hidden, heads))
            if gate_hidden
            else None
        )
        self.persistent_keys = nn.Parameter(torch.empty(heads, persistent, self.head_dim)) if persistent else None
        self.decay = decay
        self.decay_offset = None if decay is None else nn.Parameter(torch.empty(heads))  # to its logit
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise persistent keys of about unit norm, and the decay."""
        if self.persistent_keys is not None:
            nn.init.normal_(self.persistent_keys, std=self.head_dim**-0.5)
        if self.decay_offset is not None:
            nn.init.zeros_(self.decay_offset)

    def forward(
        self, x: Tensor, cache: QKCache | None = None, mask: Tensor | None = None, use_cache: bool = True
    ) -> tuple[Tensor, QKCache | None]:
        """x (B, T, dim) after the tokens of `cache` -> y (B, T, dim) and the new cache (None without use_cache).

        mask: (B, T) bool, True on a prefix of each row. Tokens behind it are not written to the cache; their y is finite but arbitrary.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim or 0 in x.shape:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but (batch, time, dim={self.dim}) with at least one token is expected"
            )
        if mask is not None and (mask.shape != x.shape[:2] or mask.dtype != torch.bool):
            raise ValueError(
                f"mask has shape {tuple(mask.shape)} and type {mask.dtype}, but bool {tuple(x.shape[:2])} is expected"
            )
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        q, k = self.qk(x).unflatten(-1, (2 * self.heads, -1)).chunk(2, dim=2)
        gate = None if self.gate is None else self.gate(x).sigmoid()
        y, cache = self.project(q, k, gate, cache, mask)
        return self.out(y.flatten(2)), cache if use_cache else None

    def project(
        self,
        q: Tensor,
        k: Tensor,
        gate: Tensor | None = None,
        cache: QKCache | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, QKCache]:
        """q, k (B, T, H, D), gate (B, T, H) in [0, 1] or None for 1 -> q' (B, T, H, D) in the dtype of q, and the cache."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        if cache is None:
            cache = self.initial_cache(q.shape[0], dtype, q.device)
        self._check_cache(cache, q.shape[0])
        held = cache.gram if self.window is None else cache.key
        if held is not None and held.dtype != dtype:
            cache = cache.to(dtype)
        kind = q.device.type  # the meta device has no autocast
        with full_precision(kind):
            gate = torch.ones(q.shape[:3], dtype=dtype, device=q.device) if gate is None else gate.to(dtype)
            if mask is not None:
                gate = gate.masked_fill(~mask.unsqueeze(-1), 0.0)
            wide_q, k = q.to(dtype), k.to(dtype)
            if self.normalise == "per_key":
                k = l2_normalize(k, self.eps)
            if self.window is not None:
                total, norm, cache = self._slide(wide_q, k, gate, cache, self.window, mask)
            elif q.shape[1] == 1:
                total, norm, cache = self._step(wide_q, k, gate, cache, mask)
            else:
                total, norm, cache = self._chunks(wide_q, k, gate, cache, mask)
            y = self._with_persistent(wide_q, total, norm)
        return y.to(q.dtype), cache

    def initial_cache(self, batch: int, dtype: torch.dtype | None = None, device=None) -> QKCache:
        """The cache before the first token of `batch` sequences."""
        weight, H, D = self.qk.weight, self.heads, self.head_dim
        dtype = torch.promote_types(weight.dtype, torch.float32) if dtype is None else dtype
        device = weight.device if device is None else device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        position = torch.zeros(batch, dtype=torch.int64, device=device)
        if self.window is None:
            return QKCache(position, gram=zeros(H, D, D), norm=zeros(H))
        return QKCache(position, key=zeros(self.window - 1, H, D), gate=zeros(self.window - 1, H))

    def _log_decay(self, like: Tensor) -> Tensor:
        """(H,), ≤ 0."""
        if self.decay is None or self.decay_offset is None:
            return like.new_zeros(self.heads)
        return F.logsigmoid(self.decay_offset.to(like.dtype) + math.log(self.decay / (1.0 - self.decay)))

    def _with_persistent(self, q: Tensor, total: Tensor, norm: Tensor) -> Tensor:
        """Add M_p q to total (B, T, H, D) and n_p to norm (B, T, H); then normalise."""
        if self.persistent_keys is not None:
            keys = self.persistent_keys.to(q.dtype)
            if self.normalise == "per_key":
                keys = l2_normalize(keys, self.eps)
            total = total + torch.einsum("bthd,hde->bthe", q, keys.mT @ keys)
            norm = norm + keys.square().sum((1, 2))
        return total / (norm + self.eps).unsqueeze(-1) if self.normalise == "sum" else total

    def _step(self, q, k, gate, cache: QKCache, mask: Tensor | None) -> tuple[Tensor, Tensor, QKCache]:
        """One token per row: the recurrence."""
        assert cache.gram is not None and cache.norm is not None
        keep = self._log_decay(q).exp()
        if mask is not None:
            keep = torch.where(mask, keep, 1.0)  # B H
        gated = k[:, 0] * gate[:, 0].unsqueeze(-1)  # B H D
        gram = torch.addcmul(gated.unsqueeze(-1) * k[:, 0].unsqueeze(-2), cache.gram, keep[..., None, None])
        norm = cache.norm * keep + (gated * k[:, 0]).sum(-1)
        total = (q[:, 0].unsqueeze(-2) @ gram).squeeze(-2)
        position = cache.position + (1 if mask is None else mask[:, 0])
        cache = dataclasses.replace(cache, gram=gram, norm=norm, position=position)
        return total.unsqueeze(1), norm.unsqueeze(1), cache

    def _chunks(self, q, k, gate, cache: QKCache, mask: Tensor | None) -> tuple[Tensor, Tensor, QKCache]:
        """Many tokens: attention without softmax inside each chunk, the Gram matrix from chunk to chunk."""
        assert cache.gram is not None and cache.norm is not None
        B, T, H, _ = q.shape
        C = min(self.chunk_size, T)
        N = -(-T // C)
        more = N * C - T
        valid = q.new_ones(1, T) if mask is None else mask.to(q.dtype)
        if more:
            q, k = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (q, k))
            gate, valid = F.pad(gate, (0, 0, 0, more)), F.pad(valid, (0, more))
        q, k = (x.unflatten(1, (N, C)).permute(0, 3, 1, 2, 4) for x in (q, k))  # B H N C D
        gate = gate.unflatten(1, (N, C)).permute(0, 3, 1, 2)  # B H N C
        age = valid.unflatten(1, (N, C)).cumsum(-1).unsqueeze(1)  # B 1 N C, valid tokens of the chunk up to this one
        log_decay = self._log_decay(q)[:, None, None]  # H 1 1

        lag = (age.unsqueeze(-1) - age.unsqueeze(-2)).clamp(min=0.0)
        weight = (log_decay.unsqueeze(-1) * lag).exp().tril() * gate.unsqueeze(-2)  # B H N C C
        squares = k.square().sum(-1, keepdim=True)
        total = ((q @ k.mT) * weight) @ k
        norm = (weight @ squares).squeeze(-1)  # B H N C

        last = age[..., -1:]
        end = gate * (log_decay * (last - age)).exp()  # weights of a chunk's tokens at its end
        added = (k * end.unsqueeze(-1)).mT @ k  # B H N D D
        added_norm = (end * squares.squeeze(-1)).sum(-1)
        kept = (log_decay * last).exp().squeeze(-1).expand(B, H, N)
        gram, sums = [cache.gram], [cache.norm]
        for n in range(N):
            gram.append(torch.addcmul(added[:, :, n], gram[-1], kept[:, :, n, None, None]))
            sums.append(torch.addcmul(added_norm[:, :, n], sums[-1], kept[:, :, n]))
        since = (log_decay * age).exp()  # decay since the start of the chunk
        total = total + since.unsqueeze(-1) * (q @ torch.stack(gram[:-1], 2))
        norm = norm + since * torch.stack(sums[:-1], 2).unsqueeze(-1)

        total = total.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T]  # B T H D
        norm = norm.permute(0, 2, 3, 1).flatten(1, 2)[:, :T]
        position = cache.position + (T if mask is None else mask.sum(1))
        return total, norm, dataclasses.replace(cache, gram=gram[-1], norm=sums[-1], position=position)

    def _slide(self, q, k, gate, cache: QKCache, window: int, mask: Tensor | None) -> tuple[Tensor, Tensor, QKCache]:
        """A window of keys: each block of queries with the keys it can reach."""
        assert cache.key is not None and cache.gate is not None
        B, T, W = q.shape[0], q.shape[1], window - 1
        C = min(max(self.chunk_size, W // 2), T)
        N = -(-T // C)
        more = N * C - T
        keys, gates = torch.cat((cache.key, k), 1), torch.cat((cache.gate, gate), 1)  # B W+T
        q, padded, padded_gates = (
            F.pad(x.flatten(2), (0, 0, 0, more)).unflatten(2, x.shape[2:]) for x in (q, keys, gates)
        )
        blocks = q.unflatten(1, (N, C)).flatten(0, 1).transpose(1, 2)  # B*N H C D
        near = reach(padded, keys[:, :0], N, C, W).transpose(1, 2)  # B*N H W+C D
        near_gates = reach(padded_gates, gates[:, :0], N, C, W).transpose(1, 2)  # B*N H W+C
        index = torch.arange(W + C, device=q.device)
        lag = index[W:].unsqueeze(1) - index  # C W+C
        inside = (lag >= 0) & (lag <= W)
        decay = (self._log_decay(q)[:, None, None] * lag.clamp(min=0)).exp() * inside  # H C W+C
        weight = decay * near_gates.unsqueeze(-2)
        total = ((blocks @ near.mT) * weight) @ near
        norm = (weight @ near.square().sum(-1, keepdim=True)).squeeze(-1)  # B*N H C
        total = total.transpose(1, 2).unflatten(0, (B, N)).flatten(1, 2)[:, :T]
        norm = norm.transpose(1, 2).unflatten(0, (B, N)).flatten(1, 2)[:, :T]
        if mask is None:
            count, keys, gates = T, keys[:, T:].clone(), gates[:, T:].clone()
        else:
            count = mask.sum(1)
            row, last = torch.arange(B, device=q.device).unsqueeze(1), count.unsqueeze(1) + index[:W]
            keys, gates = keys[row, last], gates[row, last]
        return total, norm, dataclasses.replace(cache, key=keys, gate=gates, position=cache.position + count)

    def _check_cache(self, cache: QKCache, batch: int) -> None:
        H, D = self.heads, self.head_dim
        if not isinstance(cache, QKCache):
            raise ValueError(f"cache is a {type(cache).__name__}, but must be the QKCache of an earlier call")
        if cache.batch != batch:
            raise ValueError(f"cache has {cache.batch} batch rows, but x has {batch}; use cache.select([...])")
        held = cache.gram if self.window is None else cache.key
        expected = (batch, H, D, D) if self.window is None else (batch, self.window - 1, H, D)
        if held is None or held.shape != expected:
            raise ValueError(
                f"cache belongs to another layer: window={self.window}, heads={H}, head_dim={D} do not fit"
            )

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, window={self.window}, normalise={self.normalise!r}"
