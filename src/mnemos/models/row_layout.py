"""Batches with padding or packed documents: the layout of their valid tokens as rows.

Valid tokens are moved to the front of their rows before the first block, and back after the last. Left padding, right padding, holes
and packed documents all become rows of tokens that begin at column 0, so that no block has to handle them.
Shapes: B, T as given; R rows, L tokens in the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory.validation import as_boundaries


@dataclass
class RowLayout:
    """The valid tokens of a batch (B, T) as rows (R, L).

    token_index: (R, L), the flat index of each slot's token in the batch. slot_index: (B * T,), the flat slot of each token; R * L
    for tokens that are left out. mask: (R, L), True in slots with a token. batch_shape: (B, T).

    >>> layout = row_layout(torch.tensor([[False, True, True]]))
    >>> packed = layout.pack(torch.tensor([[0, 7, 8]]))
    >>> packed, layout.unpack(packed)
    (tensor([[7, 8]]), tensor([[0, 7, 8]]))
    """

    token_index: Tensor
    slot_index: Tensor
    mask: Tensor
    batch_shape: tuple[int, int]

    def pack(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (R, L, ...); slots without a token have arbitrary values."""
        return x.flatten(0, 1)[self.token_index]

    def unpack(self, y: Tensor) -> Tensor:
        """(R, L, ...) -> (B, T, ...), 0 for tokens that were left out."""
        y = y.flatten(0, 1)
        return torch.cat([y, y.new_zeros(1, *y.shape[1:])])[self.slot_index].unflatten(0, self.batch_shape)


def row_layout(mask: Tensor | None, document_starts: Tensor | None = None) -> RowLayout | None:
    """The layout of the valid tokens; None if the batch has one document per row and no padding.

    mask: (B, T) bool, True for valid tokens; None: all are. document_starts: (B, T) bool, True for the first token of each document;
    None: every row is one document.
    """
    if document_starts is not None:
        mask = torch.ones_like(document_starts) if mask is None else mask
        return _document_rows(mask, document_starts)
    if mask is None or (not torch.compiler.is_compiling() and bool(mask.all())):
        return None
    B, T = mask.shape
    lengths = mask.sum(1)
    L = T if torch.compiler.is_compiling() else max(1, int(lengths.max()))
    row = torch.arange(B, device=mask.device).unsqueeze(1)
    token_index = torch.argsort(~mask, dim=1, stable=True)[:, :L] + row * T
    slot_index = torch.where(mask, mask.cumsum(1) - 1 + row * L, B * L).flatten()
    filled = torch.arange(L, device=mask.device) < lengths.unsqueeze(1)
    return RowLayout(token_index, slot_index, filled, (B, T))


def _document_rows(mask: Tensor, starts: Tensor) -> RowLayout:
    """One row per document, even if none of its tokens is valid. The first token of a document may be invalid."""
    B, T = mask.shape
    tokens = mask.flatten().nonzero().squeeze(1)  # n
    document = (starts.flatten().cumsum(0) - 1)[tokens]
    R = int(starts.sum())
    lengths = torch.bincount(document, minlength=R)
    offset = torch.arange(len(tokens), device=mask.device) - (lengths.cumsum(0) - lengths)[document]
    L = max(1, int(lengths.max()))
    token_index = torch.zeros(R, L, dtype=torch.int64, device=mask.device)
    token_index[document, offset] = tokens
    slot_index = torch.full((B * T,), R * L, device=mask.device)
    slot_index[tokens] = document * L + offset
    filled = torch.arange(L, device=mask.device) < lengths.unsqueeze(1)
    return RowLayout(token_index, slot_index, filled, (B, T))


def starts_from_cu_seqlens(cu_seqlens: Tensor | list[int], shape: tuple[int, int]) -> Tensor:
    """Boundaries [0, end of document 1, …, T] of a single packed row -> (1, T), True for the first token of each document.

    >>> starts_from_cu_seqlens([0, 2, 3], (1, 3))
    tensor([[ True, False,  True]])
    """
    cu_seqlens = as_boundaries(cu_seqlens)
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 else None
    if bounds is None or cu_seqlens.is_floating_point() or shape[0] != 1:
        raise ValueError(
            "cu_seqlens must be a whole-number vector [0, end of document 1, ..., T] for a batch of one sequence"
        )
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != shape[1] or any(a >= b for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"cu_seqlens must rise from 0 to T={shape[1]}, but is {bounds[:4]}...{bounds[-1:]}")
    starts = torch.zeros(shape, dtype=torch.bool, device=cu_seqlens.device)
    starts[0, cu_seqlens[:-1].long()] = True
    return starts


def starts_from_position_ids(position_ids: Tensor, mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Positions (B, T) -> (B, T), True for the first valid token of each document; None if every row is one document.

    A document begins where positions restart inside a row, at 0 or behind a masked 0. Shapes depend on the result, so
    torch.compile has to wait for it too.

    >>> starts_from_position_ids(torch.tensor([[0, 1, 0, 1]]), None, (1, 4))
    tensor([[ True, False,  True, False]])
    """
    if position_ids.dim() != 2 or position_ids.shape[1] != shape[1]:
        return None
    valid = torch.ones(shape, dtype=torch.bool, device=position_ids.device) if mask is None else mask
    first = valid & (valid.cumsum(1) == 1)
    position = position_ids.expand(shape)
    index = torch.arange(shape[1], device=position.device)
    last = index.where(valid, 0).cummax(1).values.roll(1, 1)  # the last valid token before each
    again = valid & ~first & ((position == 0) | (position < position.gather(1, last)))
    return first | again if bool(again.any()) else None
