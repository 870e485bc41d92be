"""The invariants of one memory, over the whole grid: scan, step and reference are the same function."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from cases import Case, grid, inputs

from helpers import assert_close, every_backend
from mnemos.memory import Gates, MemorySpec, MemoryState, read, reference_scan, scan, step
from mnemos.memory.rules import TIMED

GRID = grid()
EXACT = 1e-10
every_case = pytest.mark.parametrize("case", GRID, ids=str)
# a memory of each kind of code path: for the properties that do not need the whole grid
KINDS = [
    Case(MemorySpec(key_dim=4, value_dim=4, expansion=2, window=3, chunk_size=8)),
    Case(MemorySpec(key_dim=4, value_dim=4, expansion=2, chunk_size=2)),
    Case(MemorySpec(key_dim=4, value_dim=3, structure="linear", chunk_size=5, window=2)),
    Case(MemorySpec(key_dim=4, value_dim=3, structure="linear", anchor="token", window=3)),
    Case(MemorySpec(key_dim=4, value_dim=4, structure="gated_mlp", expansion=2, chunk_size=4, read="before")),
    Case(MemorySpec(key_dim=4, value_dim=4, structure="test_composed", window=5, chunk_size=4)),
    Case(MemorySpec(key_dim=4, value_dim=4, expansion=2, rule="muon", window=3, chunk_size=8, commit_every=4)),
    Case(
        MemorySpec(key_dim=4, value_dim=4, expansion=2, features="monomials", momentum=False, chunk_size=8), ("retain",)
    ),
    Case(
        MemorySpec(key_dim=4, value_dim=4, expansion=2, objective="huber", window=3, chunk_size=8),
        ("retain", "threshold"),
    ),
    Case(
        MemorySpec(key_dim=4, value_dim=4, expansion=2, retention="kl", window=3, chunk_size=8, commit_every=4),
        ("retain",),
    ),
    Case(MemorySpec(key_dim=4, value_dim=4, expansion=2, retention="lq(q=3)", chunk_size=4), ("retain", "gate")),
    Case(MemorySpec(key_dim=4, value_dim=4, expansion=2, retention="start", window=3, chunk_size=8)),
    Case(MemorySpec(key_dim=4, value_dim=3, structure="linear", retention="start", anchor="token", decay_first=True)),
    Case(MemorySpec(key_dim=4, value_dim=4, expansion=2, retention="start", rule="muon", chunk_size=8, commit_every=4)),
    Case(
        MemorySpec(
            10, 10, expansion=2, rule="muon", window=3, chunk_size=8, commit_every=1, momentum=False, retention="start"
        ),
        ("retain", "gate", "decay", "lag"),
    ),
]
every_kind = pytest.mark.parametrize("case", KINDS, ids=str)


def call(function, x, case, state=None, **options):
    state = x.state(case.spec) if state is None else state
    return function(x.q, x.k, x.v, x.gates, state, case.spec, x.features, **options)


def sliced(x, lo: int, hi: int) -> tuple:
    return x.q[:, lo:hi], x.k[:, lo:hi], x.v[:, lo:hi], x.gates.map(lambda g: g[:, lo:hi])


def tensors(state: MemoryState) -> dict[str, torch.Tensor]:
    return state.tensors()


def assert_same_state(a: MemoryState, b: MemoryState, tolerance: float) -> None:
    assert a.position.tolist() == b.position.tolist()
    for (name, x), y in zip(tensors(a).items(), tensors(b).values()):
        if x.is_floating_point():
            assert_close(x, y, tolerance, f"state.{name}")


def gradients(y, state: MemoryState, leaves: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a random functional of the outputs and of the whole final state."""
    g = torch.Generator().manual_seed(7)
    parts = [y, *(x for x in tensors(state).values() if x.is_floating_point())]
    total = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum() for x in parts)
    return list(
        torch.autograd.grad(total, list(leaves.values()), materialize_grads=True, allow_unused=True, retain_graph=True)
    )


@functools.lru_cache(maxsize=4)  # the four tests of a case follow each other
def expected(index: int):
    """Outputs, state and gradients by the reference in float64, of the numbers that float32 has."""
    case = GRID[index]
    x = inputs(Case(case.spec, case.gates, torch.float32), grad=True).double()
    y, state = call(reference_scan, x, case)
    return y.detach(), state.detach(), gradients(y, state, x.leaves())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@every_backend
@pytest.mark.parametrize("index", range(len(GRID)), ids=[str(c) for c in GRID])
def test_scan_is_the_reference_in_outputs_state_and_every_gradient(index, backend, dtype):
    spec, gates = GRID[index].spec, GRID[index].gates
    x = inputs(Case(spec, gates, torch.float32), grad=True)
    x = x.double() if dtype == torch.float64 else x
    y, state = call(scan, x, GRID[index], backend=backend)
    assert y.dtype == dtype and state.weights[0].dtype == dtype
    ry, rstate, rgrads = expected(index)
    rounding = 5e-4 if spec.rule == "muon" else 2e-5
    tolerance = EXACT if dtype == torch.float64 else rounding
    assert_close(y, ry, tolerance, "y")
    assert_same_state(state, rstate, tolerance)
    for name, a, b in zip(x.leaves(), gradients(y, state, x.leaves()), rgrads, strict=True):
        assert_close(a, b, tolerance, f"gradient of {name}")


LONG = [
    MemorySpec(key_dim=3, value_dim=3, expansion=2, chunk_size=1),
    MemorySpec(key_dim=3, value_dim=3, expansion=2, chunk_size=128, window=3),
    MemorySpec(key_dim=3, value_dim=3, expansion=2, chunk_size=96),
    MemorySpec(key_dim=3, value_dim=3, expansion=2, chunk_size=134),
    MemorySpec(key_dim=3, value_dim=3, structure="gated_mlp", expansion=2, chunk_size=16, window=20),
    MemorySpec(key_dim=3, value_dim=3, structure="linear", anchor="token"),
    MemorySpec(key_dim=3, value_dim=3, structure="linear", chunk_size=4),
    MemorySpec(key_dim=3, value_dim=3, expansion=2, chunk_size=32, rule="muon", commit_every=1),
    MemorySpec(key_dim=3, value_dim=3, structure="gated_mlp", expansion=2, chunk_size=64, rule="muon", commit_every=16),
    MemorySpec(key_dim=3, value_dim=3, expansion=2, chunk_size=128, window=3, retention="start"),
    MemorySpec(key_dim=3, value_dim=3, structure="gated_mlp", expansion=2, chunk_size=16, retention="start"),
    MemorySpec(key_dim=3, value_dim=3, structure="linear", anchor="token", retention="start"),
    MemorySpec(key_dim=3, value_dim=3, expansion=2, chunk_size=32, rule="muon", commit_every=1, retention="start"),
]


LONGEST = MemorySpec(key_dim=3, value_dim=3, structure="gated_mlp", expansion=2, chunk_size=16, window=40)


@functools.lru_cache(maxsize=1)
def expected_of_long(spec: MemorySpec):
    """Outputs, state and gradients of 331 tokens by the reference."""
    x = inputs(Case(spec), length=331, batch=1, heads=2, grad=True)
    y, state = call(reference_scan, x, Case(spec))
    return y.detach(), state.detach(), gradients(y, state, x.leaves())


@every_backend
@pytest.mark.parametrize(
    "spec",
    [*LONG, pytest.param(LONGEST, marks=pytest.mark.slow)],
    ids=[
        f"{s.structure},{s.rule},chunk={s.chunk_size},window={s.window},{s.anchor},{s.retention}"
        for s in (*LONG, LONGEST)
    ],
)
def test_scan_is_the_reference_over_several_tiles_and_saved_states(spec, backend):
    x = inputs(Case(spec), length=331, batch=1, heads=2, grad=True)
    y, state = call(scan, x, Case(spec), backend=backend)
    ry, rstate, rgrads = expected_of_long(spec)
    assert_close(y, ry, EXACT, "y")
    assert_same_state(state, rstate, EXACT)
    for name, a, b in zip(x.leaves(), gradients(y, state, x.leaves()), rgrads, strict=True):
        assert_close(a, b, EXACT, f"gradient of {name}")


@every_case
def test_token_by_token_is_one_scan(case):
    x = inputs(case)
    y, final = call(scan, x, case)
    state, outputs = x.state(case.spec), []
    for t in range(x.k.shape[1]):
        out, state = step(*sliced(x, t, t + 1), state, case.spec, x.features)
        outputs.append(out)
    assert_close(torch.cat(outputs, 1), y, EXACT, "y")
    assert_same_state(state, final, EXACT)
    assert state.chunk_offset == final.chunk_offset


@every_case
def test_any_split_into_calls_gives_the_same_outputs_and_state(case):
    x = inputs(case, length=41)
    y, final = call(scan, x, case)
    draw = random.Random(str(case))
    for _ in range(3):
        cuts = sorted(draw.sample(range(1, 41), draw.randint(1, 5)))
        state, outputs = x.state(case.spec), []
        for lo, hi in zip([0, *cuts], [*cuts, 41]):
            out, state = scan(*sliced(x, lo, hi), state, case.spec, x.features)
            outputs.append(out)
        assert_close(torch.cat(outputs, 1), y, EXACT, f"y of calls that end at {cuts}")
        assert_same_state(state, final, EXACT)


@every_kind
@pytest.mark.parametrize("length", [1, 7, 63, 65, 200])
def test_awkward_lengths_split_anywhere_with_gradients(case, length):
    x = inputs(case, length=length, grad=True)
    y, final = call(scan, x, case)
    grads = gradients(y, final, x.leaves())
    at = length // 3
    if at:
        first, state = scan(*sliced(x, 0, at), x.state(case.spec), case.spec, x.features)
        second, state = scan(*sliced(x, at, length), state, case.spec, x.features)
        pieces = torch.cat([first, second], 1)
        assert_close(pieces, y, EXACT, "y")
        for (name, _), a, b in zip(x.leaves().items(), gradients(pieces, state, x.leaves()), grads):
            assert_close(a, b, EXACT, f"gradient of {name}")


@every_case
def test_a_later_token_changes_nothing_before_it_at_all(case):
    x, z = inputs(case, length=30), inputs(case, length=30, seed=1)
    y, _ = call(scan, x, case)
    for t in (0, 1, 8, 16, 29):
        q, k, v = (torch.cat([a[:, :t], b[:, t:]], 1) for a, b in ((x.q, z.q), (x.k, z.k), (x.v, z.v)))
        mixed = {n: getattr(z.gates, n) for n in TIMED}
        mixed = {
            n: None if b is None else torch.cat([getattr(x.gates, n)[:, :t], b[:, t:]], 1) for n, b in mixed.items()
        }
        changed, _ = scan(q, k, v, Gates(**mixed, decay=x.gates.decay), x.state(case.spec), case.spec, x.features)
        assert (changed[:, :t] - y[:, :t]).abs().max() == 0.0 if t else True
        assert (changed[:, t:] - y[:, t:]).abs().max() > 0


@every_kind
def test_rows_and_heads_are_independent(case):
    x = inputs(case, batch=3, grad=True)
    y, state = call(scan, x, case)
    for row in range(3):
        alone, alone_state = scan(
            *(t[row : row + 1] for t in (x.q, x.k, x.v)),
            x.gates.map(lambda g, row=row: g[row : row + 1]),
            case.spec.initial_state(x.W0, batch=1),
            case.spec,
            x.features,
        )
        assert_close(alone, y[row : row + 1], EXACT, "y")
        assert_same_state(alone_state, state.select([row]), EXACT)
    sensitivity = torch.autograd.grad(y[1, :, 1].sum(), x.k)[0]
    assert sensitivity[1, :, 1].abs().max() > 0
    sensitivity[1, :, 1] = 0
    assert sensitivity.abs().max() == 0.0


def random_mask(batch: int, length: int) -> torch.Tensor:
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0] = False
    mask[0, :5] = True
    return mask


def rows_alone(parts: tuple, state: MemoryState, case: Case, features, mask: torch.Tensor) -> tuple:
    """Outputs and state of each row scanned by itself, without the tokens that its mask leaves out."""
    y, finals = parts[2].new_zeros(*parts[2].shape[:-1], case.spec.value_dim), []
    for row, kept in enumerate(mask):
        q, k, v = (x[row : row + 1, kept] for x in parts[:3])
        gates = parts[3].map(lambda g, row=row, kept=kept: g[row : row + 1, kept])
        out, final = scan(q, k, v, gates, state.select([row]), case.spec, features)
        y = y.index_put((torch.tensor(row), kept.nonzero().squeeze(1)), out[0])
        finals.append(final)
    return y, MemoryState.stack(finals)


@every_case
def test_masked_tokens_are_skipped_as_if_they_were_not_there(case):
    x = inputs(case, batch=3, length=29, grad=True)
    before = x.state(case.spec)
    _, before = scan(*sliced(x, 0, 6), before, case.spec, x.features)  # start in the middle of chunks
    mask = random_mask(3, 23)
    rest = sliced(x, 6, 29)
    y, state = scan(*rest, before, case.spec, x.features, mask=mask)
    ry, rstate = rows_alone(rest, before, case, x.features, mask)
    assert y[~mask].abs().max() == 0.0
    assert_close(y, ry, EXACT, "y")
    assert_same_state(state, rstate, EXACT)
    for (name, _), a, b in zip(x.leaves().items(), gradients(y, state, x.leaves()), gradients(ry, rstate, x.leaves())):
        assert_close(a, b, EXACT, f"gradient of {name}")
    # rows now stand at different positions: resume in one scan and token by token
    more = inputs(case, batch=3, length=9, seed=5)
    y, final = scan(more.q, more.k, more.v, more.gates, state, case.spec, x.features)
    ry, rfinal = rows_alone(sliced(more, 0, 9), rstate, case, x.features, torch.ones(3, 9, dtype=torch.bool))
    assert_close(y, ry, EXACT, "y after")
    assert_same_state(final, rfinal, EXACT)
    outputs = []
    for t in range(9):
        out, state = step(*sliced(more, t, t + 1), state, case.spec, x.features)
        outputs.append(out)
    assert_close(torch.cat(outputs, 1), y, EXACT, "y by steps")
    assert_same_state(state, final, EXACT)


@every_kind
def test_the_reference_skips_masked_tokens_as_the_scan_does(case):
    x = inputs(case, batch=3, length=29, grad=True)
    _, before = scan(*sliced(x, 0, 6), x.state(case.spec), case.spec, x.features)
    mask, rest = random_mask(3, 23), sliced(x, 6, 29)
    y, state = scan(*rest, before, case.spec, x.features, mask=mask)
    ry, rstate = reference_scan(*rest, before, case.spec, x.features, mask=mask)
    assert_close(y, ry, EXACT, "y")
    assert_same_state(state, rstate, EXACT)
    for (name, _), a, b in zip(x.leaves().items(), gradients(y, state, x.leaves()), gradients(ry, rstate, x.leaves())):
        assert_close(a, b, EXACT, f"gradient of {name}")
    more = inputs(case, batch=3, length=9, seed=5)
    y, final = scan(more.q, more.k, more.v, more.gates, state, case.spec, x.features)
    ry, rfinal = reference_scan(more.q, more.k, more.v, more.gates, rstate, case.spec, x.features)
    assert_close(y, ry, EXACT, "y after")
    assert_same_state(final, rfinal, EXACT)


@every_kind
def test_what_a_masked_token_holds_does_not_matter(case):
    x = inputs(case, batch=2, length=12)
    mask = random_mask(2, 12)
    y, state = call(scan, x, case, mask=mask)
    for tensor in (x.q, x.k, x.v):
        tensor[~mask] = float("nan")
    z, other = call(scan, x, case, mask=mask)
    assert torch.equal(y, z)
    assert_same_state(other, state, 0.0)


@every_case
def test_packed_documents_are_the_documents_alone(case):
    lengths = [9, 1, 14, 0, 5]
    bounds = [0, 9, 10, 24, 24, 29]
    x = inputs(case, batch=1, length=29, grad=True)
    state = case.spec.initial_state(x.W0, batch=len(lengths))
    y, packed = call(scan, x, case, state=state, cu_seqlens=torch.tensor(bounds))
    outputs, states = [], []
    for lo, hi in zip(bounds, bounds[1:]):
        one = case.spec.initial_state(x.W0, batch=1)
        if hi > lo:
            out, one = scan(*sliced(x, lo, hi), one, case.spec, x.features)
            outputs.append(out)
        states.append(one)
    alone, stacked = torch.cat(outputs, 1), MemoryState.stack(states)
    assert_close(y, alone, EXACT, "y")
    assert_same_state(packed, stacked, EXACT)
    grads = gradients(alone, stacked, x.leaves())
    for (name, _), a, b in zip(x.leaves().items(), gradients(y, packed, x.leaves()), grads):
        assert_close(a, b, EXACT, f"gradient of {name}")


@every_case
def test_writing_without_reading_leaves_the_same_state(case):
    x = inputs(case, grad=True)
    _, expected_state = call(scan, x, case)
    nothing, state = scan(None, x.k, x.v, x.gates, x.state(case.spec), case.spec, x.features)
    assert nothing is None
    assert_same_state(state, expected_state, EXACT)
    w = sum(s.sum() for s in state.weights)
    v = sum(s.sum() for s in expected_state.weights)
    for a, b in zip(torch.autograd.grad(w, [x.k, x.v, x.gates.lr]), torch.autograd.grad(v, [x.k, x.v, x.gates.lr])):
        assert_close(a, b, EXACT, "gradient of a write")


@every_kind
def test_reading_is_the_last_token_of_a_scan_and_writes_nothing(case):
    if case.spec.read == "before":
        pytest.skip("the last token of a scan has not read its own write")
    x = inputs(case, length=21)
    y, state = call(scan, x, case)
    kept = state.clone()
    assert_close(read(x.q[:, -1:], state, case.spec, x.features), y[:, -1:], EXACT, "read")
    assert_same_state(state, kept, 0.0)


@every_case
def test_without_gradients_the_result_is_the_same(case):
    x = inputs(case, grad=True)
    y, state = call(scan, x, case)
    with torch.no_grad():
        z, other = call(scan, x, case)
    assert not z.requires_grad and not other.weights[0].requires_grad
    assert_close(z, y, 1e-14, "y")
    assert_same_state(other, state, 1e-14)


@every_kind
def test_without_gradients_the_reference_is_the_same(case):
    x = inputs(case, grad=True)
    y, state = call(scan, x, case)
    with torch.no_grad():
        z, other = call(reference_scan, x, case)
    assert not z.requires_grad and not other.weights[0].requires_grad
    assert_close(z, y, EXACT, "reference")
    assert other.position.tolist() == state.position.tolist()


@every_kind
def test_the_input_state_is_left_as_it_was(case):
    x = inputs(case)
    _, state = call(scan, x, case)
    kept = state.clone()
    call(scan, x, case, state=state)
    step(*sliced(x, 0, 1), state, case.spec, x.features)
    assert_same_state(state, kept, 0.0)


@every_kind
def test_gradients_through_steps_are_those_of_one_scan(case):
    x = inputs(case, length=11, grad=True)
    y, final = call(scan, x, case)
    state, outputs = x.state(case.spec), []
    for t in range(11):
        out, state = step(*sliced(x, t, t + 1), state, case.spec, x.features)
        outputs.append(out)
    found = gradients(torch.cat(outputs, 1), state, x.leaves())
    for (name, _), a, b in zip(x.leaves().items(), found, gradients(y, final, x.leaves())):
        assert_close(a, b, EXACT, f"gradient of {name}")


@every_kind
@pytest.mark.parametrize("made_inside", [False, True], ids=["outside", "inside"])
def test_inference_mode_gives_what_no_grad_gives(case, made_inside):
    def run():
        x = inputs(case, length=13) if made_inside else made
        y, state = scan(*sliced(x, 0, 9), x.state(case.spec), case.spec, x.features)
        outputs = [y]
        mask = torch.tensor([[True], [False]])
        for t in range(9, 12):
            y, state = step(*sliced(x, t, t + 1), state, case.spec, x.features, mask=mask if t == 10 else None)
            outputs.append(y)
        y, state = scan(*sliced(x, 10, 13), state, case.spec, x.features)  # rows stand at different positions
        reference, _ = call(reference_scan, x, case)
        return [*outputs, y, read(x.q, state, case.spec, x.features), reference], state

    made = inputs(case, length=13)
    with torch.no_grad():
        expected_outputs, expected_state = run()
    with torch.inference_mode():
        outputs, state = run()
    for a, b in zip(outputs, expected_outputs):
        assert torch.equal(a, b)
    assert_same_state(state, expected_state, 0.0)
    assert state.chunk_offset == expected_state.chunk_offset


@every_kind
@pytest.mark.parametrize("wanted", ["q", "k", "v", "W0.0"])
def test_results_need_gradients_only_where_an_input_does(case, wanted):
    for function, length in ((scan, 6), (step, 1), (reference_scan, 6)):
        x = inputs(case, length=length)
        y, state = call(function, x, case)
        assert not y.requires_grad and not any(t.requires_grad for t in tensors(state).values())
        leaf = x.leaves()[wanted].requires_grad_()
        y, state = call(function, x, case)
        assert any(t.requires_grad for t in (y, *tensors(state).values()))
        assert gradients(y, state, {wanted: leaf})[0].abs().max() > 0
