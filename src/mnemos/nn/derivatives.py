"""How functions are differentiated: recomputed in the backward pass, or not at all, with an error that names the alternative.

Activation checkpointing here keeps a function's arguments instead of its graph. Unlike with torch's checkpoint, the forward pass builds no
graph, so that the function may itself call `torch.autograd.grad`. In return, every tensor that needs a gradient must be an argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SCAN = "use mnemos.memory.reference_scan in the place of scan, or backend='torch'"


def first_order_only(instead: str) -> Callable[[Callable], Callable]:
    """Decorator for `backward` of an autograd.Function: raises NotImplementedError under create_graph=True, naming the alternative `instead`.

    torch's own `once_differentiable` raises only if the incoming gradient requires a gradient. That of `y.sum()` does not, and
    the second derivative would lack all terms that pass through the function.

    >>> class Square(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x * x
    ...     @staticmethod
    ...     @first_order_only("use x * x")
    ...     def backward(ctx, grad):
    ...         return 2 * ctx.saved_tensors[0] * grad
    >>> x = torch.ones(1, requires_grad=True)
    >>> try: torch.autograd.grad(Square.apply(x).sum(), x, create_graph=True)
    ... except NotImplementedError as error: print(error)
    Square has no second derivatives, which create_graph=True asks for: use x * x
    """

    def decorate(backward: Callable) -> Callable:
        guarded = once_differentiable(backward)

        @functools.wraps(backward)
        def wrapper(ctx, *grads):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                name = type(ctx).__name__.removesuffix("Backward").strip("_")
                raise NotImplementedError(
                    f"{name} has no second derivatives, which create_graph=True asks for: {instead}"
                )
            return guarded(ctx, *grads)

        return wrapper

    return decorate


def transformed() -> bool:
    """Whether `torch.func.grad`, `vmap` or another transform of torch.func is active."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def refuse_transforms(name: str) -> None:
    """Raise NotImplementedError inside torch.func transforms."""
    if transformed():
        raise NotImplementedError(
            f"{name} does not support torch.func transforms (grad, vmap, jvp and others): "
            "use torch.autograd.grad, and a batch in place of vmap"
        )


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
