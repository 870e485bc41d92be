"""Activation checkpointing: a function that keeps its arguments instead of its graph, and is recomputed in the backward pass.

Unlike with torch's checkpoint, the forward pass builds no graph, so that the function may itself call `torch.autograd.grad`.
In return, every tensor that needs a gradient must be an argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def full_precision(device_type: str) -> torch.autocast:
    """Context without autocast, also for devices that have none (meta)."""
    return torch.autocast(device_type if torch.amp.is_autocast_available(device_type) else "cpu", enabled=False)


def in_full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: no autocast inside a function whose second argument is a tensor of the device."""

    @functools.wraps(function)
    def wrapped(first, second: Tensor, *arguments, **keywords):
        with full_precision(second.device.type):
            return function(first, second, *arguments, **keywords)

    return wrapped


def recomputed(function: Callable[..., tuple], *tensors: Tensor | None) -> tuple:
    """function(*tensors), a tuple. Gradients of its tensors reach `tensors` by recomputing the function.

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
    def backward(ctx, *grads: Tensor | None):
        return None, *gradients(ctx.function, ctx.saved_tensors, ctx.needs_input_grad[1:], grads)


def gradients(
    function: Callable[..., tuple],
    tensors: Sequence[Tensor | None],
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of function(*tensors), a tuple, with respect to the `wanted` tensors, from those of its outputs.

    With gradients enabled (in a backward pass: under create_graph=True) they are part of the graph of `tensors` and `grads`.
    """
    again = torch.is_grad_enabled()

    def entry(x: Tensor | None, need: bool) -> Tensor | None:
        if x is None or not again:
            return x if x is None else x.detach().requires_grad_(need)
        return x.view_as(x) if need else x  # a view: one of the tensors may have been made from another

    inputs = [entry(x, need) for x, need in zip(tensors, wanted)]
    device = next(x.device.type for x in inputs if x is not None)
    with torch.enable_grad(), full_precision(device):
        outputs = function(*inputs)
    pairs = [(y, g) for y, g in zip(outputs, grads) if g is not None and y.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    ys, gs = zip(*pairs)
    leaves = [x for x, need in zip(inputs, wanted) if need and x is not None]
    found = iter(torch.autograd.grad(ys, leaves, gs, create_graph=again, allow_unused=True))
    return [next(found) if need else None for need in wanted]
