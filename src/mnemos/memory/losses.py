"""Inner losses: the objective that a write minimises. A new one is a class with `loss` and `error` under `@register_loss`."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .registry import Registry


class InnerLoss:
    """Base of all inner losses. Subclass it, set `name`, and pass the class to `register_loss`.

    uses_output: whether the error depends on the network's output. linear: whether it is the output plus something that does not
    depend on it, so that the errors of a chunk can be solved for. of_difference: whether the loss depends on output - value alone;
    a network with a residual, x + f(x), is then trained as f with the target value - key.
    has_threshold: whether the loss takes a number per token, `Gates.threshold`, as a last channel behind the value: (..., V + 1).

    >>> from mnemos.memory import MemorySpec, register_loss
    >>> @register_loss
    ... class LogCosh(InnerLoss):
    ...     name = "doc_log_cosh"
    ...     of_difference = True
    ...     def loss(self, output, value):
    ...         return (output - value).cosh().log().sum(-1)
    ...     def error(self, output, value):
    ...         return (output - value).tanh()
    >>> MemorySpec(key_dim=4, value_dim=4, objective="doc_log_cosh").loss.name
    'doc_log_cosh'
    """

    name: ClassVar[str]
    uses_output: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    of_difference: ClassVar[bool] = False
    has_threshold: ClassVar[bool] = False
    initial_threshold: float = 1.0  # of `Gates.threshold` if it is None, and of the layer's gate before training
    description: str = ""  # for tables of presets

    @property
    def solvable(self) -> bool:
        """Whether errors at weights that depend on other errors are the solution of a linear system."""
        return self.linear or not self.uses_output

    def loss(self, output: Tensor, value: Tensor) -> Tensor:
        """Loss per token, summed over the last axis: (..., V), (..., V) -> (...)."""
        raise NotImplementedError

    def error(self, output: Tensor | None, value: Tensor) -> Tensor:
        """d loss / d output: (..., V). The output is None where `uses_output` is False."""
        raise NotImplementedError

    def max_curvature(self, error: float) -> float:
        """The largest second derivative by the output while |output - value| is at most `error`: it bounds the stable lr."""
        return 1.0


LOSSES: Registry[InnerLoss] = Registry("objective")
register_loss = LOSSES.register


@register_loss
class L2(InnerLoss):
    """½‖output - value‖²: no factor 2 in the gradient, so lr = 1 is an exact write for a unit key."""

    name = "l2"
    description = "L2"
    linear = True
    of_difference = True

    def loss(self, output: Tensor, value: Tensor) -> Tensor:
        return 0.5 * (output - value).square().sum(-1)

    def error(self, output: Tensor | None, value: Tensor) -> Tensor:
        assert output is not None
        return output - value


@register_loss
class Dot(InnerLoss):
    """-<output, value>: Hebbian, linear attention."""

    name = "dot"
    description = "dot product"
    uses_output = False

    def loss(self, output: Tensor, value: Tensor) -> Tensor:
        return -(output * value).sum(-1)

    def error(self, output: Tensor | None, value: Tensor) -> Tensor:
        return -value
