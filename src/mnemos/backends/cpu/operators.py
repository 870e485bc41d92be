"""C++ kernels as torch sees them: autograd Functions in eager mode, operators `mnemos::name` while torch compiles.

Both run the same functions. Eager calls do not pass through torch's dispatcher: with it, a training step of titans-lmm nano takes
8 % longer at 256 tokens (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Decorator: torch calls the function while it compiles, and compiles its result in.

    That is `torch.compiler.assume_constant_result` without its import of torch._dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # ty: ignore[missing-attribute]
    return function


class Operator:
    """A kernel: `launch(outputs, *inputs)` fills the tensors that `outputs(*inputs)` returns.

    schema: of inputs and outputs, in the dispatcher's notation.
    """

    def __init__(self, name: str, schema: str, outputs: Callable[..., Any], launch: Callable[..., None]):
        self.name, self.outputs, self.launch = name, outputs, launch
        self.definition = torch.library.custom_op(f"mnemos::{name}", self.run, mutates_args=(), schema=schema)
        self.definition.register_fake(outputs)
        self.overload = getattr(torch.ops.mnemos, name).default

    def run(self, *inputs):
        made = self.outputs(*inputs)
        self.launch(made, *inputs)
        return made

    def __call__(self, *inputs):
        """The outputs, without gradients. Tensors without memory (in a traced graph) pass through the dispatcher."""
        plain = all(type(x) in PLAIN for x in inputs if isinstance(x, Tensor))
        return self.run(*inputs) if plain else self.overload(*inputs)


def differentiable(operator: Operator, keep: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with gradients. keep(ctx, inputs, output) saves what backward(ctx, *grads) needs."""
    operator.definition.register_autograd(backward, setup_context=keep)

    def forward(ctx, *inputs):
        made = operator.run(*inputs)
        keep(ctx, inputs, made)
        return made

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(operator.name, (torch.autograd.Function,), methods)
    overload = operator.overload

    def apply(*inputs):
        return overload(*inputs) if torch.compiler.is_compiling() else function.apply(*inputs)

    return apply


def empty(x: Tensor | None, like: Tensor) -> Tensor:
    """A contiguous tensor of x's shape; one of no elements if x is None, for an operator cannot return None."""
    return like.new_empty(0 if x is None else x.shape)
