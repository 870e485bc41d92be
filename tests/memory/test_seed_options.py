"""Options that the seed repositories have: surprise by norms, concatenated powers, Polar Express, Nesterov, lr inside the accumulator,
more Newton–Schulz iterations at call time. Each is the same function in reference, scan and step."""

from __future__ import annotations

import dataclasses
import re

import loops
import pytest
import torch
from cases import Case, grid, inputs
from layers import CASES, DIM, HEADS, T, build, some

from helpers import assert_close_rms
from mnemos.backends.torch.trace import traced_scan
from mnemos.eval.capacity import measured_rank, theoretical_rank
from mnemos.memory import Gates, MemorySpec, MemoryState, NeuralMemory, newton_schulz, reference_scan, scan, step
from mnemos.memory.newton_schulz import NS_COEFFICIENTS

f64 = torch.float64


# Concatenated powers (the engine's grid and tests/memory/test_features.py have them too) -------------------------------


@pytest.mark.parametrize("unit", [True, False])
def test_concatenated_powers_have_rank_p_times_d_on_unit_keys_too(unit):
    torch.manual_seed(0)
    spec = MemorySpec(5, 5, structure="linear", features="elementwise_concat", degree=3)
    assert measured_rank(spec, unit) == theoretical_rank(spec, unit) == 15


# Polar Express (the engine's grid has it too) ---------------------------------------------------------------------------


def of_singular_values(values: torch.Tensor, columns: int) -> torch.Tensor:
    """A random matrix (n, columns) with these n singular values, scaled to a largest of 1 / sqrt(n): Frobenius norm at most 1."""
    n = len(values)
    U, V = (torch.linalg.qr(torch.randn(m, n, dtype=values.dtype))[0] for m in (n, columns))
    return (U * values) @ V.mT


@pytest.mark.parametrize(("steps", "error"), [(5, 0.16), (6, 0.006), (8, 1e-9)])
@pytest.mark.parametrize("columns", [24, 100])
def test_polar_express_brings_singular_values_of_a_thousandth_to_one(steps, error, columns):
    torch.manual_seed(0)
    S = of_singular_values(torch.logspace(-3, 0, 24, dtype=f64), columns)
    S = S / S.norm()
    values = torch.linalg.svdvals(S)
    assert values.min() < 1e-3 < values.max()
    found, muon = (
        torch.linalg.svdvals(newton_schulz(S, steps, NS_COEFFICIENTS[name])) for name in ("polar_express", "muon")
    )
    inside = values > 1e-3  # the interval that the coefficients are made for
    assert (found[inside] - 1).abs().max() < error
    assert (found[inside] - 1).square().mean() < 0.5 * (muon[inside] - 1).square().mean()
    assert found.min() > muon.min()


def test_five_iterations_of_polar_express_do_what_the_documents_claim():
    s = torch.linspace(0, 1, 200_001, dtype=f64)
    x = s
    for a, b, c in NS_COEFFICIENTS["polar_express"][:5]:
        x = a * x + b * x**3 + c * x**5
    assert x.min() >= 0 and x.max() < 1.13 and x[s >= 1e-3].min() > 0.84
    assert x[s >= 0.01].min() > 0.87 and x[s > 0.0008].min() > 0.68


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("columns", [8, 64])
def test_polar_express_stays_bounded_for_matrices_of_rank_one_and_full_rank(dtype, columns):
    """A singular value 2 % above 1 would diverge; the safety factor keeps rounding from it."""
    torch.manual_seed(0)
    one = torch.randn(5, 8, 1, dtype=dtype) @ torch.randn(5, 1, columns, dtype=dtype)
    for S in (one, torch.randn(5, 8, columns, dtype=dtype)):
        for scale in (1e-6, 1.0, 1e6):
            step = newton_schulz(scale * S, 10, NS_COEFFICIENTS["polar_express"])
            assert abs(torch.linalg.matrix_norm(step, 2).max().item() - 1) < 1e-3


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (3, 3), (3, 12)])
def test_polar_express_has_exact_gradients_and_takes_no_step_from_zero(shape):
    torch.manual_seed(0)
    schedule = NS_COEFFICIENTS["polar_express"]
    S = torch.zeros(2, *shape, dtype=f64, requires_grad=True)
    step = newton_schulz(S, 5, schedule)
    (gradient,) = torch.autograd.grad(step.sum(), S)
    assert not step.any() and not gradient.any()
    S = torch.randn(2, *shape, dtype=f64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: newton_schulz(x, 5, schedule), (S,), atol=1e-6, rtol=1e-5)


def test_the_paths_of_one_polynomial_and_of_a_schedule_of_it_are_the_same():
    S = torch.randn(3, 4, 6, dtype=f64)
    assert torch.equal(newton_schulz(S, 5, (3.4445, -4.7750, 2.0315)), newton_schulz(S, 5, NS_COEFFICIENTS["muon"]))


# Nesterov, and lr inside the accumulator (the engine's grid has them too) -----------------------------------------------------


@pytest.mark.parametrize(("commit", "chunk"), [(1, 8), (4, 8), (8, 8)])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_its_formula_with_and_without_nesterov_and_with_lr_inside_or_outside(commit, chunk, inside, nesterov):
    torch.manual_seed(0)
    q, k, v = loops.tokens()
    lr, momentum, retain, strength, W0 = (
        loops.gate(low=0.1, high=0.5),
        loops.gate(low=0.5),
        loops.gate(low=0.8),
        loops.gate(low=0.2),
        loops.normal(loops.H, loops.D, loops.E),
    )
    leaves = loops.track(q=q, k=k, v=v, lr=lr, momentum=momentum, retain=retain, gate=strength, W0=W0)
    options = {"lr_position": "inside", "step_size": 0.3} if inside else {}
    spec = MemorySpec(
        loops.D,
        loops.E,
        structure="linear",
        rule="muon",
        chunk_size=chunk,
        commit_every=commit,
        window=3,
        nesterov=nesterov,
        **options,
    )
    actual = loops.run(spec, q, k, v, Gates(lr=lr, momentum=momentum, retain=retain, gate=strength), [W0])
    (W,), ys = loops.rows([W0]), []
    S = torch.zeros_like(W)
    for t in range(loops.T):
        if t % chunk == 0:
            anchor = W
        G = torch.zeros_like(W)
        for i in range(max(0, t - 2), t + 1):
            error = loops.apply(k[:, i], anchor) - v[:, i]
            G = G + loops.scalar(strength[:, i]) * loops.outer(k[:, i], error)
        if inside:
            G = loops.scalar(lr[:, t]) * G
        m = loops.scalar(momentum[:, t])
        S = m * S - G
        W = loops.scalar(retain[:, t]) * W
        if (t + 1) % commit == 0:
            along = m * S - G if nesterov else S
            W = W + (0.3 if inside else loops.scalar(lr[:, t])) * newton_schulz(along, 5, NS_COEFFICIENTS["muon"])
        ys.append(loops.apply(q[:, t], W))
    loops.assert_same(actual, (torch.stack(ys, 1), [W]), leaves, 1e-9)


def test_nesterov_without_momentum_is_plain_muon():
    case = Case(MemorySpec(4, 4, expansion=2, rule="muon", chunk_size=8, commit_every=2, nesterov=True), ("retain",))
    plain = dataclasses.replace(case.spec, nesterov=False)
    x = inputs(case)
    y, _ = scan(x.q, x.k, x.v, x.gates, x.state(case.spec), case.spec)
    expected, _ = scan(x.q, x.k, x.v, x.gates, x.state(plain), plain)
    assert_close_rms(y, expected, 1e-9, "y")


def test_inside_the_accumulator_only_the_ratio_of_learning_rates_counts():
    case = Case(MemorySpec(4, 4, expansion=2, rule="muon", chunk_size=8, commit_every=2, lr_position="inside"))
    x = inputs(case)
    y, _ = scan(x.q, x.k, x.v, x.gates, x.state(case.spec), case.spec)
    tenfold = dataclasses.replace(x.gates, lr=10 * x.gates.lr)
    assert_close_rms(scan(x.q, x.k, x.v, tenfold, x.state(case.spec), case.spec)[0], y, 1e-8, "y")


@pytest.mark.parametrize("options", [{"nesterov": True}, {"lr_position": "inside", "step_size": 0.2}])
@pytest.mark.parametrize("commit", [1, 2])
def test_a_trained_layer_with_these_options_has_a_gradient_everywhere(options, commit):
    mem = build("atlas", commit_every=commit, chunk_size=4, **options)
    y, state = mem(some(2, T, DIM))
    (y.square().sum() + sum(w.square().sum() for w in state.weights)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mem.parameters())


def test_the_traced_accumulator_has_lr_inside_where_the_rule_has():
    mem, x = build("lr inside"), some(2, T, DIM)
    *_, end, trace = mem(x, trace=True)
    held = sum(s.square().sum((-2, -1)) for s in end.momentum).sqrt()
    assert_close_rms(trace.momentum_norm[:, -1], held, 1e-8, "momentum_norm")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(nesterov=True), "nesterov=True goes with rule='muon' and momentum=True, not rule='gd', momentum=True"),
        (dict(nesterov=True, rule="muon", momentum=False), "nesterov=True goes with rule='muon' and momentum=True"),
        (dict(nesterov=1, rule="muon"), "nesterov=1 must be True or False"),
        (dict(lr_position="inside"), "lr_position='inside' goes with rule='muon' only, not rule='gd'"),
        (dict(lr_position="within", rule="muon"), "lr_position='within' is unknown; choose one of 'outside', 'inside'"),
        (dict(step_size=0.5, rule="muon"), "step_size=0.5 goes with lr_position='inside' only"),
        (dict(step_size=0, rule="muon", lr_position="inside"), "step_size=0 must be a number > 0"),
        (dict(step_size=float("nan"), rule="muon", lr_position="inside"), "step_size=nan must be a number > 0"),
        (
            dict(ns_coefficients="polar"),
            "ns_coefficients='polar' is unknown; choose one of 'muon', 'convergent', 'polar",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_a_sentence(fields, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        MemorySpec(4, 4, **fields)


def test_a_layer_refuses_nesterov_without_momentum():
    with pytest.raises(ValueError, match="nesterov=True looks ahead along the momentum: it needs momentum=True"):
        NeuralMemory(16, heads=2, rule="muon", momentum=False, nesterov=True)


# More Newton–Schulz iterations at call time -------------------------------------------------------------------------------


def long_and_short(**more) -> tuple[NeuralMemory, NeuralMemory]:
    """One layer with the specs of 5 and of 9 iterations."""
    return build("atlas", ns_coefficients="convergent", **more), build(
        "atlas", ns_coefficients="convergent", ns_steps=9, **more
    )


def test_more_iterations_at_call_time_are_those_of_a_layer_with_more_iterations():
    five, nine = long_and_short()
    x = some(2, T, DIM)
    expected, end = nine(x)
    y, state = five(x, ns_steps=9)
    assert torch.equal(y, expected) and state.spec == five.spec != end.spec
    assert not torch.allclose(y, five(x)[0])
    first, state = five(x[:, :7], ns_steps=9)  # scan, then token by token, then a trace
    parts = [first]
    with torch.no_grad():
        for t in range(7, 13):
            y, state = five(x[:, t : t + 1], state, ns_steps=9)
            parts.append(y)
    y, state, _ = five(x[:, 13:], state, trace=True, ns_steps=9)
    assert_close_rms(torch.cat([*parts, y], 1), expected, 1e-10, "y")
    for a, b in zip(five.write(x, ns_steps=9).weights, end.weights):
        assert_close_rms(a, b, 1e-10, "weights")


def test_a_state_written_with_more_iterations_continues_under_the_layers_own_spec():
    five, nine = long_and_short()
    x, mask = some(2, T, DIM), torch.rand(2, T, generator=torch.Generator().manual_seed(1)) < 0.7
    _, state = five(x, None, mask, ns_steps=9)
    _, other = nine(x, None, mask)
    assert state.spec == five.spec
    expected, _ = five(x, dataclasses.replace(other, spec=five.spec))
    assert_close_rms(five(x, state)[0], expected, 1e-10, "y")


@pytest.mark.parametrize("function", [scan, reference_scan])
def test_an_engine_call_may_override_the_iterations_of_a_states_spec(function):
    case = Case(MemorySpec(4, 4, expansion=2, rule="muon", window=3, chunk_size=8, commit_every=4))
    more = case.spec.with_ns_steps(7)
    x = inputs(case)
    y, state = function(x.q, x.k, x.v, x.gates, x.state(case.spec), more)
    expected, other = function(x.q, x.k, x.v, x.gates, x.state(more), more)
    assert torch.equal(y, expected) and state.spec == case.spec and other.spec == more
    one = x.gates.map(lambda g: g[:, :1])
    y, state = step(x.q[:, :1], x.k[:, :1], x.v[:, :1], one, state, more)
    assert state.spec == case.spec


def test_iterations_at_call_time_need_muon_and_a_sensible_number():
    with pytest.raises(ValueError, match="ns_steps=9 goes with rule='muon' only, not rule='gd'"):
        build("titans")(some(2, T, DIM), ns_steps=9)
    with pytest.raises(ValueError, match="ns_steps=9 goes with rule='muon' only"):
        build("titans").write(some(2, T, DIM), ns_steps=9)
    for steps in (0, 65, 2.5, True):
        with pytest.raises(ValueError, match=r"ns_steps=.* must be a whole number >= 1 and <= 64"):
            build("atlas")(some(2, T, DIM), ns_steps=steps)
    atlas = build("atlas")
    with pytest.raises(ValueError, match="another spec"):
        state = atlas(some(2, T, DIM))[1]
        x = inputs(Case(state.spec), heads=HEADS)
        scan(x.q, x.k, x.v, x.gates, state, dataclasses.replace(state.spec, window=4), x.features)


# Surprise as norms of the gradient and of the accumulator -------------------------------------------------------------


def norm_of(state: MemoryState, matrices: list[torch.Tensor], listed: torch.Tensor | None, features) -> torch.Tensor:
    """Frobenius norm over all maps, (B, H); `listed` (B, n, H, P) is a list over the keys of the state."""
    total = sum(m.square().sum((-2, -1)) for m in matrices) if matrices else 0.0
    if listed is not None:
        key, held = state.pairs.key.transpose(1, 2), listed[..., : state.spec.pair_dim - state.spec.normalize]
        held = held.transpose(1, 2)
        scores = key @ key.mT
        offset = getattr(features, "offset", None)
        scores = scores if offset is None else scores + offset[:, None, None]
        total = total + (held * (scores.exp() @ held)).sum((-2, -1))
    return total.sqrt()


def reference_norms(x, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of G_t and S_t, read off the reference's states token by token: S_t = momentum_t S_{t-1} - lr_t G_t."""
    spec, gates = case.spec, x.gates
    state, gradients, accumulators = x.state(spec), [], []
    for t in range(x.k.shape[1]):
        part = slice(t, t + 1)
        one = gates.map(lambda g, part=part: g[:, part])
        _, new = reference_scan(x.q[:, part], x.k[:, part], x.v[:, part], one, state, spec, x.features)

        def scalar(name: str, default: float, one=one) -> torch.Tensor:
            value = getattr(one, name)
            return torch.full_like(one.lr[:, 0], default) if value is None else value[:, 0]

        def moved(new_S, old_S, new_W, old_W, factor, start=0.0):
            """S_t and momentum S_{t-1}; without an accumulator S_t is what W_t has gained. start: what W decays towards."""
            if spec.momentum:
                decay = scalar("momentum", 0.0) if spec.retains.is_linear else scalar("retain", 1.0)
                return new_S, factor(decay) * old_S
            return new_W - (start + factor(scalar("retain", 1.0)) * (old_W - start)), torch.zeros_like(new_W)

        matrix, entry = (lambda g: g[..., None, None]), (lambda g: g[:, None, :, None])
        blank, towards = [None] * len(new.weights), state.start or [0.0] * len(new.weights)
        matrices = zip(new.momentum or blank, state.momentum or blank, new.weights, state.weights, towards)
        pairs = [moved(s, old, w, before, matrix, start) for s, old, w, before, start in matrices]
        S, kept = [a for a, _ in pairs], [b for _, b in pairs]
        listed = listed_kept = None
        if spec.is_kv_cache:
            old = state.pairs.resized(new.pairs.length)
            listed, listed_kept = moved(new.pairs.momentum, old.momentum, new.pairs.weight, old.weight, entry)
        inside = spec.rule == "gd" or spec.lr_position == "inside"
        lr = one.lr[:, 0] if inside else torch.ones_like(one.lr[:, 0])
        G = [a - b for a, b in zip(kept, S)]
        listed_G = None if listed is None else listed_kept - listed
        gradients.append(norm_of(new, G, listed_G, x.features) / lr)
        accumulators.append(norm_of(new, S, listed, x.features))
        state = new
    return torch.stack(gradients, 1), torch.stack(accumulators, 1)


# muon without an accumulator has no state that its gradients can be read off
TRACED = [
    *[case for case in grid() if case.spec.momentum or case.spec.rule == "gd"][::3],
    Case(MemorySpec(4, 3, structure="linear", objective="dot", features="exp", normalize=True), ("momentum", "gate")),
    Case(MemorySpec(4, 4, expansion=2, features="exp", window=3, chunk_size=4)),
    Case(MemorySpec(4, 4, expansion=2, window=3, chunk_size=128, rule="muon", commit_every=4)),
]


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_traced_norms_are_those_of_the_gradients_and_accumulators_of_the_reference(case):
    x = inputs(case, length=13)
    if not x.W0:
        start = case.spec.initial_state([], 2, 3, f64)
        x.state = lambda spec: start
    expected = reference_norms(x, case)
    position = torch.arange(13).expand(2, 13)
    *_, trace = traced_scan(x.q, x.k, x.v, x.gates, x.state(case.spec), case.spec, x.features, None, position)
    assert_close_rms(trace.gradient_norm, expected[0], 1e-8, "gradient_norm")
    assert_close_rms(trace.momentum_norm, expected[1], 1e-8, "momentum_norm")


@pytest.mark.parametrize("case", sorted(CASES))
def test_traced_norms_skip_masked_tokens_and_continue_from_a_state(case):
    mem, x = build(case), some(2, T, DIM)
    mask = torch.rand(2, T, generator=torch.Generator().manual_seed(1)) < 0.7
    _, before = mem(some(2, 3, DIM, seed=2))
    *_, end, trace = mem(x, before, mask, trace=True)
    assert trace.gradient_norm.shape == trace.momentum_norm.shape == (2, T, HEADS)
    assert (trace.gradient_norm[~mask] == 0).all() and (trace.momentum_norm[~mask] == 0).all()
    if end.momentum:
        for row in range(2):
            last = int(mask[row].nonzero().max())
            held = sum(s[row].square().sum((-2, -1)) for s in end.momentum).sqrt()
            assert_close_rms(trace.momentum_norm[row, last], held, 1e-8, "momentum after the last token")
    for row in range(2):  # each row by itself, its masked tokens taken out
        mine = mem(x[row : row + 1, mask[row]], before.select([row]), trace=True)[-1]
        assert_close_rms(trace.gradient_norm[row, mask[row]], mine.gradient_norm[0], 1e-8, "gradient_norm")
        assert_close_rms(trace.momentum_norm[row, mask[row]], mine.momentum_norm[0], 1e-8, "momentum_norm")


def test_a_repeated_sequence_surprises_less_by_every_measure():
    torch.manual_seed(0)
    mem = NeuralMemory(64, heads=1, chunk_size=8)
    x = some(1, 8, 64, dtype=torch.float32).repeat(1, 16, 1)
    *_, trace = mem(x, trace=True)
    assert not trace.gradient_norm.requires_grad
    for norm in (trace.gradient_norm, trace.momentum_norm):
        assert norm[:, -16:].mean() < 0.7 * norm[:, :16].mean()
