"""`mem(x, kv=other)`: queries from one sequence; keys, values and gates from another."""

from __future__ import annotations

import pytest
import torch
from layers import CASES, DIM, HEADS, T, build, some
from oracle import assert_is_the_reference, assert_states_close, in_calls, token_by_token
from test_write_mask import layer, some_mask

from helpers import assert_close_rms

each_layer = pytest.mark.parametrize("name", [*CASES, "exp", "exp attention", "muon per token", "kl"])


@each_layer
def test_a_layer_with_two_inputs_is_the_reference_with_every_gradient(name, monkeypatch):
    assert_is_the_reference(layer(name), monkeypatch, some(2, T, DIM), kv=some(2, T, DIM, seed=1))


@each_layer
def test_x_as_kv_is_the_plain_call(name):
    mem, x = layer(name), some(2, T, DIM)
    y, end = mem(x, kv=x)
    expected, expected_end = mem(x)
    assert_close_rms(y, expected, 1e-12)
    assert_states_close(end, expected_end, 1e-12)


@each_layer
def test_two_inputs_hold_in_any_split_and_token_by_token(name):
    mem, x, kv, writes = layer(name), some(2, T, DIM), some(2, T, DIM, seed=1), some_mask(2, T)
    whole, end = mem(x, kv=kv, write_mask=writes)
    for y, state in (
        in_calls(mem, x, [1, 7, 13], kv=kv, write_mask=writes),
        token_by_token(mem, x, kv=kv, write_mask=writes),
        mem(x, kv=kv, write_mask=writes, trace=True)[:2],
    ):
        assert_close_rms(y, whole, 1e-10)
        assert_states_close(state, end)


@each_layer
def test_two_inputs_go_with_skipped_tokens_and_packed_documents(name):
    mem, x, kv, mask = layer(name), some(2, T, DIM), some(2, T, DIM, seed=1), some_mask(2, T, share=0.7)
    poison = float("nan")
    y, end = mem(
        *(t.masked_fill(~mask.unsqueeze(-1), poison) for t in (x,)),
        mask=mask,
        kv=kv.masked_fill(~mask.unsqueeze(-1), poison),
    )
    for row in range(2):
        one = slice(row, row + 1)
        alone, alone_end = mem(x[one, mask[row]], kv=kv[one, mask[row]])
        assert_close_rms(y[one, mask[row]], alone, 1e-10)
        assert_states_close(end.select([row]), alone_end)
    bounds = [0, 2, 9, 10, T]
    y, end = mem(x[:1], cu_seqlens=bounds, kv=kv[:1])
    for n, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        alone, alone_end = mem(x[:1, lo:hi], kv=kv[:1, lo:hi])
        assert_close_rms(y[:, lo:hi], alone, 1e-10)
        assert_states_close(end.select([n]), alone_end)


def test_what_is_written_depends_on_kv_alone():
    mem, x, kv = build(), some(2, T, DIM), some(2, T, DIM, seed=1)
    _, state = mem(x, kv=kv)
    _, other = mem(some(2, T, DIM, seed=2), kv=kv)
    for name in ("weights.0", "weights.1", "momentum.0", "position"):
        assert torch.equal(state.tensors()[name], other.tensors()[name])
    queries = HEADS * mem.spec.key_dim  # tails of the queries' convolution are those of x
    assert torch.equal(state.conv[..., queries:], other.conv[..., queries:])
    assert torch.equal(state.conv[..., :queries], mem(x)[1].conv[..., :queries])


def test_later_tokens_of_either_input_change_earlier_outputs_by_exactly_zero():
    mem, x, kv = build("omega"), some(2, T, DIM), some(2, T, DIM, seed=1)
    y, _ = mem(x, kv=kv)
    later = kv.clone()
    later[:, 9:] = 1.0
    assert torch.equal(mem(x, kv=later)[0][:, :9], y[:, :9])


def test_a_kv_that_does_not_fit_is_refused_and_one_that_is_not_finite_is_named():
    mem, x = build(), some(2, T, DIM)
    for wrong in (some(2, T + 1, DIM), some(2, T, DIM).float(), [1.0]):
        with pytest.raises(ValueError, match=r"^kv .* must have the shape and dtype of x"):
            mem(x, kv=wrong)
    kv = some(2, T, DIM)
    kv[1, 3] = float("nan")
    with pytest.raises(ValueError, match=r"^kv is nan in batch row 1, position 3"):
        mem(x, kv=kv)
