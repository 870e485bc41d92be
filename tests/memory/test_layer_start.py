"""What a memory starts from: learned, but no faster than it writes, and no larger than its steps allow."""

from __future__ import annotations

import pytest
import torch
from layers import some

from mnemos.memory import read
from mnemos.memory.layer import NeuralMemory

STRUCTURES = ["linear", "mlp", "gated_mlp"]


@pytest.mark.parametrize("chunk_size", [8, 64])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_step_of_the_outer_optimiser_moves_less_than_a_token_writes(structure, chunk_size):
    """Otherwise what a memory starts from soon hides what it is told."""
    torch.manual_seed(0)
    mem = NeuralMemory(64, heads=1, structure=structure, chunk_size=chunk_size, momentum=False)
    x = some(8, 1, 64, dtype=torch.float32)
    assert mem.W0 is not None
    with torch.no_grad():
        k = mem.project(x, mem.initial_state(8), None, None)[1]
        fresh = read(k, mem.initial_state(8), mem.spec, mem.features)
        written = read(k, mem.write(x), mem.spec, mem.features) - fresh
        mem.W0[-1] += 0.01 * k.mean().sign()  # as Adam's first step at that rate
        moved = read(k, mem.initial_state(8), mem.spec, mem.features) - fresh
    assert fresh.norm() < written.norm() and moved.norm() < written.norm()


@pytest.mark.parametrize("case", [dict(), dict(depth=4), dict(structure="gated_mlp"), dict(key_dim=20)], ids=str)
def test_a_learned_start_cannot_outgrow_what_the_inner_learning_rate_allows(case):
    """Maps as drawn are used as they are; grown ones are shortened, in their largest direction too, and still get a gradient."""
    torch.manual_seed(0)
    mem = NeuralMemory(32, heads=2, **case)
    assert mem.W0 is not None
    drawn = mem.initial_state(1).weights
    assert all(torch.equal(w[0], w0) for w, w0 in zip(drawn[:-1], mem.W0[:-1]))
    largest = [torch.linalg.matrix_norm(w0, 2).max().item() for w0 in mem.W0]
    with torch.no_grad():
        for w0 in mem.W0[:-1]:
            w0 += 5 * torch.randn(2, w0.shape[1], 1) @ torch.randn(2, 1, w0.shape[2])  # one direction runs away
    start = mem.initial_state(1).weights
    for w, before in zip(start[:-1], largest[:-1]):
        assert torch.linalg.matrix_norm(w[0], 2).max().item() < 1.4 * before
    mem(some(1, 70, 32, dtype=torch.float32))[0].square().sum().backward()
    assert all(w0.grad is not None and w0.grad.isfinite().all() and w0.grad.any() for w0 in mem.W0)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_start_that_turned_to_its_keys_does_not_make_a_memory_diverge(depth):
    """Every hidden map with one direction, all keys in it: as far as training can go. Of maps drawn at random four in a chain left all bounds."""
    torch.manual_seed(0)
    mem = NeuralMemory(32, heads=2, depth=depth)
    assert mem.W0 is not None
    with torch.no_grad():
        for i, w in enumerate(mem.W0[:-1]):
            w.copy_(torch.full_like(w, 10.0) if i else 10 * torch.randn(2, w.shape[1], 1).sign().expand_as(w))
        _, state = mem(torch.randn(8, 2, 32).repeat(1, 1024, 1))
    assert max(w.flatten(2).norm(dim=2).max().item() for w in state.weights) < 10


def test_hidden_maps_of_a_long_chain_are_drawn_orthogonal_and_opened_as_they_were_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    from mnemos.models import presets

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        presets.config("titans-lmm", "nano", memory_depth=4, num_hidden_layers=1)
    )
    W0 = model.model.layers[0].mixer.memory.W0
    for w in W0[:-1]:
        assert torch.allclose(torch.linalg.svdvals(w), torch.tensor(2.0), atol=1e-4)
    with torch.no_grad():
        for w in W0:
            w.add_(0.1 * torch.randn_like(w))
    model.save_pretrained(tmp_path)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(w, v) for w, v in zip(W0, opened.model.layers[0].mixer.memory.W0))


@pytest.mark.parametrize(
    "case", [dict(), dict(residual=True), dict(features="monomials", key_dim=5), dict(depth=3)], ids=str
)
def test_the_start_is_read_beside_the_memory_through_a_norm_of_its_own(case):
    """A memory that is still all of its start says the same as the start; one that has been written to does not change the start's part."""
    torch.manual_seed(0)
    case = case | dict(w0_scale=1.0, conv_width=None)
    mem = NeuralMemory(16, heads=2, **case).double()
    alone = NeuralMemory(16, heads=2, w0_branch=False, **case).double()
    alone.load_state_dict(mem.state_dict(), strict=False)
    x, fresh = some(2, 9, 16), mem.initial_state(2)
    assert torch.allclose(mem.read(x, fresh), 2 * alone.read(x, fresh), rtol=1e-12)
    state = mem.write(some(2, 70, 16, seed=1))
    assert torch.allclose(mem.read(x, state), alone.read(x, state) + alone.read(x, fresh), rtol=1e-12)


def test_an_empty_memory_is_silent_and_one_that_was_told_is_not():
    torch.manual_seed(0)
    mem = NeuralMemory(64, heads=1)
    assert mem.W0 is not None and mem.start_norm is not None
    with torch.no_grad():
        mem.W0[-1].normal_(std=0.1)  # as training makes it
        mem.start_norm.weight.zero_()
        x = some(1, 200, 64, dtype=torch.float32)
        empty, told = mem.read(x, mem.initial_state(1)), mem.read(x, mem.write(x))
    assert empty.norm() < 0.2 * told.norm()


def test_a_memory_of_muon_begins_from_its_whole_start_and_one_of_gradients_next_to_empty():
    torch.manual_seed(0)
    for rule, share in (("muon", 1.0), ("gd", 0.1 / 16)):
        mem = NeuralMemory(32, heads=2, rule=rule, chunk_size=16)
        begun = mem.initial_state(1).weights[-1][0]
        assert mem.W0 is not None and torch.allclose(begun, share * mem.W0[-1])


@pytest.mark.parametrize("momentum", [True, False])
def test_a_gated_network_or_three_maps_have_a_quarter_of_the_rate_of_two(momentum):
    case = dict(heads=2, chunk_size=16, momentum=momentum)
    two = NeuralMemory(32, **case).config.effective_max_lr
    assert two == pytest.approx((1 if momentum else 0.5) / 16)
    assert NeuralMemory(32, structure="gated_mlp", **case).config.effective_max_lr == two / 4
    assert NeuralMemory(32, depth=3, **case).config.effective_max_lr == two / 4


def test_a_start_scale_that_cannot_be_is_refused():
    for scale in (0, -1.0, float("inf"), "a"):
        with pytest.raises(ValueError, match=r"w0_scale=.* must be None or a number > 0"):
            NeuralMemory(32, w0_scale=scale)
