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
def test_with_a_small_start_scale_a_step_of_the_outer_optimiser_moves_less_than_a_token_writes(structure, chunk_size):
    """With the start_scale that is advised for recall. Otherwise what a memory starts from soon hides what it is told."""
    torch.manual_seed(0)
    mem = NeuralMemory(
        64,
        heads=1,
        structure=structure,
        chunk_size=chunk_size,
        momentum=False,
        skip=False,
        start_scale=0.1 / chunk_size,
    )
    x = some(8, 1, 64, dtype=torch.float32)
    assert mem.W0 is not None
    with torch.no_grad():
        k = mem._project(x, mem.initial_state(8), None, None)[1]
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


def test_a_start_scale_that_cannot_be_is_refused():
    for scale in (0, -1.0, float("inf"), "a"):
        with pytest.raises(ValueError, match=r"start_scale=.* must be a number > 0"):
            NeuralMemory(32, start_scale=scale)
