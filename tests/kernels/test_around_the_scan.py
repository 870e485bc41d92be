"""What a layer does around its scan: the compiled passes against formulas written here, gradients of everything included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import assert_close, needs_kernel, randomise
from mnemos.memory import NeuralMemory
from mnemos.nn.norm import rms_norm

pytestmark = needs_kernel


def mixed_by_hand(x: Tensor, tail: Tensor | None, weight: Tensor | None, heads: int, dims, norms):
    """Token by token: convolve, SiLU, s / sqrt(alpha Σ s² + epsilon) of every head."""
    if weight is not None and tail is not None:
        padded, K = torch.cat([tail, x], 1), len(weight)
        x = torch.stack([(padded[:, t : t + K] * weight).sum(1) for t in range(x.shape[1])], 1)
        tail = padded[:, padded.shape[1] - K + 1 :]
    parts = (x / (1 + torch.exp(-x))).split([heads * d for d in dims], -1)
    heads_of = [part.unflatten(-1, (heads, -1)) for part in parts]
    return *(s / (a * s.square().sum(-1, keepdim=True) + e).sqrt() for s, (a, e) in zip(heads_of, norms)), tail


def equal_with_gradients(found, expected, inputs, tolerance: float = 1e-12) -> None:
    pairs = [(a, b) for a, b in zip(found, expected) if b is not None]
    assert len(pairs) == sum(a is not None for a in found)
    weights = [torch.randn_like(b) for _, b in pairs]
    gradients = (
        torch.autograd.grad(side, inputs, weights, allow_unused=True, materialize_grads=True) for side in zip(*pairs)
    )
    for a, b in [*pairs, *zip(*gradients)]:
        assert_close(a, b, tolerance)


NORMS = {
    "l2": ((1.0, 1e-6), (1.0, 1e-6), (0.25, 1.0)),
    "none": ((0.0, 1.0), (0.2, 1e-3), (0.0, 1.0)),
}


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("width", [0, 1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 50, 301])
def test_mix_is_convolution_silu_and_norms(length, width, norms):
    from mnemos.backends.cpu.layer import mix

    torch.manual_seed(0)
    B, H, dims = 2, 3, (5, 5, 7)
    x = torch.randn(B, length, H * sum(dims), dtype=torch.float64, requires_grad=True)
    tail = torch.randn(B, width - 1, x.shape[2], dtype=torch.float64, requires_grad=True) if width else None
    weight = torch.randn(width, x.shape[2], dtype=torch.float64, requires_grad=True) if width else None
    inputs = [y for y in (x, tail, weight) if y is not None]
    arguments = x, tail, weight, H, dims, NORMS[norms]
    equal_with_gradients(mix(*arguments), mixed_by_hand(*arguments), inputs)


@pytest.mark.parametrize("kept", [(0,), (1, 2), (3,)])
def test_mix_with_some_gradients_missing(kept):
    from mnemos.backends.cpu.layer import mix

    torch.manual_seed(0)
    x, tail = (torch.randn(2, n, 30, dtype=torch.float64, requires_grad=True) for n in (9, 3))
    weight = torch.randn(4, 30, dtype=torch.float64, requires_grad=True)
    arguments = x, tail, weight, 2, (4, 4, 7), NORMS["l2"]
    found, expected = ([side[i] for i in kept] for side in (mix(*arguments), mixed_by_hand(*arguments)))
    equal_with_gradients(found, expected, [x, tail, weight])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scale", [None, (9,), (6, 9)])
def test_gated_norm_is_its_formula_and_can_be_differentiated_twice(scale, gated):
    torch.manual_seed(0)
    x = torch.randn(4, 6, 9, dtype=torch.float64, requires_grad=True)
    weight = None if scale is None else torch.randn(scale, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(4, 6, 9, dtype=torch.float64, requires_grad=True) if gated else None
    inputs = [y for y in (x, weight, gate) if y is not None]

    def by_hand(x: Tensor) -> Tensor:
        y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 if weight is None else weight)
        return y if gate is None else y * F.silu(gate)

    equal_with_gradients([rms_norm(x, weight, 1e-6, gate)], [by_hand(x)], inputs)
    second = []
    for y in (rms_norm(x, weight, 1e-6, gate), by_hand(x)):
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        second += torch.autograd.grad(first.pow(2).sum(), [x])
    assert_close(second[0], second[1], 1e-11)


@pytest.mark.parametrize(
    "choices",
    [{}, {"qk_norm": "rms"}, {"qk_norm": "none", "value_bound": None}, {"conv_width": 0}, {"residual": False}],
)
def test_a_layer_gives_the_same_with_and_without_kernels(choices):
    torch.manual_seed(0)
    layers = [NeuralMemory(dim=24, heads=3, chunk_size=8, backend=b, **choices).double() for b in ("torch", "cpu")]
    randomise(layers[0])
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 31, 24, dtype=torch.float64)
    outputs = []
    for layer in layers:
        y, state = layer(x[:, :18])
        z, _ = layer(x[:, 18:], state)  # gradients go through the state, its convolution's tail included
        outputs.append([y, z, *torch.autograd.grad(z.square().sum() + y.sum(), list(layer.parameters()))])
    for a, b in zip(*outputs):
        assert_close(a, b, 1e-11)


def test_any_number_of_threads_is_close_and_the_same_number_gives_the_same_bits():
    layer, before = randomise(NeuralMemory(dim=64, heads=2)), torch.get_num_threads()
    x, found = torch.randn(3, 700, 64), {}
    try:
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            parameters = list(layer.parameters())
            now = torch.autograd.grad(layer(x)[0].square().mean(), parameters)
            if threads in found:
                assert all(torch.equal(a, b) for a, b in zip(found[threads], now))
            found[threads] = now
    finally:
        torch.set_num_threads(before)
    for a, b in zip(found[1], found[3]):
        assert_close(a, b, 2e-5)


def test_very_large_and_broken_numbers_stay_what_they_are():
    x = torch.tensor([[200.0, -200.0, 0.0, 1.0]])
    gate = torch.tensor([[1e4, -1e4, 0.0, float("nan")]])
    y, expected = rms_norm(x, gate=gate), rms_norm(x, gate=gate, backend="torch")
    assert torch.allclose(y[:, :3], expected[:, :3]) and y[0, 3].isnan()
