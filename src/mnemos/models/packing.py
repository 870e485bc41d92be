"""Ragged batches: valid tokens are moved to the front of their rows once, and the layout is restored at the end.

Left padding, right padding, holes and packed documents all become rows of tokens that start at column 0, so that no layer needs
to know of them. Shapes: B, T as given; R rows, L the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory.validation import as_boundaries


@dataclass
class Rows:
    """index: (R, L) flat token of each place. place: (B*T,) flat place of each token, R*L for those left out. mask: (R, L)."""

    index: Tensor
    place: Tensor
    mask: Tensor
    layout: tuple[int, int]

    def take(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (R, L, ...); what lies behind a row's end is arbitrary."""
        return x.flatten(0, 1)[self.index]

    def restore(self, y: Tensor) -> Tensor:
        """(R, L, ...) -> (B, T, ...), 0 where no token was taken."""
        y = y.flatten(0, 1)
        return torch.cat([y, y.new_zeros(1, *y.shape[1:])])[self.place].unflatten(0, self.layout)


def rows_of(mask: Tensor | None, starts: Tensor | None) -> Rows | None:
    """How to lay out valid tokens (B, T) as rows; None where they are rows already. `starts`: where documents begin."""
    if starts is not None:
        return _documents(torch.ones_like(starts) if mask is None else mask, starts)
    if mask is None or (not torch.compiler.is_compiling() and bool(mask.all())):
        return None
    B, T = mask.shape
    lengths = mask.sum(1)
    L = T if torch.compiler.is_compiling() else max(1, int(lengths.max()))
    row = torch.arange(B, device=mask.device).unsqueeze(1)
    index = torch.argsort(~mask, dim=1, stable=True)[:, :L] + row * T
    place = torch.where(mask, mask.cumsum(1) - 1 + row * L, B * L).flatten()
    return Rows(index, place, torch.arange(L, device=mask.device) < lengths.unsqueeze(1), (B, T))


def _documents(mask: Tensor, starts: Tensor) -> Rows:
    """One row for each document, also for one of which nothing is valid: a document begins where it does, valid there or not."""
    B, T = mask.shape
    tokens = mask.flatten().nonzero().squeeze(1)  # n
    document = (starts.flatten().cumsum(0) - 1)[tokens]
    R = int(starts.sum())
    lengths = torch.bincount(document, minlength=R)
    offset = torch.arange(len(tokens), device=mask.device) - (lengths.cumsum(0) - lengths)[document]
    L = max(1, int(lengths.max()))
    index = torch.zeros(R, L, dtype=torch.int64, device=mask.device)
    index[document, offset] = tokens
    place = torch.full((B * T,), R * L, device=mask.device)
    place[tokens] = document * L + offset
    return Rows(index, place, torch.arange(L, device=mask.device) < lengths.unsqueeze(1), (B, T))


def starts_from_lengths(cu_seqlens: Tensor | list[int], shape: tuple[int, int]) -> Tensor:
    """Boundaries [0, end of document 1, …, T] of a single packed row -> (1, T), True where a document begins."""
    cu_seqlens = as_boundaries(cu_seqlens)
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 else None
    if bounds is None or cu_seqlens.is_floating_point() or shape[0] != 1:
        raise ValueError(
            "cu_seqlens must be a whole-number vector [0, end of document 1, ..., T] for a batch of one row"
        )
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != shape[1] or any(a >= b for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"cu_seqlens must rise from 0 to T={shape[1]}, but is {bounds[:4]}...{bounds[-1:]}")
    starts = torch.zeros(shape, dtype=torch.bool, device=cu_seqlens.device)
    starts[0, cu_seqlens[:-1].long()] = True
    return starts


def starts_from_positions(position_ids: Tensor, mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Where positions begin again inside a row, at 0 or behind a masked 0, documents begin; None where every row is one document. Which it is decides what
    is computed, so torch.compile has to wait for the answer too."""
    if position_ids.dim() != 2 or position_ids.shape[1] != shape[1]:
        return None
    valid = torch.ones(shape, dtype=torch.bool, device=position_ids.device) if mask is None else mask
    first = valid & (valid.cumsum(1) == 1)
    position = position_ids.expand(shape)
    index = torch.arange(shape[1], device=position.device)
    last = index.where(valid, 0).cummax(1).values.roll(1, 1)  # the last valid token before each
    again = valid & ~first & ((position == 0) | (position < position.gather(1, last)))
    return first | again if bool(again.any()) else None
