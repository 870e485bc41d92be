"""Vitality: effective rank, distance from W0, and what a chunk teaches a memory that has read much."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mnemos.memory import (
    NeuralMemory,
    distance_from_w0,
    effective_rank,
    effective_ranks,
    measure_vitality,
    relearning,
)
from mnemos.memory.vitality import lowest_rank, noise_like, spectrum_rank
from vitality_cases import DIM, LEAST, each_memory, streamed

STREAM = 8000


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# --- effective rank


def test_effective_rank_counts_equal_directions():
    assert spectrum_rank(torch.tensor([[3.0, 0, 0], [2.0, 2.0, 2.0]])).tolist() == pytest.approx([1.0, 3.0])
    U, V = torch.linalg.qr(torch.randn(2, 8, 8)).Q
    for n in (1, 3, 8):
        assert effective_rank(U[:, :n] @ V[:n]).item() == pytest.approx(n, rel=1e-4)


def test_effective_rank_is_the_exponential_of_the_entropy():
    values = [4.0, 2.0, 1.0, 1.0]
    expected = math.prod((v / 8) ** (-v / 8) for v in values)
    assert effective_rank(torch.diag(torch.tensor(values))).item() == pytest.approx(expected, rel=1e-5)


def test_effective_rank_does_not_depend_on_scale_and_is_zero_for_zeros():
    W = torch.randn(5, 7)
    tiny = effective_rank(torch.stack([W, 1e-25 * W, torch.zeros(5, 7)])).tolist()
    assert tiny[0] == pytest.approx(tiny[1], rel=1e-4) and tiny[0] > 3 and tiny[2] == 0


def test_effective_rank_of_a_matrix_that_is_not_finite_is_nan_beside_others():
    found = effective_rank(torch.stack([torch.eye(3), torch.full((3, 3), math.inf)]))
    assert found[0].item() == pytest.approx(3) and math.isnan(found[1])


def test_ranks_are_those_of_every_map_and_head_and_the_lowest_map_counts():
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8)
    state = layer.write(torch.randn(3, 20, 32)).detach()
    ranks = effective_ranks(state)
    assert ranks.shape == (3, 2, 2)
    assert ranks[1, 1, 0].item() == pytest.approx(effective_rank(state.weights[0][1, 1]).item())
    flat = dataclasses.replace(state, weights=[state.weights[0], torch.ones_like(state.weights[1])])
    assert lowest_rank(flat) == pytest.approx(1.0, abs=1e-3)
    assert lowest_rank(state) == pytest.approx(ranks.mean((0, 1)).min().item()) and lowest_rank(state) > 4


# --- distance from W0


def test_distance_is_relative_to_w0_over_all_maps():
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8)
    start = layer.initial_state(2)
    with torch.no_grad():
        assert distance_from_w0(layer, start).eq(0).all()
        assert torch.allclose(distance_from_w0(layer, start.map(lambda x: 0 * x)), torch.ones(2, 2))
        moved = dataclasses.replace(start, weights=[3 * w for w in start.weights])
        assert torch.allclose(distance_from_w0(layer, moved), torch.full((2, 2), 2.0))


def test_distance_from_zeros_is_infinite_once_anything_is_written():
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8, structure="linear", learn_w0=False)
    assert distance_from_w0(layer, layer.initial_state(1)).eq(0).all()
    assert distance_from_w0(layer, layer.write(torch.randn(1, 8, 32))).isinf().all()


def test_weights_that_are_not_finite_have_no_distance():
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8)
    broken = layer.initial_state(1).map(lambda x: x * math.nan)
    assert distance_from_w0(layer, broken).isnan().all() and math.isnan(lowest_rank(broken))


# --- relearning


def noise(layer: NeuralMemory, batch: int, chunks: int = 1) -> torch.Tensor:
    return torch.randn(batch, chunks * layer.spec.chunk_size, layer.config.dim)


@pytest.mark.parametrize("kind", [{}, {"window": 3}, {"rule": "muon"}, {"objective": "huber_switch"}])
def test_losses_of_one_chunk_are_those_of_a_trace_in_which_it_comes_twice(kind):
    """Without a convolution the chunk has the same keys both times."""
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8, conv_width=0, **kind)
    past, chunk = noise(layer, 2, chunks=2), noise(layer, 2)
    with torch.no_grad():
        found = relearning(layer, chunk, layer.write(past))
        _, _, trace = layer(torch.cat([past, chunk, chunk], 1), trace=True)
    torch.testing.assert_close(found.before, trace.surprise[:, 16:24].mean(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.after, trace.surprise[:, 24:].mean(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.learned, found.before - found.after)


def test_what_a_chunk_teaches_about_other_chunks_is_subtracted():
    """The same by hand: each of three chunks is written, and all are measured by traces of what comes next."""
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8, conv_width=0)
    state, x, n = layer.write(noise(layer, 1)).detach(), noise(layer, 1, chunks=3), 3
    found = relearning(layer, torch.cat([x, x[:, :5]], 1), state)  # a rest of 5 tokens is left out
    chunks = x.split(8, 1)

    def loss(chunk, state):
        with torch.no_grad():
            return layer(chunk, state, trace=True)[2].surprise.mean(1)

    after = [layer.write(chunk, state).detach() for chunk in chunks]
    fall = [[loss(chunks[j], state) - loss(chunks[j], after[i]) for j in range(n)] for i in range(n)]
    own = sum(fall[i][i] for i in range(n)) / n
    others = sum(fall[i][j] for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    torch.testing.assert_close(found.learned, own - others, rtol=1e-4, atol=1e-7)


def test_a_fresh_memory_relearns_as_much_as_a_fresh_memory():
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8)
    found = relearning(layer, noise(layer, 2, chunks=3), layer.initial_state(2))
    assert found.ratio == pytest.approx(1.0)
    assert (found.learned > 0).all() and found.learned.shape == (2, 2)


def test_linear_attention_relearns_exactly_as_when_fresh_whatever_it_has_read():
    """Its writes do not depend on its weights."""
    layer = NeuralMemory(dim=32, heads=2, structure="linear", objective="dot", retain=False, momentum=False)
    state = layer.write(torch.randn(1, 1000, 32))
    assert relearning(layer, noise(layer, 1, chunks=2), state).ratio == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    "kind", [{}, {"rule": "muon"}, {"structure": "linear", "anchor": "token"}, {"features": "exp"}]
)
@pytest.mark.parametrize("tokens", [24, 27])
def test_relearning_leaves_the_state_as_it_was(kind, tokens):
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8, window=2, **kind)
    state = layer.write(torch.randn(1, tokens, 32)).detach()
    state = dataclasses.replace(state, inplace=True)
    kept = state.clone()
    relearning(layer, noise(layer, 1, chunks=2), state)
    measure_vitality(layer, noise(layer, 1), state)
    after, before = state.tensors(), kept.tensors()
    assert all(torch.equal(after[name], before[name]) for name in before) and state.inplace


def test_a_dead_memory_learns_nothing_from_a_chunk():
    """Both maps of the network at 0: no map has a gradient."""
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8)
    state = layer.write(noise(layer, 1, chunks=2))
    zero = [0 * w for w in state.weights]
    dead = dataclasses.replace(state, weights=zero, anchor=zero, momentum=[0 * s for s in state.momentum])
    assert relearning(layer, noise(layer, 1, chunks=2), dead).ratio == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("rule", ["gd", "muon"])
def test_the_fresh_memory_has_the_same_chunk_ends_as_the_state(rule):
    """In the middle of a chunk, a state that has learned nothing is a fresh one."""
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8, rule=rule)
    state = dataclasses.replace(layer.initial_state(1), position=torch.tensor([5]), chunk_offset=5)
    found = relearning(layer, noise(layer, 1), state)
    torch.testing.assert_close(found.learned, found.fresh_learned)


def test_a_ratio_to_a_fresh_memory_that_learns_nothing_is_nan():
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8)
    chunk = noise(layer, 1)
    bare = dataclasses.replace(relearning(layer, chunk, layer.initial_state(1)), fresh_learned=torch.zeros(1, 2))
    assert math.isnan(bare.ratio)


def test_less_than_a_chunk_is_refused():
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8)
    with pytest.raises(ValueError, match="x has 7 tokens, but relearning shows whole chunks of chunk_size=8"):
        relearning(layer, torch.randn(1, 7, 32), layer.initial_state(1))


# --- all three


@pytest.mark.parametrize("tokens", [32, 37])
def test_all_measures_are_those_of_the_first_row(tokens):
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8)
    x = torch.randn(2, tokens, 32)
    state = layer.write(x).detach()
    found = measure_vitality(layer, x, state)
    assert found["effective_rank"] == pytest.approx(lowest_rank(state.select([0])))
    assert found["distance"] == pytest.approx(distance_from_w0(layer, state)[0].mean().item())
    assert (
        found == measure_vitality(layer, x[:1], state.select([0])) != measure_vitality(layer, x[1:], state.select([1]))
    )
    assert 0.5 < found["relearning"] < 1.5


def test_a_memory_that_keeps_every_token_has_no_relearning():
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8, features="exp")
    x = torch.randn(1, 16, 32)
    assert sorted(measure_vitality(layer, x, layer.write(x))) == ["distance", "effective_rank"]


def test_noise_has_the_mean_and_spread_of_every_channel_and_is_always_the_same():
    x = torch.tensor([1.0, -2.0, 0.0]) + torch.tensor([0.1, 1.0, 5.0]) * torch.randn(2, 500, 3)
    drawn = noise_like(x, 4000)
    torch.testing.assert_close(drawn.mean(1), x.mean(1), rtol=0, atol=0.3)
    torch.testing.assert_close(drawn.std(1), x.std(1), rtol=0.1, atol=0)
    assert drawn.shape == (2, 4000, 3) and torch.equal(drawn, noise_like(x, 4000))


# --- every memory of the presets


@pytest.mark.parametrize("config", each_memory())
def test_every_finite_memory_relearns_after_a_stream_of_noise(config):
    layer = NeuralMemory(config)
    found = relearning(layer, noise(layer, 2, chunks=4), streamed(layer, STREAM, batch=2))
    assert found.ratio > LEAST, found


def test_a_network_that_forgets_towards_zero_dies():
    """The measure sees it: otherwise the test above could not fail."""
    layer = NeuralMemory(dim=DIM, heads=2, retention="zero")
    found = relearning(layer, noise(layer, 1, chunks=4), streamed(layer, STREAM))
    assert found.ratio < 0.1, found
