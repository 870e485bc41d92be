"""`NeuralMemory`: one function however it is called, causal, trainable in every part, and clear about what it refuses."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers import assert_close_rms, randomise
from mnemos.memory import MemoryState, read
from mnemos.memory.config import NeuralMemoryConfig
from mnemos.memory.layer import NeuralMemory
from mnemos.memory.norm import RMSNorm, l2_normalize, rms_norm

f64 = torch.float64
DIM, HEADS, T = 12, 3, 21

CASES = {
    "titans": {},
    "residual": dict(skip=True),
    "no gates": dict(momentum=False, retain=False, depth=3, skip=True),
    "fixed retention": dict(momentum=False, retain="fixed", structure="linear"),
    "omega": dict(structure="gated_mlp", window=3, gate="token*decay*per-lag"),
    "token anchor": dict(structure="linear", anchor="token", decay_first=True, learned_start=False, momentum=False),
    "token anchor window": dict(structure="linear", anchor="token", window=2, gate="per-lag", read="before"),
    "dot": dict(structure="linear", objective="dot", qk_norm="rms", gate="token"),
    "plain": dict(structure="linear", conv_width=None, qk_norm="none", output_gate=False, value_bound=None),
    "monomials": dict(structure="linear", features="monomials", degree=3, key_dim=3, value_dim=5, conv_width=2),
    "elementwise": dict(skip=True, features="elementwise", degree=3, window=2, gate="decay"),
    "sketch": dict(structure="mlp", features="sketch", degree=2, feature_dim=9),
    "atlas": dict(rule="muon", commit_every=2, window=3, gate="token*decay", chunk_size=4),
    "muon without momentum": dict(rule="muon", momentum=False, structure="linear", window=2, gate="per-lag"),
}
STRUCTURES = ["linear", "mlp", "gated_mlp"]
FEATURES = ["identity", "elementwise", "monomials", "tensor"]
each_case = pytest.mark.parametrize("case", CASES)


def build(case: str = "titans", **more) -> NeuralMemory:
    torch.manual_seed(0)
    return randomise(
        NeuralMemory(DIM, **(dict(heads=HEADS, chunk_size=5, gate_hidden=6, max_lr=0.2) | CASES[case] | more)).double()
    )


def some(*shape: int, seed: int = 0, dtype=f64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_states_close(a: MemoryState, b: MemoryState, tol: float = 1e-10) -> None:
    left, right = a._tensors(), b._tensors()
    assert left.keys() == right.keys()
    assert (a.spec, a.phase) == (b.spec, b.phase)
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
    before = {name: tensor.clone() for name, tensor in state._tensors().items()}
    y = mem.read(query, state)
    assert all(torch.equal(before[name], tensor) for name, tensor in state._tensors().items())
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
    _, k, v, _ = mem._project(x, mem.initial_state(2), None, None)
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
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in state._tensors().values())
    assert all(parameter.grad.isfinite().all() for parameter in mem.parameters())
    gates = mem.gating(x.bfloat16())
    assert gates.lr.dtype == gates.retain.dtype == torch.float32


def test_a_bfloat16_layer_keeps_a_float32_state():
    mem = build().bfloat16()
    y, state = mem(some(2, T, DIM, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in state._tensors().values()} == {torch.float32, torch.int64}


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


def test_muon_without_momentum_sums_since_the_last_commit():
    mem = build("muon without momentum", commit_every=5)
    *_, trace = mem(some(1, T, DIM), mem.write(some(1, 3, DIM)), trace=True)
    expected = [float((3 + t) % 5 != 0) for t in range(T)]
    assert trace.momentum[0, :, 0].tolist() == expected


@pytest.mark.parametrize("momentum", [0.1, 0.5, 0.9, 0.99])
def test_the_default_ceiling_is_stable_for_identical_keys_whatever_the_momentum(momentum):
    torch.manual_seed(0)
    mem = NeuralMemory(32, heads=1, structure="linear", chunk_size=16, momentum_init=momentum, retain=False)
    with torch.no_grad():
        mem.gating.linear.bias[0] += 20  # lr at its ceiling
        *_, trace = mem(torch.randn(1, 1, 32).expand(1, 1600, 32), trace=True)
    assert trace.surprise[0, -1, 0] < 0.05 * trace.surprise[0, 0, 0]


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("shape", [dict(depth=2), dict(depth=3), dict(depth=4), dict(structure="gated_mlp")], ids=str)
def test_the_default_ceiling_is_stable_for_identical_keys_in_deep_memories(shape, momentum):
    torch.manual_seed(0)
    mem = NeuralMemory(32, heads=1, chunk_size=16, momentum=momentum, **shape)
    with torch.no_grad():
        mem.gating.linear.bias[0] += 20  # lr at its ceiling
        mem.qkv.weight[-32:] *= 8  # values at their bound
        *_, trace = mem(torch.randn(1, 1, 32).expand(1, 1600, 32), trace=True)
    assert trace.surprise[0, -1, 0] < 0.1 * trace.surprise[0, 0, 0]


@pytest.mark.parametrize(
    ("dim", "heads", "head_dim"),
    [(384, 6, 64), (64, 1, 64), (96, 2, 48), (1000, 20, 50), (97, 1, 97), (12, 1, 12), (768, 12, 64)],
)
def test_the_default_heads_divide_the_width(dim, heads, head_dim):
    config = NeuralMemoryConfig(dim)
    assert (config.head_count, config.spec.value_dim) == (heads, head_dim)


def test_a_config_and_keywords_build_the_same_layer():
    config = NeuralMemoryConfig(dim=DIM, heads=2, window=3, gate="token")
    assert NeuralMemory(dim=DIM, heads=2, window=3, gate="token").config == config
    assert NeuralMemory(config, window=2).config == dataclasses.replace(config, window=2)
    assert NeuralMemoryConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(heads=5), r"heads=5 must divide dim=12"),
        (dict(dim=0), r"dim=0 must be a whole number >= 1"),
        (dict(gate="tokens"), r"gate='tokens' is unknown; it is 'none' or a product of token, decay, per-lag"),
        (dict(gate="token*token"), r"gate='token\*token' is unknown"),
        (dict(gate="decay"), r"gate='decay' needs window > 1"),
        (dict(qk_norm="layer"), r"qk_norm='layer' is unknown; choose one of 'l2', 'rms', 'none'"),
        (dict(max_lr=0.0), r"max_lr=0.0 must be None or > 0"),
        (dict(max_lr=0.1, lr_init=0.2), r"lr_init=0.2 must lie between 0 and max_lr=0.1"),
        (dict(retain="slow"), r"retain='slow' is unknown; choose one of True, False, 'fixed'"),
        (dict(retain_init=1.0), r"retain_init=1.0 must lie between 0 and 1"),
        (dict(value_bound=0.0), r"value_bound=0.0 must be None or > 0"),
        (dict(conv_width=-1), r"conv_width=-1 must be None or a whole number >= 0"),
        (dict(learned_start=False), r"learned_start=False starts all weights at 0"),
        (dict(structure="tree"), r"structure='tree' is unknown"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(fields, message):
    with pytest.raises(ValueError, match=message):
        NeuralMemory(**{"dim": DIM, **fields})


def test_bad_inputs_are_refused_in_one_sentence():
    mem, x = build(), some(2, T, DIM)
    _, state = mem(x)
    for arguments, message in [
        ((x[0],), r"x has shape \(21, 12\), but \(batch, time, dim=12\)"),
        ((x[:, :0],), r"at least one token"),
        ((x[..., :5],), r"x has shape \(2, 21, 5\)"),
        ((x.float(),), r"x has type torch.float32, but the layer's parameters are torch.float64"),
        ((x.long(),), r"x has type torch.int64"),
        ((x, build("omega")(x)[1]), r"another spec"),
        ((x[:1], state), r"state has 2 rows, but 1 are expected"),
        ((x, "state"), r"state is a str"),
        ((x, state.to("meta")), r"state is on meta, but x is on cpu"),
        ((x, dataclasses.replace(state, conv=None)), r"convolution tails"),
        ((x, None, torch.ones(2, T)), r"mask has shape \(2, 21\) and type torch.float32, but bool"),
        ((x, None, None, torch.tensor([0, T])), r"cu_seqlens must be a vector"),
        ((x[:1], None, None, torch.tensor([0, T]), True), r"trace=True does not go with cu_seqlens"),
    ]:
        with pytest.raises(ValueError, match=message):
            mem(*arguments)
    with pytest.raises(ValueError, match="read needs a state"):
        mem.read(x, None)


def test_norms_are_finite_at_zero_and_never_narrower_than_float32():
    for norm in (rms_norm, l2_normalize, RMSNorm(4)):
        x = torch.zeros(2, 4, requires_grad=True)
        norm(x).sum().backward()
        assert x.grad.isfinite().all()
    assert rms_norm(some(3, 4)).dtype == l2_normalize(some(3, 4)).dtype == f64
    assert_close_rms(l2_normalize(some(3, 4), eps=0.0).norm(dim=-1), torch.ones(3), 1e-14)
    large = torch.full((4,), 300.0, dtype=torch.float16)  # its square overflows float16
    assert rms_norm(large).dtype == torch.float16
    assert_close_rms(rms_norm(large), torch.ones(4), 1e-3)
    assert_close_rms(rms_norm(some(3, 4), torch.full((4,), 2.0, dtype=f64)), 2 * rms_norm(some(3, 4)), 1e-14)


@pytest.mark.parametrize("module", ["conv", "norm", "config", "gating", "trace", "layer"])
def test_examples_in_docstrings_run(module):
    found = doctest.testmod(importlib.import_module(f"mnemos.memory.{module}"))
    assert found.failed == 0


@pytest.mark.parametrize("chunk_size", [8, 64])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_step_of_the_outer_optimiser_moves_the_start_less_than_a_token_writes(structure, chunk_size):
    """Otherwise what a memory starts from soon hides all that it is told, and training never finds out what it is for."""
    torch.manual_seed(0)
    mem = NeuralMemory(64, heads=1, structure=structure, chunk_size=chunk_size, momentum=False)
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
