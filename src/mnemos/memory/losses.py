"""Inner losses: what a write minimises. `error` is the gradient of the loss with respect to the network's output."""

from __future__ import annotations

from torch import Tensor

OBJECTIVES = ("l2", "dot")


def loss(objective: str, output: Tensor, value: Tensor) -> Tensor:
    """Loss per token, summed over the last axis: (..., E), (..., E) -> (...)."""
    if objective == "l2":
        return 0.5 * (output - value).square().sum(-1)
    return -(output * value).sum(-1)


def error(objective: str, output: Tensor | None, value: Tensor) -> Tensor:
    """d loss / d output. The dot objective does not look at the output, which may then be None."""
    if objective == "l2":
        assert output is not None
        return output - value
    return -value
