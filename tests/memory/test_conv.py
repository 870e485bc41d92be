"""The causal convolution: what it computes, and that no split, mask or packing changes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import assert_close_rms
from mnemos.nn.conv import CausalConv1d

f64 = torch.float64
B, T, C = 2, 21, 5


def build(width: int = 4) -> CausalConv1d:
    torch.manual_seed(width)
    return CausalConv1d(C, width).double()


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def valid_tokens(batch: int = B, length: int = T, seed: int = 3) -> torch.Tensor:
    return torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 0.6


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_it_is_a_depthwise_causal_convolution(width):
    conv, x = build(width), some(B, T, C)
    expected = F.conv1d(F.pad(x.mT, (width - 1, 0)), conv.weight.mT.unsqueeze(1), groups=C).mT
    y, tail = conv(x)
    assert_close_rms(y, expected, 1e-14)
    assert y.dtype == f64
    assert tail.shape == (B, width - 1, C)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("cuts", [[1, 2, 3], [7, 20], [13], list(range(1, T))])
def test_any_split_gives_the_same_outputs_and_tail(width, cuts):
    conv, x = build(width), some(B, T, C)
    whole, end = conv(x)
    tail, parts = None, []
    for start, stop in zip([0, *cuts], [*cuts, T]):
        y, tail = conv(x[:, start:stop], tail)
        parts.append(y)
    assert_close_rms(torch.cat(parts, 1), whole, 1e-14)
    assert torch.equal(tail, end)


def test_later_inputs_change_earlier_outputs_by_exactly_zero():
    conv, x = build(), some(B, T, C)
    other = x.clone()
    other[:, 9:] = some(B, T - 9, C, seed=1)
    assert torch.equal(conv(x)[0][:, :9], conv(other)[0][:, :9])


@pytest.mark.parametrize("with_tail", [False, True])
def test_a_masked_token_is_as_if_it_were_not_there(with_tail):
    conv, x, mask = build(), some(B, T, C), valid_tokens()
    tail = some(B, 3, C, seed=1) if with_tail else None
    y, end = conv(x.masked_fill(~mask.unsqueeze(-1), float("nan")), tail, mask)
    for row in range(B):
        alone, alone_end = conv(x[row : row + 1, mask[row]], None if tail is None else tail[row : row + 1])
        assert_close_rms(y[row : row + 1, mask[row]], alone, 1e-14)
        assert torch.equal(end[row : row + 1], alone_end)
    assert (y[~mask] == 0).all()


def test_a_row_without_valid_tokens_keeps_its_tail():
    conv, tail = build(), some(B, 3, C, seed=1)
    _, end = conv(some(B, T, C), tail, torch.zeros(B, T, dtype=torch.bool))
    assert torch.equal(end, tail)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_tail", [False, True])
def test_packed_documents_are_the_documents_alone(masked, with_tail):
    bounds = [0, 2, 2, 9, 10, 21]  # shorter than the context, and empty
    conv, x, cu = build(), some(1, T, C), torch.tensor(bounds)
    mask = valid_tokens(1) if masked else None
    tail = some(len(bounds) - 1, 3, C, seed=1) if with_tail else None
    y, end = conv(x, tail, mask, cu)
    for n, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        keep = torch.ones(hi - lo, dtype=torch.bool) if mask is None else mask[0, lo:hi]
        alone, alone_end = conv(x[:, lo:hi][:, keep], None if tail is None else tail[n : n + 1])
        assert_close_rms(y[:, lo:hi][:, keep], alone, 1e-14)
        assert torch.equal(end[n : n + 1], alone_end)


@pytest.mark.parametrize("way", ["plain", "mask", "packed"])
def test_gradients_are_right_even_of_gradients(way):
    conv, x = build(), some(1, 8, C).requires_grad_()
    arguments = {"plain": {}, "mask": {"mask": valid_tokens(1, 8)}, "packed": {"cu_seqlens": torch.tensor([0, 2, 8])}}[
        way
    ]
    tail = some(2 if way == "packed" else 1, 3, C, seed=1).requires_grad_()

    def run(x, tail, weight):
        return torch.func.functional_call(conv, {"weight": weight}, (x, tail), arguments)

    weight = conv.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, tail, weight))
    assert torch.autograd.gradgradcheck(run, (x, tail, weight))


def test_the_tail_does_not_keep_the_sequence_alive():
    _, tail = build()(some(1, 1000, C))
    assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()


def test_bad_input_is_refused_in_one_sentence():
    conv = build()
    with pytest.raises(ValueError, match=r"x has shape .*5\) is expected"):
        conv(some(B, T, C + 1))
    with pytest.raises(ValueError, match="tail has shape"):
        conv(some(B, T, C), some(B, 2, C))
    with pytest.raises(ValueError, match="cu_seqlens needs one packed sequence"):
        conv(some(B, T, C), cu_seqlens=torch.tensor([0, T]))
    with pytest.raises(ValueError, match="width=0"):
        CausalConv1d(C, 0)
