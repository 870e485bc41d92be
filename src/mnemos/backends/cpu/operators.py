"""C++ kernels as torch sees them: autograd Functions in eager mode, operators `mnemos::name` while torch compiles.

Both run the same functions. Eager calls do not pass through torch's dispatcher: with it, a training step of titans-lmm nano takes
8 % longer at 256 tokens (docs/log.md). Tensors cross into C++ (border.h) as views, which the kernels check against their own sizes
before they touch memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

NO_MEMORY, DONE, NOT_FINITE = 0, 1, 2  # outcomes of a kernel; any other: it rejects its arguments
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


class View(ctypes.Structure):
    """An array: its address, and how many bytes it has."""

    _fields_ = [("at", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one kind of a C structure, by their names between blanks."""
    return [(name, kind) for name in names.split()]


def view(x: Tensor | None) -> tuple[int, int]:
    """Address and bytes of a contiguous tensor; nothing for none."""
    if x is None or x.numel() == 0:
        return 0, 0
    try:
        return x.data_ptr(), x.nbytes
    except RuntimeError:  # a stand-in for many tensors
        raise NotImplementedError(
            "kernels take one gradient at a time: use is_grads_batched=False, vectorize=False or backend='torch'"
        ) from None


def check(outcome: int, kernel: str) -> bool:
    """True where the kernel is done, False where it met a gate that is not finite and wrote nothing; else an error in words."""
    if outcome == DONE:
        return True
    if outcome == NOT_FINITE:
        return False
    if outcome == NO_MEMORY:
        raise MemoryError(
            f"there is no memory for the buffers of kernel {kernel!r}: use shorter sequences or backend='torch'"
        )
    raise ValueError(
        f"kernel {kernel!r} rejects its arguments: a tensor does not have the size that the layer expects or a position is out of range; "
        "continue from a state that this layer returned, or from mem.initial_state(batch)"
    )
