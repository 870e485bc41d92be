"""Causal depthwise convolution over time with an explicit left context: any split of a sequence into calls gives the same result.

Shapes: B batch, T time, C channels, N documents, K = width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .derivatives import transformed


class CausalConv1d(nn.Module):
    """Depthwise causal convolution: y_t = Σ_j weight[j] x_{t-width+1+j}, channel by channel, without bias.

    x: (B, T, C). tail: (B, width-1, C), the raw inputs just before x; None for zeros. mask: (B, T) bool, True for valid tokens;
    an invalid token is skipped as if it were not in the row, and its output is 0. cu_seqlens: (N+1,), the
    document boundaries of a single packed row (B = 1); the convolution restarts at each, and tails have batch N.
    Returns y (B, T, C) and the tail for the next call.

    >>> conv = CausalConv1d(8, width=4)
    >>> x = torch.randn(2, 10, 8)
    >>> y, _ = conv(x)
    >>> first, tail = conv(x[:, :7])
    >>> second, tail = conv(x[:, 7:], tail)
    >>> torch.allclose(y, torch.cat([first, second], 1)), tail.shape
    (True, torch.Size([2, 3, 8]))
    """

    def __init__(self, channels: int, width: int = 4):
        super().__init__()
        if width < 1:
            raise ValueError(f"width={width} must be >= 1")
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(width, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -(self.width**-0.5), self.width**-0.5)

    def checked_weight(self) -> Tensor:
        """The weight (width, C). Raises a ValueError if it was replaced by one of another shape."""
        if self.weight.shape != (self.width, self.channels):
            raise ValueError(
                f"weight has shape {tuple(self.weight.shape)}, but {(self.width, self.channels)} is expected"
            )
        return self.weight

    def initial_tail(self, batch: int) -> Tensor:
        """(batch, width-1, C) zeros, float32 or wider."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return torch.zeros(batch, self.width - 1, self.channels, dtype=dtype, device=self.weight.device)

    def forward(
        self, x: Tensor, tail: Tensor | None = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, weight = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, self.checked_weight()
        if x.dim() != 3 or x.shape[-1] != self.channels:
            raise ValueError(f"x has shape {tuple(x.shape)}, but (batch, time, {self.channels}) is expected")
        if tail is not None and tuple(tail.shape) != (rows, self.width - 1, self.channels):
            raise ValueError(
                f"tail has shape {tuple(tail.shape)}, but {(rows, self.width - 1, self.channels)} is expected"
            )
        if cu_seqlens is not None and x.shape[0] != 1:
            raise ValueError(f"cu_seqlens needs one packed sequence, but x has batch {x.shape[0]}")
        return causal_conv(x, weight, tail, mask, cu_seqlens)

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}"


def causal_conv(
    x: Tensor, weight: Tensor, tail: Tensor | None = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`CausalConv1d` as a function of its weight (width, C). The new tail has the dtype of the old one, or of x without one."""
    context = weight.shape[0] - 1
    weight = weight.to(x.dtype)
    if tail is None:
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        tail = x.new_zeros(rows, context, x.shape[-1])
    if mask is not None:  # move the valid tokens of each row to its left end; the others then affect nothing
        mask = mask.bool()
        order = torch.argsort(mask.logical_not().to(torch.uint8), dim=1, stable=True)
        x = x.gather(1, order.unsqueeze(-1).expand_as(x))

    if cu_seqlens is None:
        padded = torch.cat([tail.to(x.dtype), x], dim=1)  # B K-1+T C
        y = _convolve(padded, weight)
        if mask is None:
            new_tail = padded[:, x.shape[1] :].clone()
        else:
            last = mask.sum(1, keepdim=True) + torch.arange(context, device=x.device)  # B K-1
            new_tail = padded.gather(1, last.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    else:
        y, new_tail = _packed(x, weight, tail, cu_seqlens if mask is None else _shrink(cu_seqlens, mask))

    if mask is not None:
        rank = (mask.cumsum(1) - 1).clamp(min=0)
        y = y.gather(1, rank.unsqueeze(-1).expand_as(y)).masked_fill(~mask.unsqueeze(-1), 0.0)
    return y, new_tail.to(tail.dtype)


def _shrink(cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """Boundaries of the documents after the invalid tokens of the packed row are removed."""
    before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask[0].cumsum(0)])
    return before[cu_seqlens.long()]


def _packed(x: Tensor, weight: Tensor, tail: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Documents in one row, each behind its own tail: [tail_0 doc_0 tail_1 doc_1 …]."""
    context, documents, channels = weight.shape[0] - 1, tail.shape[0], x.shape[-1]
    ends = cu_seqlens.to(device=x.device, dtype=torch.int64)
    tokens = torch.arange(x.shape[1], device=x.device)
    document = torch.searchsorted(ends[1:].contiguous(), tokens, right=True)  # N for tokens behind the last one
    place = tokens + (document + 1) * context
    slots = torch.arange(documents, device=x.device).unsqueeze(1) * context + torch.arange(context, device=x.device)
    tail_place = (ends[:-1].unsqueeze(1) + slots).flatten()
    length = x.shape[1] + (documents + 1) * context
    padded = x.new_zeros(length, channels).index_copy(0, place, x[0])
    padded = padded.index_copy(0, tail_place, tail.to(x.dtype).flatten(0, 1))
    y = _convolve(padded.unsqueeze(0), weight)[:, place - context]
    new_tail = padded[(ends[1:].unsqueeze(1) + slots).flatten()].view(documents, context, channels)
    return y, new_tail


def _convolve(padded: Tensor, weight: Tensor) -> Tensor:
    """(B, K-1+T, C), (K, C) -> (B, T, C). The transforms of torch.func need torch operations."""
    return _shifted_sum(padded, weight) if transformed() else _Convolve.apply(padded, weight)


def _shifted_sum(padded: Tensor, weight: Tensor) -> Tensor:
    T = padded.shape[1] - weight.shape[0] + 1
    y = padded[:, :T] * weight[0]
    for j in range(1, weight.shape[0]):
        y.addcmul_(padded[:, j : j + T], weight[j])
    return y


class _Convolve(torch.autograd.Function):
    """(B, K-1+T, C), (K, C) -> (B, T, C) as K shifted multiplications.

    On a CPU this trains 3 times as fast as F.conv1d, in every dtype; autograd's own backward of the shifts would build K padded copies.
    """

    @staticmethod
    def forward(ctx, padded: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(padded, weight)
        return _shifted_sum(padded, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # ty: ignore[incompatible-method-override]
        padded, weight = ctx.saved_tensors
        T = grad.shape[1]
        grad_padded = torch.zeros_like(padded)
        for j in range(weight.shape[0]):
            grad_padded[:, j : j + T].addcmul_(grad, weight[j])
        grad_weight = torch.stack([(grad * padded[:, j : j + T]).sum((0, 1)) for j in range(weight.shape[0])])
        return grad_padded, grad_weight
