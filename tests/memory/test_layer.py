"""`NeuralMemory`: one function however it is called, causal, and trainable in every part."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from layers import CASES, DIM, HEADS, T, build, some
from torch.utils.checkpoint import checkpoint

from helpers import assert_close_rms
from mnemos.memory import MemoryState
from mnemos.memory.layer import NeuralMemory

STRUCTURES = ["linear", "mlp", "gated_mlp"]
FEATURES = ["identity", "elementwise", "elementwise_concat", "monomials", "tensor"]
each_case = pytest.mark.parametrize("case", CASES)


def assert_states_close(a: MemoryState, b: MemoryState, tol: float = 1e-10) -> None:
    left, right = a.tensors(), b.tensors()
    assert left.keys() == right.keys()
    assert (a.spec, a.chunk_offset) == (b.spec, b.chunk_offset)
    for name in left:
        assert_close_rms(left[name], right[name], tol, name)


@each_case
def test_any_split_gives_the_same_outputs_and_state(case):
    mem, x = build(case), some(2, T, DIM)
    whole, end = mem(x)
    for lengths in ([1, 7, 13], [13, 7, 1]):
        state, parts = None, []
        for part in x.split(lengths, dim=1):
            y, state = mem(part, state)
            parts.append(y)
        assert_close_rms(torch.cat(parts, 1), whole, 1e-10)
        assert_states_close(state, end)


@each_case
def test_decoding_token_by_token_is_one_forward(case):
    mem, x = build(case), some(2, T, DIM)
    whole, end = mem(x)
    state, parts = None, []
    with torch.no_grad():
        for token in x.split(1, dim=1):
            y, state = mem(token, state)
            parts.append(y)
    assert_close_rms(torch.cat(parts, 1), whole, 1e-10)
    assert_states_close(state, end)


@each_case
def test_later_tokens_change_earlier_outputs_by_exactly_zero(case):
    mem, x = build(case), some(2, T, DIM)
    y, _ = mem(x)
    for t in (1, 5, 12, T - 1):
        other = x.clone()
        other[:, t:] = some(2, T - t, DIM, seed=t)
        assert torch.equal(mem(other)[0][:, :t], y[:, :t])


@each_case
def test_a_masked_token_is_as_if_it_were_not_there(case):
    mem, x = build(case), some(2, T, DIM)
    mask = torch.rand(2, T, generator=torch.Generator().manual_seed(1)) < 0.6
    _, before = mem(some(2, 3, DIM, seed=2))
    y, end = mem(x.masked_fill(~mask.unsqueeze(-1), float("nan")), before, mask)
    for row in range(2):
        alone, alone_end = mem(x[row : row + 1, mask[row]], before.select([row]))
        assert_close_rms(y[row : row + 1, mask[row]], alone, 1e-10)
        assert_states_close(end.select([row]), alone_end)
    assert (y[~mask] == 0).all()


@each_case
def test_packed_documents_are_the_documents_alone(case):
    mem, x, bounds = build(case), some(1, T, DIM), [0, 2, 9, 10, T]
    y, end = mem(x, cu_seqlens=torch.tensor(bounds))
    for n, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        alone, alone_end = mem(x[:, lo:hi])
        assert_close_rms(y[:, lo:hi], alone, 1e-10)
        assert_states_close(end.select([n]), alone_end)


@each_case
def test_writing_gives_the_state_of_forward(case):
    mem, x = build(case), some(2, T, DIM)
    state = mem.write(x[:, 6:], mem.write(x[:, :6]))
    assert_states_close(state, mem(x)[1])


@each_case
def test_reading_sees_what_was_written_and_changes_nothing(case):
    mem, x, query = build(case), some(2, T, DIM), some(2, 4, DIM, seed=1)
    _, state = mem(x)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    y = mem.read(query, state)
    assert all(torch.equal(before[name], tensor) for name, tensor in state.tensors().items())
    _, other = mem(some(2, T, DIM, seed=2))
    same_tails = dataclasses.replace(other, conv=state.conv)
    assert (y - mem.read(query, same_tails)).abs().max() > 1e-4
    if mem.config.read == "before" and case != "atlas":  # then the first token of a call reads what `read` does
        assert_close_rms(y[:, :1], mem(query, state)[0][:, :1], 1e-10)


@each_case
def test_every_parameter_has_a_gradient_at_the_first_step(case):
    torch.manual_seed(0)
    mem = NeuralMemory(DIM, heads=HEADS, chunk_size=4, **{k: v for k, v in CASES[case].items() if k != "chunk_size"})
    assert_all_learn(mem)


@pytest.mark.parametrize(
    ("structure", "rule", "gate", "features"),
    list(itertools.product(STRUCTURES, ["gd", "muon"], ["none", "token*decay*per-lag"], FEATURES)),
)
def test_every_parameter_has_a_gradient_over_the_grid(structure, rule, gate, features):
    torch.manual_seed(0)
    window = 1 if gate == "none" else 3
    mem = NeuralMemory(
        DIM, heads=HEADS, chunk_size=4, structure=structure, rule=rule, gate=gate, features=features, window=window
    )
    assert_all_learn(mem)


def assert_all_learn(mem: NeuralMemory) -> None:
    y, _ = mem(some(2, T, DIM, dtype=torch.float32))
    (y * some(2, T, DIM, seed=9, dtype=torch.float32)).sum().backward()
    for name, parameter in mem.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), f"{name} has a gradient that is not finite"
        assert parameter.grad.abs().amax() > 0, f"{name} has gradient 0"
        if parameter.shape[0] == HEADS:
            assert (
                (parameter.grad.flatten(1).abs().amax(1) > 0).all()
                if parameter.dim() > 1
                else (parameter.grad != 0).all()
            )


@each_case
def test_a_state_dict_holds_the_whole_layer(case):
    mem, x = build(case), some(2, T, DIM)
    torch.manual_seed(1)
    other = NeuralMemory(mem.config).double()
    other.load_state_dict(mem.state_dict())
    assert torch.equal(mem(x)[0], other(x)[0])


def test_saved_and_loaded_the_memory_goes_on_identically(tmp_path):
    mem, x = build("omega"), some(2, T, DIM)
    _, state = mem(x[:, :12])
    state.save(tmp_path / "state.safetensors")
    loaded = MemoryState.load(tmp_path / "state.safetensors", mem.spec)
    expected, end = mem(x[:, 12:], state)
    y, loaded_end = mem(x[:, 12:], loaded)
    assert torch.equal(y, expected)
    assert_states_close(loaded_end, end, 0.0)


def test_states_fork_select_and_stack():
    mem, x = build("omega"), some(3, T, DIM)
    _, state = mem(x[:, :8])
    fork = state.clone()
    mem(some(3, 5, DIM, seed=1), state)
    expected, _ = mem(x[:, 8:], state)
    assert torch.equal(mem(x[:, 8:], fork)[0], expected)
    assert_close_rms(mem(x[[2, 0], 8:], state.select([2, 0]))[0], expected[[2, 0]], 1e-12)

    _, later = mem(x[:1, :11])  # a row at another place of the chunk grid
    mixed = MemoryState.stack([later, state.select([1, 2])])
    y, end = mem(x[:, 11:], mixed)
    assert_close_rms(y[:1], mem(x[:1])[0][:, 11:], 1e-10)
    assert_close_rms(y[1:], mem(x[1:, 11:], state.select([1, 2]))[0], 1e-10)
    assert end.position.tolist() == [T, T - 3, T - 3]


@each_case
@pytest.mark.parametrize("masked", [False, True])
def test_tracing_changes_nothing(case, masked):
    mem, x = build(case), some(2, T, DIM)
    mask = (torch.rand(2, T, generator=torch.Generator().manual_seed(1)) < 0.7) if masked else None
    _, before = mem(some(2, 3, DIM, seed=2))
    expected, end = mem(x, before, mask)
    y, state, trace = mem(x, before, mask, trace=True)
    assert_close_rms(y, expected, 1e-10)
    assert_states_close(state, end)
    for gate in (trace.surprise, trace.lr, trace.momentum, trace.retain, trace.gate):
        assert gate.shape == (2, T, HEADS)
        assert not gate.requires_grad
    assert trace.weight_norms.shape == (2, len(trace.ends), HEADS, len(mem.spec.shapes))
    assert trace.ends[-1] == T
    assert_close_rms(trace.weight_norms[:, -1, :, 0], end.weights[0].flatten(2).norm(dim=-1), 1e-10)


@pytest.mark.parametrize("anchor", ["chunk", "token"])
def test_the_traced_surprise_is_the_inner_loss_at_the_anchor(anchor):
    mem, x = build("titans", structure="linear", anchor=anchor), some(2, T, DIM)
    *_, trace = mem(x, trace=True)
    _, k, v, _ = mem.project(x, mem.initial_state(2), None, None)
    for t in range(T):
        start = t if anchor == "token" else t // 5 * 5
        W = mem(x[:, :start])[1].weights[0] if start else mem.initial_state(2).weights[0]
        error = torch.einsum("bhk,bhkv->bhv", k[:, t], W) - v[:, t]
        assert_close_rms(trace.surprise[:, t], 0.5 * error.square().sum(-1), 1e-10)
    assert trace.ends == [5, 10, 15, 20, 21]


def test_surprise_falls_when_the_same_thing_comes_again():
    torch.manual_seed(0)
    mem = NeuralMemory(64, heads=1, chunk_size=8)
    x = some(1, 8, 64, dtype=torch.float32).repeat(1, 16, 1)
    with torch.no_grad():
        *_, trace = mem(x, trace=True)
    assert trace.surprise[:, -16:].mean() < 0.5 * trace.surprise[:, :16].mean()


@pytest.mark.parametrize("case", ["titans", "omega", "atlas"])
def test_bfloat16_autocast_is_near_float32(case):
    mem, x = build(case).float(), some(2, T, DIM, dtype=torch.float32)
    expected, _ = mem(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mem(x)
        y.float().square().mean().backward()
        more, _ = mem(x[:, :1], state)
    assert more.isfinite().all()
    assert_close_rms(y, expected, 0.05)
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in state.tensors().values())
    assert all(parameter.grad.isfinite().all() for parameter in mem.parameters())
    gates = mem.gating(x.bfloat16())
    assert gates.lr.dtype == gates.retain.dtype == torch.float32


def test_a_bfloat16_layer_keeps_a_float32_state():
    mem = build().bfloat16()
    y, state = mem(some(2, T, DIM, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in state.tensors().values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("case", ["titans", "omega", "atlas"])
def test_checkpointing_gives_the_same_gradients(case):
    mem, x = build(case), some(2, T, DIM).requires_grad_()

    def gradients(run):
        mem.zero_grad()
        return torch.autograd.grad(run(x).square().sum(), [x, *mem.parameters()])

    plain = gradients(lambda x: mem(x)[0])
    recomputed = gradients(lambda x: checkpoint(lambda x: mem(x)[0], x, use_reentrant=False))
    for a, b in zip(recomputed, plain):
        assert_close_rms(a, b, 1e-12)


def test_gradients_flow_through_the_state_of_earlier_calls():
    mem, x = build(), some(2, T, DIM).requires_grad_()
    _, state = mem(x[:, :9])
    y, _ = mem(x[:, 9:], state)
    (split,) = torch.autograd.grad(y.sum(), x)
    (whole,) = torch.autograd.grad(mem(x)[0][:, 9:].sum(), x)
    assert_close_rms(split, whole, 1e-10)


def test_training_and_evaluation_are_the_same():
    mem, x = build("omega"), some(2, T, DIM)
    assert torch.equal(mem.train()(x)[0], mem.eval()(x)[0])


def test_rows_of_a_batch_are_independent():
    mem, x = build("omega"), some(3, T, DIM)
    y, _ = mem(x)
    assert_close_rms(mem(x[1:2])[0], y[1:2], 1e-12)


def test_the_state_has_the_same_size_at_every_length():
    mem = build("omega")
    assert len({mem.write(some(1, length, DIM)).nbytes for length in (1, 4, 5, 40)}) == 1
    assert mem.initial_state(1).nbytes == mem.write(some(1, 7, DIM)).nbytes
