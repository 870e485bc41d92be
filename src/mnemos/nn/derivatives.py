"""Errors for second derivatives and for `torch.func` transforms that a function does not support; each names the alternative."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
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
