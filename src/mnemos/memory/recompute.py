"""Work that keeps its arguments instead of its graph, and is done again in the backward pass.

Unlike torch's checkpoint the forward pass builds no graph at all, so that the work may itself call `torch.autograd.grad`;
in return the function must take all it needs gradients of as arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def recomputed(function: Callable[..., tuple], *tensors: Tensor | None) -> tuple:
    """function(*tensors), a tuple of which those that are tensors carry gradients back to `tensors`.

    >>> x = torch.ones(3, requires_grad=True)
    >>> (y,) = recomputed(lambda x: (x.square().sum(),), x)
    >>> torch.autograd.grad(y, x)[0]
    tensor([2., 2., 2.])
    """
    return _Recomputed.apply(function, *tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function: Callable[..., tuple], *tensors: Tensor | None) -> tuple:
        ctx.function = function
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return function(*(x if x is None else x.detach() for x in tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        wanted = ctx.needs_input_grad[1:]
        leaves = [x if x is None else x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, wanted)]
        device = next(x.device.type for x in leaves if x is not None)
        with torch.enable_grad(), torch.autocast(device, enabled=False):
            outputs = ctx.function(*leaves)
        pairs = [(y, g) for y, g in zip(outputs, grads) if g is not None and y.requires_grad]
        if not pairs:
            return (None,) * (1 + len(leaves))
        ys, gs = zip(*pairs)
        found = iter(torch.autograd.grad(ys, [x for x, need in zip(leaves, wanted) if need], gs, allow_unused=True))
        return None, *(next(found) if need else None for need in wanted)
