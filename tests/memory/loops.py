"""What the tests against plain loops share: random tokens, a run of the memory, and the comparison of numbers and gradients.

Nothing of the engine is used on the expected side; gradients of both sides come from autograd through their own code.
B batch, T time, H heads, D key dim, E value dim. Row-vector convention, x W.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from helpers import assert_close
from mnemos.memory import Gates, MemorySpec, scan

B, T, H, D, E = 2, 37, 3, 5, 4
EXACT = 1e-10
f64 = torch.float64


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=f64) * scale


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(*shape, dtype=f64)


def gate(low: float = 0.0, high: float = 1.0) -> Tensor:
    return uniform(B, T, H, low=low, high=high)


def tokens(key_dim: int = D, value_dim: int = E, key_scale: float = 0.6) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: nothing is normalised, and no two of them have one scale."""
    q, k, v = (
        normal(B, T, H, key_dim, scale=3.0),
        normal(B, T, H, key_dim, scale=key_scale),
        normal(B, T, H, value_dim, scale=2.0),
    )
    return q, k, v


def outer(k: Tensor, d: Tensor) -> Tensor:  # B H D, B H E -> B H D E
    return k.unsqueeze(-1) * d.unsqueeze(-2)


def apply(x: Tensor, W: Tensor) -> Tensor:  # B H D, B H D E -> B H E
    return (x.unsqueeze(-2) @ W).squeeze(-2)


def scalar(x: Tensor) -> Tensor:  # B H -> B H 1 1
    return x[..., None, None]


def rows(W0: list[Tensor]) -> list[Tensor]:
    return [w.expand(B, *w.shape) for w in W0]


def run(spec: MemorySpec, q, k, v, gates: Gates, W0: list[Tensor]):
    """y and the weights after the last token."""
    y, state = scan(q, k, v, gates, spec.initial_state(W0, batch=k.shape[0]), spec)
    return y, state.weights


def assert_same(actual, expected, leaves: dict[str, Tensor], tolerance: float = EXACT) -> None:
    """Outputs, final weights, and the gradients of a random functional of both."""
    (y, W), (ry, rW) = actual, expected
    assert_close(y, ry, tolerance, "y")
    for a, b in zip(W, rW):
        assert_close(a, b, tolerance, "weights")
    weigh_y, weigh_W = torch.randn_like(ry), [torch.randn_like(w) for w in rW]

    def gradients(y: Tensor, W: list[Tensor]) -> tuple[Tensor, ...]:
        total = (y * weigh_y).sum() + sum((w * x).sum() for w, x in zip(W, weigh_W))
        return torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)

    for name, a, b in zip(leaves, gradients(y, W), gradients(ry, rW)):
        assert_close(a, b, tolerance, f"gradient of {name}")


def track(**named: Tensor | None) -> dict[str, Tensor]:
    return {name: x.requires_grad_() for name, x in named.items() if x is not None}


# Gradients at the start of a chunk ----------------------------------------------------------------------------------


def gelu(z: Tensor) -> Tensor:
    return z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))


def mlp(x: Tensor, W: list[Tensor]) -> Tensor:
    return x + apply(gelu(apply(x, W[0])), W[1])
