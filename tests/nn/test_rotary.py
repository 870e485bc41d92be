"""Rotary positions and SwiGLU."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from naive import some, turned

from helpers import assert_close_rms, randomise
from mnemos.nn import SwiGLU, apply_rotary, rotary_table


def test_rows_are_turned_by_their_own_positions():
    x, positions = some(2, 3, 4, 8), torch.tensor([[0, 1, 2], [7, 70, 7_000_000]])
    y = apply_rotary(x, positions, theta=100.0)
    for b in range(2):
        for t in range(3):
            assert_close_rms(y[b, t], turned(x[b, t], int(positions[b, t]), 100.0), 1e-9)
    assert torch.equal(y[0, 0], x[0, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_comes_back_and_float64_is_never_narrowed(dtype):
    x = some(1, 2, 1, 64, dtype=dtype)
    y = apply_rotary(x, torch.tensor([[12345, 54321]]))
    exact = apply_rotary(x.double(), torch.tensor([[12345, 54321]]))
    assert y.dtype == dtype
    assert_close_rms(y, exact, {torch.float64: 1e-15, torch.float32: 1e-7, torch.bfloat16: 4e-3}[dtype])


def test_position_ten_million_is_as_exact_as_position_ten():
    for position in (10, 10_000_000, 10_000_001):
        cos, sin = rotary_table(torch.tensor([[position]]), 64)
        for i in range(32):
            angle = position * 10000.0 ** (-i / 32)
            assert abs(cos[0, 0, 0, i].item() - math.cos(angle)) < 2e-7
            assert abs(sin[0, 0, 0, i].item() - math.sin(angle)) < 2e-7


def test_scores_depend_on_the_distance_alone():
    q, k = some(2, 1, 1, 1, 16)
    scores = [
        (apply_rotary(q, torch.tensor([[p + 5]])) * apply_rotary(k, torch.tensor([[p]]))).sum()
        for p in (0, 3, 10_000_000)
    ]
    assert torch.allclose(torch.stack(scores), scores[0].expand(3), rtol=1e-7)


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="even number"):
        apply_rotary(torch.randn(1, 1, 1, 3), torch.zeros(1, 1))


def test_swiglu_is_its_formula_and_learns_everywhere():
    layer, x = randomise(SwiGLU(6, hidden=10).double()), some(2, 3, 6)
    gate, up = layer.gate_up.weight[:10], layer.gate_up.weight[10:]
    y = layer(x)
    assert_close_rms(y, (F.silu(x @ gate.T) * (x @ up.T)) @ layer.down.weight.T, 1e-14)
    y.square().sum().backward()
    assert all((p.grad.abs().amax(1) > 0).all() for p in layer.parameters())
    assert SwiGLU(384).hidden == 1024
    with pytest.raises(ValueError, match="hidden=0"):
        SwiGLU(6, hidden=0)
