"""Attention of a pretrained model over a window and sinks, as an attention implementation of transformers.

Queries are computed in blocks, each with the keys that its window reaches, by the implementation that the model had before: the work
grows with T · window. Token i sees token j of its document if j <= i and (i - j < W or j < S), and the base's own window holds too.
Shapes: B, T as given; R rows of L tokens; H heads, D head dim; W window, S sinks, P past columns; N blocks of C queries.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from .call import KEYWORD, AttachedCall
from .ring import is_single

PREFIX = "mnemos_window_"


def eager_attention(module: nn.Module, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
    """The eager attention of the modeling file that `module` comes from."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function(module, *args, **kwargs)
    raise ValueError(f"{type(module).__name__} has no eager attention: use attn_implementation='sdpa'")


INNER: dict[str, tuple[Callable, Callable]] = {
    "sdpa": (sdpa_attention_forward, sdpa_mask),
    "eager": (eager_attention, eager_mask),
}


def limits(window: int, sinks: int, own: int | None) -> tuple[int, int, int | None]:
    """Window, sinks and the base's own window of a layer, where the last one matters.

    >>> limits(256, 4, None), limits(256, 4, 128), limits(256, 4, 1024)
    ((256, 4, None), (128, 0, None), (256, 4, 1024))
    """
    return (own, 0, None) if own is not None and own <= window else (window, sinks, own)


def windowed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, *, inner: str, **kwargs
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, (B, H, T, D) -> (B, T, H, D). Without an `AttachedCall` it is the implementation `inner` itself."""
    call, compute = kwargs.pop(KEYWORD, None), INNER[inner][0]
    if call is None:
        return compute(module, query, key, value, attention_mask, **kwargs)
    W, S, own = call.limits[module.layer_idx]
    q = call.pack_heads(query)  # R H L D
    if call.cache is not None and is_single(call):
        mask = call.plan(("slot mask", W, S, own), slot_mask, call, W, S, own)
        return compute(module, q, key, value, _as_mask(mask, inner, q.dtype), **kwargs)[0], None
    if call.cache is None:
        key, value = call.pack_heads(key), call.pack_heads(value)
    y = _blocks(module, q, key, value, call, (W, S, own), functools.partial(compute, **kwargs), inner)
    return call.unpack(y).contiguous(), None


def _blocks(module, q: Tensor, key: Tensor, value: Tensor, call: AttachedCall, layer, compute, inner: str) -> Tensor:
    """(R, H, L, D) -> (R, L, H, D), block by block. With a cache, keys have sinks and past columns in front."""
    W, S, _ = layer
    R, H, L, _ = q.shape
    C = min(W, L)
    N = -(-L // C)
    if call.cache is None:
        S = min(S, L) if L > W else 0  # nothing is beyond the window yet
        P = W if N > 1 else 0
        sinks = [x[:, :, :S] for x in (key, value)]
        news = [F.pad(x, (0, 0, P, N * C - L)) for x in (key, value)]
    else:
        P = W
        sinks = [x[:, :, :S] for x in (key, value)]
        news = [F.pad(x[:, :, S:], (0, 0, 0, N * C - L)) for x in (key, value)]
    q = F.pad(q, (0, 0, 0, N * C - L)).unflatten(2, (N, C)).transpose(1, 2).flatten(0, 1)  # RN H C D
    k, v = (_with_sinks(sink, new.unfold(2, P + C, C), N) for sink, new in zip(sinks, news))
    mask = call.plan(("block mask", S, P, C, N, *layer), block_mask, call, S, P, C, N, layer, q.device)
    y = compute(module, q, k, v, _as_mask(mask, inner, q.dtype))[0]  # RN C H D
    return y.view(R, N * C, H, -1)[:, :L]


def _with_sinks(sinks: Tensor, blocks: Tensor, N: int) -> Tensor:
    """sinks (R, H, S, D), blocks (R, H, N, D, P + C) -> (R · N, H, S + P + C, D)."""
    blocks = blocks.permute(0, 2, 1, 4, 3)  # R N H P+C D
    if sinks.shape[2]:
        blocks = torch.cat([sinks.unsqueeze(1).expand(-1, N, -1, -1, -1), blocks], dim=3)
    return blocks.flatten(0, 1).contiguous()


def block_mask(call: AttachedCall, S: int, P: int, C: int, N: int, layer, device: torch.device) -> Tensor:
    """(R · N, 1, C, S + P + C), True where a query sees a key."""
    W, _, own = layer
    R = call.rows[0]
    start = torch.zeros(1, device=device, dtype=torch.int64) if call.start is None else call.start
    block = start.view(-1, 1, 1, 1) + torch.arange(0, N * C, C, device=device).view(1, N, 1, 1)
    query = block + torch.arange(C, device=device).view(1, 1, C, 1)
    key = block + torch.arange(-P, C, device=device).view(1, 1, 1, P + C)
    distance = query - key  # r N C P+C, the same for every row
    seen = (distance >= 0) & (distance < W) & (key >= 0)
    beyond = query - torch.arange(S, device=device).view(1, 1, 1, S)
    far = (beyond >= W) if own is None else (beyond >= W) & (beyond < own)
    return torch.cat([far, seen], dim=3).expand(R, -1, -1, -1).reshape(R * N, 1, C, S + P + C)


def slot_mask(call: AttachedCall, W: int, S: int, own: int | None) -> Tensor:
    """(R, 1, 1, S + W), True in the slots of a `RingLayer` that one new token sees."""
    assert call.start is not None
    position = call.start.view(-1, 1, 1, 1)
    beyond = position - torch.arange(S, device=position.device)
    far = (beyond >= W) if own is None else (beyond >= W) & (beyond < own)
    return torch.cat([far, torch.arange(W, device=position.device) <= position], dim=3)


def _as_mask(mask: Tensor, inner: str, dtype: torch.dtype) -> Tensor:
    """A boolean mask as the implementation takes it: eager attention adds it to the scores."""
    if inner != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def use_window(name: str) -> str:
    """The windowed implementation that computes blocks by the implementation `name`. Raises a ValueError for one without masks.

    >>> use_window("sdpa"), use_window("mnemos_window_eager")
    ('mnemos_window_sdpa', 'mnemos_window_eager')
    """
    plain = name.removeprefix(PREFIX)
    if plain not in INNER:
        raise ValueError(
            f"window needs attn_implementation {' or '.join(map(repr, INNER))}, but the model has {name!r:.60}"
        )
    return PREFIX + plain


for _name, (_, _mask) in INNER.items():
    AttentionInterface.register(PREFIX + _name, functools.partial(windowed_attention, inner=_name))
    AttentionMaskInterface.register(PREFIX + _name, _mask)
