"""Features "exp": memories whose first fast map is a list of pairs. DeepTransformer, SWDT, Dot, and softmax attention."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from cases import Case, Inputs, inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import assert_close, randomise
from mnemos.memory import (
    FeatureMap,
    Gates,
    MemorySpec,
    MemoryState,
    NeuralMemory,
    make_features,
    read,
    reference_scan,
    register_features,
    scan,
    step,
)
from mnemos.memory.features import Exp, Monomials

EXACT = 1e-10
HEADS = 3
ALL_GATES = ("momentum", "retain", "gate", "decay", "lag")


def exp_spec(**fields) -> MemorySpec:
    return MemorySpec(**({"key_dim": 4, "value_dim": 4, "expansion": 2, "features": "exp"} | fields))


SOFTMAX = {"structure": "linear", "objective": "dot", "normalize": True}
STRUCTURES = [{"structure": "linear"}, {"depth": 2}, {"depth": 3, "expansion": 1.5}]
KINDS = [
    Case(exp_spec(structure="linear", chunk_size=4, value_dim=3)),
    Case(exp_spec(structure="linear", objective="dot", window=3, chunk_size=4, value_dim=3)),
    Case(exp_spec(**SOFTMAX, window=3, chunk_size=8, value_dim=5)),
    Case(exp_spec(**SOFTMAX, momentum=False, read="before"), ("retain", "gate")),
    Case(exp_spec(window=3, chunk_size=8)),
    Case(exp_spec(objective="dot", window=11, chunk_size=4, read="before")),
    Case(exp_spec(depth=3, expansion=1, chunk_size=5, key_dim=3, momentum=False), ("retain", "lag")),
]
every_kind = pytest.mark.parametrize("case", KINDS, ids=str)


def grid() -> list[Case]:
    cases = []
    for shape, objective, (window, chunk), kind in itertools.product(
        STRUCTURES, ("l2", "dot"), [(1, 1), (1, 8), (5, 8), (11, 4), (5, 64)], ("after", "before")
    ):
        cases.append(Case(exp_spec(objective=objective, window=window, chunk_size=chunk, read=kind, **shape)))
    for shape, gates in itertools.product(STRUCTURES, [(), ("momentum",), ("retain",), ("gate", "lag")]):
        cases.append(Case(exp_spec(window=3, chunk_size=8, **shape), gates))
    for shape in STRUCTURES:
        cases.append(Case(exp_spec(chunk_size=8, momentum=False, key_dim=3, **shape), ("retain", "gate")))
    for window, kind in itertools.product((1, 5, 40), ("after", "before")):
        cases.append(Case(exp_spec(**SOFTMAX, window=window, read=kind, chunk_size=8)))
    return [*cases, *KINDS, Case(exp_spec(depth=1, chunk_size=8)), Case(exp_spec(depth=1, objective="dot", window=3))]


GRID = grid()
every_case = pytest.mark.parametrize("case", GRID, ids=str)


def start(x: Inputs, spec: MemorySpec, batch: int | None = None) -> MemoryState:
    batch = x.k.shape[0] if batch is None else batch
    return spec.initial_state(x.W0, batch) if x.W0 else spec.initial_state([], batch, x.k.shape[2], x.k.dtype)


def call(function, x: Inputs, case: Case, state=None, lo: int = 0, hi: int | None = None, **options):
    state = start(x, case.spec) if state is None else state
    tokens = (t[:, lo:hi] for t in (x.q, x.k, x.v))
    return function(*tokens, x.gates.map(lambda g: g[:, lo:hi]), state, case.spec, x.features, **options)


def assert_same_state(a: MemoryState, b: MemoryState, tolerance: float = EXACT) -> None:
    assert a.position.tolist() == b.position.tolist()
    assert a._tensors().keys() == b._tensors().keys()
    for (name, x), y in zip(a._tensors().items(), b._tensors().values()):
        if x.is_floating_point():
            assert_close(x, y, tolerance, f"state.{name}")


def gradients(y, state: MemoryState, leaves: dict) -> list:
    g = torch.Generator().manual_seed(7)
    parts = [y, *(x for x in state._tensors().values() if x.is_floating_point())]
    total = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum() for x in parts)
    return list(
        torch.autograd.grad(total, list(leaves.values()), materialize_grads=True, allow_unused=True, retain_graph=True)
    )


def assert_same(x: Inputs, first, second, tolerance: float = EXACT) -> None:
    """Outputs, states and every gradient of two runs."""
    assert_close(first[0], second[0], tolerance, "y")
    assert_same_state(first[1], second[1], tolerance)
    found, wanted = (gradients(*run, x.leaves()) for run in (first, second))
    for name, a, b in zip(x.leaves(), found, wanted):
        assert_close(a, b, tolerance, f"gradient of {name}")


# One function -------------------------------------------------------------------------------------------------------


@every_case
def test_scan_is_the_reference_in_outputs_state_and_every_gradient(case):
    x = inputs(case, grad=True)
    assert_same(x, call(scan, x, case), call(reference_scan, x, case))


@every_kind
def test_without_a_module_the_kernel_is_exp_of_the_inner_product(case):
    x = inputs(case, grad=True)
    x.features = None
    assert_same(x, call(scan, x, case), call(reference_scan, x, case))


@pytest.mark.parametrize("chunk", [16, 134, 128])
@pytest.mark.parametrize("fields", [{"structure": "linear"}, {"window": 3}, SOFTMAX], ids=str)
def test_scan_is_the_reference_over_several_tiles(fields, chunk):
    case = Case(exp_spec(**({"key_dim": 3, "value_dim": 3, "chunk_size": chunk} | fields)))
    x = inputs(case, length=201, batch=1, heads=2, grad=True)
    assert_same(x, call(scan, x, case), call(reference_scan, x, case))


@register_features
class Taylor(Monomials):
    """exp(q·k) of 2 dims, to rounding: its first 18 terms as features."""

    name = "test_taylor"

    def forward(self, x):
        powers = [x.new_ones(*x.shape[:-1], 1)]
        for i in range(1, self.degree + 1):
            scales = [math.comb(i, j) ** 0.5 / math.factorial(i) ** 0.5 for j in range(i + 1)]
            powers.append(torch.stack([s * x[..., 0] ** j * x[..., 1] ** (i - j) for j, s in enumerate(scales)], -1))
        return torch.cat(powers, -1)


@pytest.mark.parametrize("fields", [*STRUCTURES, {"structure": "linear", "objective": "dot"}], ids=str)
@pytest.mark.parametrize("window", [1, 5])
def test_the_list_is_the_memory_with_the_features_written_out(fields, window):
    """Against the ordinary engine, with 171 features and a first map that starts at 0."""
    shared = {"key_dim": 2, "value_dim": 2, "window": window, "chunk_size": 8} | fields
    listed, wide = Case(exp_spec(**shared)), Case(exp_spec(**(shared | {"features": "test_taylor", "degree": 17})))
    x = inputs(listed, grad=True)
    x.features = None
    y, state = call(scan, x, listed)
    first = torch.zeros(HEADS, *wide.spec.shapes[0], dtype=torch.float64)
    phi = make_features(wide.spec, HEADS)
    z, other = scan(x.q, x.k, x.v, x.gates, wide.spec.initial_state([first, *x.W0], batch=2), wide.spec, phi)
    assert_close(y, z, EXACT, "y")
    pairs = [state.pairs.weight, state.pairs.momentum]
    for share, matrix in zip(pairs, (other.weights[0], other.momentum[0])):
        built = phi(state.pairs.key).permute(0, 2, 3, 1) @ share.transpose(1, 2)
        assert_close(built, matrix, EXACT, "the map built from its pairs")
    for a, b in zip(state.weights, other.weights[1:]):
        assert_close(a, b, EXACT, "deeper maps")
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = {name: leaf for name, leaf in x.leaves().items() if window > 1 or name != "gates.decay"}
    found, wanted = (torch.autograd.grad((o * direction).sum(), list(leaves.values())) for o in (y, z))
    for name, a, b in zip(leaves, found, wanted):
        assert_close(a, b, EXACT, f"gradient of {name}")


@every_case
def test_float32_agrees_with_the_float64_reference_to_rounding(case):
    single = Case(case.spec, case.gates, torch.float32)
    x = inputs(single)
    double = x.double()
    y, state = call(scan, x, single)
    assert y.dtype == torch.float32 and state.dtype == torch.float32
    ry, rstate = call(reference_scan, double, case)
    assert_close(y, ry, 2e-5, "y")
    assert_same_state(state, rstate, 2e-5)


@every_case
def test_token_by_token_is_one_scan(case):
    x = inputs(case)
    y, final = call(scan, x, case)
    state, outputs = start(x, case.spec), []
    for t in range(x.k.shape[1]):
        out, state = call(step, x, case, state, t, t + 1)
        outputs.append(out)
    assert_close(torch.cat(outputs, 1), y, EXACT, "y")
    assert_same_state(state, final)
    assert state.phase == final.phase


@every_kind
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(cuts=st.sets(st.integers(1, 40), max_size=5))
def test_any_split_into_calls_gives_the_same_outputs_state_and_gradients(case, cuts):
    x = inputs(case, length=41, grad=True)
    state, outputs = start(x, case.spec), []
    for lo, hi in zip([0, *sorted(cuts)], [*sorted(cuts), 41]):
        out, state = call(scan, x, case, state, lo, hi)
        outputs.append(out)
    assert_same(x, (torch.cat(outputs, 1), state), call(scan, x, case))


@every_case
def test_a_later_token_changes_nothing_before_it_at_all(case):
    x, z = inputs(case, length=30), inputs(case, length=30, seed=1)
    y, _ = call(scan, x, case)
    for t in (1, 8, 16, 29):
        mixed = Inputs(
            *(torch.cat([a[:, :t], b[:, t:]], 1) for a, b in zip((x.q, x.k, x.v), (z.q, z.k, z.v))), *x_rest(x)
        )
        names = ("lr", "momentum", "retain", "gate", "lag")
        timed = {n: (getattr(x.gates, n), getattr(z.gates, n)) for n in names}
        joined = {n: None if a is None else torch.cat([a[:, :t], b[:, t:]], 1) for n, (a, b) in timed.items()}
        mixed.gates = Gates(**joined, decay=x.gates.decay)
        changed, _ = call(scan, mixed, case)
        assert (changed[:, :t] - y[:, :t]).abs().max() == 0.0
        assert (changed[:, t:] - y[:, t:]).abs().max() > 0


def x_rest(x: Inputs) -> tuple:
    return x.gates, x.W0, x.features


@pytest.mark.parametrize("case", KINDS[1:4], ids=str)
def test_a_later_key_of_any_size_changes_nothing_before_it(case):
    x = inputs(case, length=12)
    y, _ = call(scan, x, case)
    x.k[:, 7:] *= 1e6
    x.q[:, 7:] *= 1e6
    changed, _ = call(scan, x, case)
    assert torch.equal(changed[:, :7], y[:, :7])


@every_kind
def test_masked_tokens_are_skipped_and_rows_go_on_from_different_positions(case):
    x = inputs(case, batch=3, length=29, grad=True)
    _, before = call(scan, x, case, hi=6)
    mask = torch.rand(3, 23, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0] = False
    mask[0, :5] = True
    first = call(scan, x, case, before, 6, mask=mask)
    assert first[0][~mask].abs().max() == 0.0
    assert first[1].pairs.length == int(first[1].position.max())
    assert_same(x, first, call(reference_scan, x, case, before, 6, mask=mask))
    more = inputs(case, batch=3, length=9, seed=5)
    more.features = x.features
    y, final = call(scan, more, case, first[1])
    ry, rfinal = call(reference_scan, more, case, first[1])
    assert_close(y, ry, EXACT, "y after")
    assert_same_state(final, rfinal)
    state, outputs = first[1], []
    for t in range(9):
        out, state = call(step, more, case, state, t, t + 1)
        outputs.append(out)
    assert_close(torch.cat(outputs, 1), y, EXACT, "y by steps")
    assert_same_state(state, final)


@every_kind
def test_a_step_skips_the_rows_that_are_masked(case):
    x = inputs(case, batch=3, length=9)
    _, state = call(scan, x, case, hi=8)
    mask = torch.tensor([[True], [False], [True]])
    y, after = call(step, x, case, state, 8, mask=mask)
    assert after.position.tolist() == [9, 8, 9] and y[1].abs().max() == 0.0
    assert_same_state(after.select([1]), state.select([1]), 0.0)


@every_kind
def test_packed_documents_are_the_documents_alone(case):
    bounds = [0, 9, 10, 24, 24, 29]
    x = inputs(case, batch=1, length=29, grad=True)
    packed = call(scan, x, case, start(x, case.spec, batch=5), cu_seqlens=torch.tensor(bounds))
    outputs, states = [], []
    for lo, hi in zip(bounds, bounds[1:]):
        one = start(x, case.spec, batch=1)
        if hi > lo:
            out, one = call(scan, x, case, one, lo, hi)
            outputs.append(out)
        states.append(one)
    assert_same(x, packed, (torch.cat(outputs, 1), MemoryState.stack(states)))


@every_kind
def test_writing_alone_and_reading_alone_are_the_halves_of_a_scan(case):
    x = inputs(case, length=21, grad=True)
    y, expected = call(scan, x, case)
    nothing, state = scan(None, x.k, x.v, x.gates, start(x, case.spec), case.spec, x.features)
    assert nothing is None
    assert_same_state(state, expected)
    if case.spec.read == "after":
        assert_close(read(x.q[:, -1:], state, case.spec, x.features), y[:, -1:], EXACT, "read")
    else:
        _, before = call(scan, x, case, hi=20)
        assert_close(read(x.q[:, -1:], before, case.spec, x.features), y[:, -1:], EXACT, "read")


@every_kind
def test_without_gradients_and_in_inference_mode_the_result_is_the_same(case):
    x = inputs(case, grad=True)
    y, state = call(scan, x, case)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            z, other = call(scan, x, case)
            assert not z.requires_grad
        assert_close(z, y, 1e-14, "y")
        assert_same_state(other, state, 1e-14)


def test_reading_an_empty_memory_gives_its_residual():
    for fields in ({}, {"structure": "linear"}, SOFTMAX):
        case = Case(exp_spec(**fields))
        x = inputs(case)
        y = read(x.q, start(x, case.spec), case.spec, x.features)
        assert torch.equal(y, x.q if case.spec.residual else torch.zeros_like(x.v))


# Softmax attention --------------------------------------------------------------------------------------------------


def attention_inputs(length: int, dtype=torch.float64, size: float = 1.0, dim: int = 8):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, HEADS, dim, generator=g, dtype=torch.float64).to(dtype) for _ in range(3))
    return [x.requires_grad_() for x in (size * q, size * k, v)]


@pytest.mark.parametrize("length", [1, 7, 64, 65, 200])
@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_a_normalised_linear_memory_under_dot_is_softmax_attention(length, strength):
    q, k, v = attention_inputs(length)
    spec = exp_spec(**SOFTMAX, key_dim=8, value_dim=8, momentum=False)
    lr = torch.full(q.shape[:3], strength, dtype=torch.float64)
    y, _ = scan(q * 8**-0.5, k, v, Gates(lr=lr), spec.initial_state([], 2, heads=HEADS), spec)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    assert_close(y, expected, 1e-12, "y")
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((o * direction).sum(), (q, k, v)) for o in (y, expected))):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_without_the_division_it_is_the_numerator_of_attention():
    q, k, v = attention_inputs(50, size=0.5)
    spec = exp_spec(structure="linear", objective="dot", key_dim=8, value_dim=8, momentum=False)
    lr = torch.ones(q.shape[:3], dtype=torch.float64)
    y, _ = scan(q, k, v, Gates(lr=lr), spec.initial_state([], 2, heads=HEADS), spec)
    scores = torch.einsum("bthd,bshd->bhts", q, k).exp().tril()
    assert_close(y, torch.einsum("bhts,bshe->bthe", scores, v), 1e-12, "y")


def test_retention_is_a_bias_on_the_logits():
    q, k, v = attention_inputs(60)
    spec = exp_spec(**SOFTMAX, key_dim=8, value_dim=8, momentum=False)
    g = torch.Generator().manual_seed(2)
    retain = torch.rand(q.shape[:3], generator=g, dtype=torch.float64) * 0.3 + 0.7
    lr = torch.rand(q.shape[:3], generator=g, dtype=torch.float64) + 0.1
    y, _ = scan(q, k, v, Gates(lr=lr, retain=retain), spec.initial_state([], 2, heads=HEADS), spec)
    logs = retain.log().cumsum(1).transpose(1, 2)  # B H T
    bias = logs.unsqueeze(-1) - logs.unsqueeze(-2) + lr.log().transpose(1, 2).unsqueeze(-2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) + bias
    weights = scores.masked_fill(torch.ones(60, 60).triu(1).bool(), -torch.inf).softmax(-1)
    assert_close(y, torch.einsum("bhts,bshe->bthe", weights, v), 1e-11, "y")


@pytest.mark.parametrize("split", [None, 40])
def test_large_logits_stay_finite_and_right_in_float32(split):
    q, k, v = attention_inputs(100, torch.float32, size=8.5)
    scores = torch.einsum("bthd,bshd->bhts", q, k)
    assert scores.max() > 400
    spec = exp_spec(**SOFTMAX, key_dim=8, value_dim=8, momentum=False)
    state, outputs = spec.initial_state([], 2, heads=HEADS), []
    for part in (slice(None),) if split is None else (slice(split), slice(split, None)):
        y, state = scan(q[:, part], k[:, part], v[:, part], Gates(lr=torch.ones(q[:, part].shape[:3])), state, spec)
        outputs.append(y)
    y = torch.cat(outputs, 1)
    expected = F.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=1.0
    ).transpose(1, 2)
    assert_close(y, expected, 2e-5, "y")
    grads = torch.autograd.grad(y.square().sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for a, b in zip(grads, wanted):
        assert a.isfinite().all()
        assert_close(a, b, 1e-4, "gradient")
    assert read(q, state, spec).isfinite().all()


def test_what_was_forgotten_does_not_drown_what_is_left():
    """A maximum over pairs without weight would underflow the rest."""
    spec = exp_spec(**SOFTMAX, key_dim=1, value_dim=1, momentum=False)
    q = torch.full((1, 3, 1, 1), 14.0)
    k, v = torch.tensor([14.0, 14.0, -14.0]).reshape(1, 3, 1, 1), torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
    retain = torch.tensor([1.0, 1.0, 0.0]).reshape(1, 3, 1)
    for cuts in ([0, 3], [0, 2, 3], [0, 1, 2, 3]):
        state, outputs = spec.initial_state([], 1, heads=1), []
        for lo, hi in zip(cuts, cuts[1:]):
            gates = Gates(lr=torch.ones(1, hi - lo, 1), retain=retain[:, lo:hi])
            y, state = scan(q[:, lo:hi], k[:, lo:hi], v[:, lo:hi], gates, state, spec)
            outputs.append(y)
        assert torch.cat(outputs, 1).flatten().tolist() == [1.0, 1.5, 3.0]


def test_a_memory_that_nothing_was_written_to_reads_zero():
    spec = exp_spec(**SOFTMAX, read="before")
    x = inputs(Case(spec, ()), grad=True)
    y, _ = scan(x.q, x.k, x.v, Gates(lr=torch.zeros_like(x.gates.lr)), start(x, spec), spec, x.features)
    assert y.abs().max() == 0.0
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [x.q, x.k, x.v]))
    y, _ = call(scan, x, Case(spec, ()))
    assert y[:, 0].abs().max() == 0.0 and y[:, 1].abs().min() > 0


# Learning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"structure": "linear"}, {"depth": 2}, {"depth": 3}], ids=str)
@pytest.mark.parametrize("window", [1, 4])
def test_the_inner_loss_falls_under_l2(fields, window):
    """The Dot model: what is written is read back, better with each pass over it."""
    spec = exp_spec(**fields, key_dim=8, value_dim=8, expansion=4, window=window, chunk_size=4, momentum=False)
    g = torch.Generator().manual_seed(0)
    k = F.normalize(torch.randn(1, 12, 1, 8, generator=g), dim=-1)
    v = F.normalize(torch.randn(1, 12, 1, 8, generator=g), dim=-1)
    phi = Exp(8, heads=1)
    W0 = [(4 / shape[0]) ** 0.5 * torch.randn(1, *shape, generator=g) for shape in spec.shapes]
    state = spec.initial_state(W0, 1) if W0 else spec.initial_state([], 1, heads=1)
    losses = []
    with torch.no_grad():
        for _ in range(20):
            losses.append((read(k, state, spec, phi) - v).square().sum(-1).mean().item())
            _, state = scan(k, k, v, Gates(lr=torch.full((1, 12, 1), 0.2 / window)), state, spec, phi)
    assert all(b < a for a, b in zip(losses[:5], losses[1:6])), losses
    assert losses[-1] < 0.1 * losses[0], losses


def test_a_list_holds_more_pairs_than_its_keys_have_dimensions():
    spec = exp_spec(structure="linear", key_dim=2, value_dim=4, chunk_size=1)
    g = torch.Generator().manual_seed(0)
    angle = torch.arange(10) * (2 * math.pi / 10)
    k = torch.stack([angle.cos(), angle.sin()], -1).reshape(1, 10, 1, 2).repeat(1, 200, 1, 1)
    v = torch.randn(1, 10, 1, 4, generator=g).repeat(1, 200, 1, 1)
    phi = Exp(2, heads=1)
    with torch.no_grad():
        phi.log_scale.fill_(math.log(20.0))
        _, state = scan(None, k, v, Gates(lr=torch.ones(1, 2000, 1)), spec.initial_state([], 1, heads=1), spec, phi)
        assert_close(read(k[:, :10], state, spec, phi), v[:, :10], 1e-3, "recall of 10 keys of 2 dims")


# The state ----------------------------------------------------------------------------------------------------------


def after(case: Case, length: int, batch: int = 2, seed: int = 0) -> MemoryState:
    x = inputs(case, batch=batch, length=max(1, length), seed=seed)
    with torch.no_grad():
        return call(scan, x, case)[1] if length else start(x, case.spec)


def go_on(case: Case, state: MemoryState, length: int = 7):
    return call(scan, inputs(case, batch=state.batch, length=length, seed=9), case, state)


def test_the_state_grows_and_says_so():
    case = KINDS[4]
    sizes = [after(case, n).nbytes for n in (0, 10, 20)]
    assert sizes[0] < sizes[1] and sizes[1] - sizes[0] == sizes[2] - sizes[1]
    state = after(case, 10)
    assert state.grows and case.spec.grows and state.pairs.length == 10
    assert state.batch == 2 and state.heads == HEADS
    assert state.pairs.key.shape == (2, 10, HEADS, 4) and state.pairs.weight.shape == (2, 10, HEADS, 8)
    finite = MemorySpec(4, 4, structure="linear")
    assert not finite.grows and not finite.initial_state([torch.zeros(1, 4, 4)], 1).grows


@every_kind
@pytest.mark.parametrize("length", [0, 1, 8, 11])
def test_save_load_continue_is_identical_to_the_last_bit(case, length, tmp_path):
    state = after(case, length)
    state.save(tmp_path / "a")
    loaded = MemoryState.load(tmp_path / "a", case.spec)
    assert_same_state(loaded, state, 0.0)
    (y, final), (z, other) = go_on(case, state), go_on(case, loaded)
    assert torch.equal(y, z) and loaded.phase == state.phase
    assert_same_state(other, final, 0.0)


@every_kind
def test_rows_at_different_positions_stack_select_save_and_go_on_as_each_alone(case, tmp_path):
    alone = [after(case, n, batch=1, seed=n) for n in (0, 3, 8, 13)]
    together = MemoryState.stack(alone)
    assert together.pairs.length == 13
    for row, state in enumerate(alone):
        assert_same_state(together.select([row]), state, 0.0)
    together.save(tmp_path / "a")
    assert_same_state(MemoryState.load(tmp_path / "a"), together, 0.0)
    x = inputs(case, batch=4, length=7, seed=9)
    y, final = call(scan, x, case, together)
    order = [2, 0, 2]
    picked = together.select(order)
    assert picked.pairs.length == 8
    for row, state in enumerate(alone):
        one = Inputs(*(t[row : row + 1] for t in (x.q, x.k, x.v)), *x_rest(x))
        one.gates = x.gates.map(lambda g, row=row: g[row : row + 1])
        z, other = call(scan, one, case, state)
        assert_close(y[row : row + 1], z, 1e-12, "y")
        assert_same_state(final.select([row]), other, 1e-12)


@every_kind
def test_clone_detach_and_to_carry_the_list(case):
    x = inputs(case, grad=True)
    _, state = call(scan, x, case)
    assert state.pairs.weight.requires_grad
    cut = state.detach()
    assert not any(t.requires_grad for t in cut._tensors().values())
    kept, fork = cut.clone(), cut.clone()
    for t in fork._tensors().values():
        t.add_(1)
    assert_same_state(cut, kept, 0.0)
    narrow = cut.to(torch.float32)
    assert {t.dtype for t in narrow._tensors().values()} == {torch.float32, torch.int64}
    assert {t.device.type for t in cut.to("meta")._tensors().values()} == {"meta"}
    call(scan, x, case, cut)
    assert_same_state(cut, kept, 0.0)


def test_a_file_whose_list_does_not_fit_its_positions_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    case = KINDS[0]
    after(case, 5).save(tmp_path / "a")
    tensors = load_file(tmp_path / "a")
    metadata = {"format": "mnemos.memory-state/1", "spec": case.spec.to_json()}
    for changed in (
        {"pairs.key": tensors["pairs.key"][:, :4].clone()},
        {"position": tensors["position"] + 1},
        {"pairs.weight": tensors["pairs.weight"][..., :-1].clone()},
        {"window_key": torch.zeros(3)},
    ):
        save_file(tensors | changed, tmp_path / "a", metadata)
        with pytest.raises(ValueError, match=r"does not fit its own header|holds no"):
            MemoryState.load(tmp_path / "a")
    for name in tensors:
        save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "a", metadata)
        with pytest.raises(ValueError, match=r"does not fit its own header|holds no"):
            MemoryState.load(tmp_path / "a")


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rule": "muon"}, "goes with structure='linear' or 'mlp', rule='gd' and anchor='chunk'.*not .*rule='muon'"),
        ({"structure": "gated_mlp"}, "goes with structure='linear' or 'mlp'.*two maps that start at 0"),
        ({"structure": "linear", "anchor": "token"}, "goes with.*anchor='chunk'.*anchor='token'; chunk_size=1 is the"),
        ({"normalize": True}, "normalize=True goes with.*structure='linear' and objective='dot', not .*'mlp'.*'l2'"),
        ({"normalize": True, "structure": "linear"}, "normalize=True goes with.*objective='l2'"),
        ({"normalize": True, "structure": "linear", "objective": "dot", "features": "identity"}, "features='identity'"),
        ({"normalize": 1}, "normalize=1 must be True or False"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_does(fields, words):
    with pytest.raises(ValueError, match=words) as caught:
        exp_spec(**fields)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 320


def test_a_start_that_does_not_fit_is_refused():
    linear, deep = exp_spec(structure="linear"), exp_spec()
    with pytest.raises(ValueError, match="heads=None must be a whole number"):
        linear.initial_state([], 2)
    with pytest.raises(ValueError, match="W0 has 1 matrices, but"):
        linear.initial_state([torch.zeros(2, 4, 4)], 2)
    with pytest.raises(ValueError, match="W0 has 2 matrices, but"):
        deep.initial_state([torch.zeros(2, 4, 8), torch.zeros(2, 8, 4)], 2)
    with pytest.raises(ValueError, match="those of W0"):
        deep.initial_state([torch.zeros(2, 8, 4)], 2, heads=2)
    with pytest.raises(ValueError, match="W0 has 0 matrices, but"):
        deep.initial_state([], 2, heads=2)


def test_a_spec_survives_json():
    spec = exp_spec(**SOFTMAX)
    assert MemorySpec.from_json(spec.to_json()) == spec
    old = json.loads(spec.to_json())
    del old["normalize"]
    assert MemorySpec.from_json(json.dumps(old)).normalize is False


# The layer ----------------------------------------------------------------------------------------------------------

LAYERS = [
    {"structure": "linear"},
    SOFTMAX,
    SOFTMAX | {"momentum": False, "retain": False, "qk_norm": "none"},
    {},
    {"objective": "dot", "window": 3, "gate": "token*decay"},
    {"depth": 3, "qk_norm": "rms"},
]
every_layer = pytest.mark.parametrize("fields", LAYERS, ids=str)


def layer(**fields) -> NeuralMemory:
    torch.manual_seed(0)
    return NeuralMemory(dim=16, heads=2, features="exp", **({"chunk_size": 4} | fields))


@every_layer
def test_a_layer_gives_the_same_however_it_is_called(fields):
    mem = randomise(layer(**fields).double(), 0.1)
    x = torch.randn(2, 19, 16, dtype=torch.float64)
    y, final = mem(x)
    first, state = mem(x[:, :7])
    outputs = [first]
    with torch.no_grad():
        for t in range(7, 13):
            out, state = mem(x[:, t : t + 1], state)
            outputs.append(out)
        out, state = mem(x[:, 13:], state)
    assert_close(torch.cat([*outputs, out], 1), y, EXACT, "y")
    assert_same_state(state, final)
    assert_same_state(mem.write(x), final)
    packed, _ = mem(x.reshape(1, 38, 16), cu_seqlens=torch.tensor([0, 19, 38]))
    assert_close(packed.reshape(2, 19, 16), y, EXACT, "packed")
    if fields.get("read", "after") == "after":
        assert mem.read(x[:, -1:], final).shape == (2, 1, 16)


@every_layer
def test_every_parameter_of_a_layer_is_trained(fields):
    mem = layer(**fields)
    mem(torch.randn(2, 19, 16))[0].square().sum().backward()
    for name, parameter in mem.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@every_layer
def test_a_layer_is_traced(fields):
    mem = layer(**fields)
    x = torch.randn(2, 11, 16)
    y, _ = mem(x)
    z, _, trace = mem(x, trace=True)
    assert_close(z, y, 2e-5, "y")
    assert trace.surprise.shape == (2, 11, 2) and trace.surprise.isfinite().all()
    assert trace.weight_norms.shape == (2, 3, 2, len(mem.spec.network.shapes()))
    assert trace.weight_norms.isfinite().all() and (trace.weight_norms > 0).all()


@every_layer
def test_long_sequences_stay_finite_at_the_defaults_in_both_precisions(fields):
    mem = layer(chunk_size=64, **fields)
    x = torch.randn(1, 600, 16) + 1.0
    y, state = mem(x)
    y.square().mean().backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in mem.parameters())
    assert all(t.abs().amax() < 1e3 for t in state._tensors().values() if t.numel() and t.is_floating_point())
    with torch.autocast("cpu", torch.bfloat16):
        z, _ = mem(x)
    assert z.isfinite().all()


def test_the_kernel_of_the_layer_is_one_for_a_key_with_itself():
    for fields in LAYERS:
        phi = layer(**fields).features
        key = F.normalize(torch.randn(5, 2, 8), dim=-1) * phi.key_norm
        assert_close((phi(key).square().sum(-1) + phi.offset).exp(), torch.ones(5, 2), 1e-5, "kernel")
    assert isinstance(phi, FeatureMap)
    phi.log_scale.data.zero_()
    phi.reset_parameters()
    assert_close(phi.log_scale.detach(), torch.full((2,), -math.log(8) / 2), 1e-6, "start")
