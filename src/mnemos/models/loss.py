"""Cross-entropy over a large vocabulary, computed in pieces of tokens with their gradients, so that logits are never all in memory.

Shapes: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.derivatives import first_order_only

IGNORED = -100
MAX_LOGITS_NUMEL = 2**22  # in memory at once


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax(hidden weightᵀ)[target] over the tokens with a target other than -100, and the number of those tokens.

    hidden: (N, D). weight: (V, D). targets: (N,) of 0..V-1 or -100. Logits are float32 or wider.

    >>> loss, count = cross_entropy(torch.randn(5, 8), torch.randn(100, 8), torch.tensor([1, 2, -100, 3, 4]))
    >>> loss.shape, count
    (torch.Size([]), tensor(4))
    """
    if torch.is_autocast_enabled(hidden.device.type):
        low = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(low), weight.to(low)
    keep = targets != IGNORED
    count = keep.sum()
    if (
        hidden.device.type == "cpu" and not torch.compiler.is_compiling() and count < len(targets)
    ):  # on other devices, waiting for the count costs more
        hidden, targets = hidden[keep], targets[keep]
    return _CrossEntropy.apply(hidden, weight, targets), count


class _CrossEntropy(torch.autograd.Function):
    """The forward pass computes the gradients too, while it has the logits: three matmuls per piece, nothing is recomputed."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        N, V = hidden.shape[0], weight.shape[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        total = hidden.new_zeros((), dtype=wide)
        step = max(1, MAX_LOGITS_NUMEL // V)
        for start in range(0, N, step):
            part, target = hidden[start : start + step], targets[start : start + step]
            keep = (target != IGNORED).unsqueeze(1)  # n 1
            place = target.unsqueeze(1).where(keep, 0)  # any other number outside the vocabulary fails below
            logits = (part @ weight.mT).to(wide)  # n V
            log_sum = logits.logsumexp(1, keepdim=True)
            total += ((log_sum - logits.gather(1, place)) * keep).sum()
            if need_hidden or need_weight:
                error = logits.sub_(log_sum).exp_().mul_(keep)
                error.scatter_add_(1, place, -keep.to(wide))
                error = error.to(hidden.dtype)
                if grad_hidden is not None:
                    torch.mm(error, weight, out=grad_hidden[start : start + step])
                if grad_weight is not None:
                    grad_weight += error.mT @ part
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @first_order_only("compute the loss from logits, as return_logits=True gives them")
    def backward(ctx, grad: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled = [None if x is None else x * grad.to(x.dtype) for x in (grad_hidden, grad_weight)]
        return *scaled, None
