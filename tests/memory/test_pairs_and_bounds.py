"""Several pairs per token, a bound on the norm of a gradient, and modules as memory networks, in the layer.

`several_pairs`, `bounded` and `modules` of cases.py have the same for the engine, over all its properties.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case, bounded, inputs, several_pairs
from layers import DIM, HEADS, T, build, some
from oracle import assert_is_the_reference, assert_states_close, in_calls, token_by_token
from test_write_mask import some_mask
from torch import nn

from helpers import assert_close, assert_close_rms
from mnemos.dispatch import reasons
from mnemos.memory import Gates, MemorySpec, MemoryState, NeuralMemory, NeuralMemoryConfig, register_module, scan
from mnemos.memory.networks import STRUCTURES

LAYERS = {
    "pairs": dict(pairs_per_token=3),
    "pairs in a window": dict(pairs_per_token=2, window=3, gate="token*decay", structure="gated_mlp"),
    "pairs, token anchor": dict(pairs_per_token=2, structure="linear", anchor="token", window=2, gate="per-lag"),
    "pairs, features": dict(
        pairs_per_token=2, features="monomials", key_dim=3, value_dim=5, qk_norm="rms", residual=True
    ),
    "pairs, Huber": dict(pairs_per_token=2, objective="huber", residual=True, conv_width=None, retention="start"),
    "pairs, muon": dict(pairs_per_token=2, rule="muon", commit_every=2, chunk_size=4, window=3),
    "bound": dict(max_grad_norm=0.3),
    "bound in a window": dict(max_grad_norm=0.3, window=3, gate="token", structure="linear", chunk_size=3),
    "bound, start": dict(max_grad_norm=0.3, pairs_per_token=2, retention="start", residual=True),
    "module": dict(structure="test_module"),
    "module in a window": dict(structure="test_module", window=3, retention="start", momentum=False, w0_branch=False),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def layer(name: str) -> NeuralMemory:
    return build("titans", **LAYERS[name])


@each_layer
def test_the_layer_is_the_reference_with_every_gradient(name, monkeypatch):
    assert_is_the_reference(layer(name), monkeypatch, some(2, T, DIM))


@each_layer
def test_any_split_and_token_by_token_with_all_other_options(name):
    mem, x = layer(name), some(2, T, DIM)
    timed = {"kv": some(2, T, DIM, seed=1), "write_mask": some_mask(2, T)}
    for options in ({}, timed):
        whole, end = mem(x, **options)
        for y, state in (
            in_calls(mem, x, [1, 7, 13], **options),
            token_by_token(mem, x, **options),
            mem(x, trace=True, **options)[:2],
        ):
            assert_close_rms(y, whole, 1e-10)
            assert_states_close(state, end)


@each_layer
def test_skipped_tokens_and_packed_documents(name):
    mem, x, mask, bounds = layer(name), some(2, T, DIM), some_mask(2, T, share=0.7), [0, 2, 9, 10, T]
    y, end = mem(x.masked_fill(~mask.unsqueeze(-1), float("nan")), mask=mask)
    for row in range(2):
        alone, alone_end = mem(x[row : row + 1, mask[row]])
        assert_close_rms(y[row : row + 1, mask[row]], alone, 1e-10)
        assert_states_close(end.select([row]), alone_end)
    y, end = mem(x[:1], cu_seqlens=bounds)
    for n, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        alone, alone_end = mem(x[:1, lo:hi])
        assert_close_rms(y[:, lo:hi], alone, 1e-10)
        assert_states_close(end.select([n]), alone_end)


@each_layer
def test_float32_and_a_saved_state(name, tmp_path):
    mem, x = layer(name), some(2, T, DIM)
    expected, _ = mem(x)
    mem = mem.float()
    first, state = mem(x[:, :12].float())
    state.save(tmp_path / "state.safetensors")
    second, _ = mem(x[:, 12:].float(), MemoryState.load(tmp_path / "state.safetensors", mem.spec))
    tolerance = 5e-4 if mem.spec.rule == "muon" else 2e-5
    assert_close_rms(torch.cat([first, second], 1), expected, tolerance)


@each_layer
def test_every_parameter_has_a_gradient_at_the_first_step(name):
    torch.manual_seed(0)
    mem = NeuralMemory(DIM, heads=HEADS, **{"chunk_size": 4, "max_lr": 0.2} | LAYERS[name])
    y, _ = mem(some(2, T, DIM, dtype=torch.float32))
    (y * some(2, T, DIM, seed=9, dtype=torch.float32)).sum().backward()
    assert [name for name, p in mem.named_parameters() if p.grad is None or not p.grad.abs().amax() > 0] == []


def test_the_pairs_of_a_token_are_as_many_tokens_at_one_anchor():
    """Without momentum and decay a token of two pairs is two tokens of a chunk twice as long, read after the second."""
    spec = MemorySpec(key_dim=4, value_dim=4, expansion=2, chunk_size=5, pairs_per_token=2, momentum=False)
    x = inputs(Case(spec, ()))
    y, state = scan(x.q, x.k, x.v, x.gates, x.state(spec), spec)
    single = dataclasses.replace(spec, chunk_size=10, pairs_per_token=1)
    k, v = (z.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2) for z in (x.k, x.v))  # B 2T H D
    q, lr = x.q.repeat_interleave(2, 1), x.gates.lr.repeat_interleave(2, 1)
    expected, end = scan(q, k, v, Gates(lr=lr), x.state(single), single)
    assert_close(y, expected[:, 1::2], 1e-12, "y")
    assert_close(state.weights[0], end.weights[0], 1e-12, "weights")


def test_a_bound_shortens_gradients_and_keeps_their_direction():
    spec = MemorySpec(key_dim=4, value_dim=4, expansion=2, momentum=False, max_grad_norm=1.5)
    free = dataclasses.replace(spec, max_grad_norm=None)
    x = inputs(Case(spec, ()), batch=40, length=1)
    steps = {}
    for s in (spec, free):
        state = x.state(s)
        _, after = scan(x.q, x.k, x.v, Gates(lr=torch.ones_like(x.gates.lr)), state, s)
        steps[s] = torch.cat([(b - a).flatten(2) for a, b in zip(state.weights, after.weights)], -1)  # B H P
    norm = steps[free].norm(dim=-1, keepdim=True)
    assert 0.2 < (norm > 1.5).double().mean() < 1  # some exceed it, some do not
    assert_close(steps[spec], steps[free] * (1.5 / norm).clamp(max=1), 1e-12)


def test_a_bound_holds_for_every_traced_gradient_and_a_large_one_changes_nothing():
    mem, x = build("titans", max_grad_norm=0.2), some(2, T, DIM)
    *_, trace = mem(x, trace=True)
    assert trace.gradient_norm.max() <= 0.2 + 1e-12
    large, plain = (build("titans", max_grad_norm=bound) for bound in (1e6, None))
    assert torch.equal(large(x)[0], build("titans", max_grad_norm=1e7)(x)[0])
    assert_close_rms(large(x)[0], plain(x)[0], 1e-12)


@pytest.mark.parametrize("bound", [1e-18, 1e18, 10**18])
def test_the_ends_of_the_range_of_bounds_work(bound):
    mem = build("titans", max_grad_norm=bound, value_bound=bound)
    assert torch.isfinite(mem(some(2, T, DIM))[0]).all()


def test_the_gradient_of_a_bound_is_finite_for_a_token_without_error():
    spec = MemorySpec(key_dim=4, value_dim=4, structure="linear", max_grad_norm=1.0)
    q, k, v = torch.zeros(3, 1, 3, 1, 4, dtype=torch.float64).requires_grad_().unbind(0)
    state = spec.initial_state([torch.zeros(1, 4, 4, dtype=torch.float64)], batch=1)
    y, _ = scan(q, k, v, Gates(lr=torch.ones(1, 3, 1, dtype=torch.float64)), state, spec)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (k, v)))


def test_the_default_ceiling_of_the_learning_rate_counts_pairs():
    one, four = (NeuralMemoryConfig(dim=32, pairs_per_token=n).effective_max_lr for n in (1, 4))
    assert four == one / 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(max_grad_norm=0.0), r"^max_grad_norm=0.0 must be None or a number in 1e-18..1e\+18"),
        (dict(max_grad_norm=10**300), r"^max_grad_norm=1000\S* must be None or a number in 1e-18..1e\+18"),
        (dict(max_grad_norm=1e200), r"^max_grad_norm=1e\+200 must be None or a number in 1e-18..1e\+18"),
        (dict(max_grad_norm="1"), r"^max_grad_norm='1' must be None or a number in"),
        (dict(max_grad_norm=1.0, structure="linear", anchor="token"), r"^max_grad_norm goes with anchor='chunk'"),
        (dict(max_grad_norm=1.0, features="exp"), r"^max_grad_norm goes with .* any features but 'exp'"),
        (dict(pairs_per_token=0), r"^pairs_per_token=0 must be a whole number >= 1"),
        (dict(pairs_per_token=2, features="exp"), r"^features='exp' keep one pair per token and head: use more heads"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        MemorySpec(key_dim=4, value_dim=4, **options)


@pytest.mark.parametrize("case", [several_pairs()[0], bounded()[0]], ids=str)
def test_the_kernels_leave_both_to_torch_by_a_reason(case):
    k = inputs(case).k
    for operation in ("scan", "step"):
        with torch.no_grad():
            assert reasons(operation, k, case.spec)["cpu"] == "max_grad_norm and pairs_per_token > 1 have no kernel"
    config = NeuralMemoryConfig(dim=8, heads=2, pairs_per_token=2)
    mem = NeuralMemory(config)
    with torch.no_grad():
        found = reasons("decode", mem, torch.zeros(1, 1, 8), mem.initial_state(1))["cpu"]
    assert found == "max_grad_norm and pairs_per_token > 1 have no kernel"


def test_a_module_memory_begins_with_the_parameters_of_the_module_and_learns():
    torch.manual_seed(0)
    mem = NeuralMemory(DIM, heads=HEADS, structure="test_module", chunk_size=4, max_lr=0.05)
    start = dict(zip(mem.spec.network.sizes, mem.initial_state(1).weights))
    assert (start["norm.weight"] == 1).all() and (start["norm.bias"] == 0).all()
    heads = start["first.weight"][0, :, 0]
    assert not torch.equal(heads[0], heads[1])
    with torch.no_grad():
        *_, trace = mem(some(1, 1, DIM, dtype=torch.float32).expand(1, 200, DIM), trace=True)
    assert trace.surprise[0, -1].mean() < 0.5 * trace.surprise[0, 0].mean()


def test_a_spec_of_a_module_draws_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    MemorySpec(key_dim=4, value_dim=3, structure="test_module")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("build_module", "words"),
    [
        (lambda i, o: nn.Linear(i, o + 1), r"maps \(tokens, 4\) to \(tokens, 5\), but \(tokens, 4\) is expected"),
        (lambda i, o: nn.Identity(), "is a module without parameters"),
    ],
)
def test_a_module_that_cannot_be_a_memory_is_refused(build_module, words):
    register_module("test_wrong")(build_module)
    try:
        with pytest.raises(ValueError, match=words):
            NeuralMemory(8, heads=2, structure="test_wrong")(torch.randn(1, 3, 8))
    finally:
        del STRUCTURES["test_wrong"]
