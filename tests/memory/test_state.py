"""The state of a memory: its copies, its rows, its size."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import inputs
from states import KINDS, SPEC, after, assert_identical, every_kind, go_on, sliced

from helpers import assert_close
from mnemos.memory import Gates, MemoryState, reference_scan, scan, step

# Copies and rows ----------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("length", [0, 8, 11])
def test_a_clone_goes_its_own_way(case, length):
    state = after(case, length)
    fork = state.clone()
    assert_identical(fork, state)
    kept = state.clone()
    for x in fork.tensors().values():
        x.add_(1)
    assert_identical(state, kept)
    pointers = {x.untyped_storage().data_ptr() for x in fork.tensors().values() if x.numel()}
    assert not pointers & {x.untyped_storage().data_ptr() for x in state.tensors().values() if x.numel()}
    left, _ = go_on(case, state, seed=1)
    again, _ = go_on(case, kept, seed=1)
    assert torch.equal(left, again)


@every_kind
def test_selected_rows_go_on_as_they_would_have_repeated_and_reordered(case):
    state = MemoryState.stack([after(case, n, batch=1, seed=n) for n in (5, 8, 13, 16)])
    order = [2, 0, 2, 3]
    x = inputs(case, batch=4, length=11, seed=5)
    y, final = scan(x.q, x.k, x.v, x.gates, state, case.spec, x.features)
    picked = state.select(order)
    assert picked.position.tolist() == [13, 5, 13, 16]
    moved = [t[order] for t in (x.q, x.k, x.v)]
    z, other = scan(*moved, x.gates.map(lambda g: g[order]), picked, case.spec, x.features)
    assert_close(z, y[order], 1e-12, "y")
    expected = final.select(torch.tensor(order)).tensors()
    for name, tensor in other.tensors().items():
        assert_close(tensor, expected[name], 1e-12, name)


def test_rows_that_do_not_exist_are_refused():
    state = after(KINDS[0], 5)
    for rows in ([2], [-1], [0, 5], []):
        with pytest.raises(ValueError, match="rows must"):
            state.select(rows)


@every_kind
def test_stacked_states_at_different_positions_go_on_as_each_alone(case):
    alone = [after(case, n, batch=1, seed=n) for n in (0, 1, 7, 8, 19)]
    x = inputs(case, batch=5, length=14, seed=3)
    y, together = scan(x.q, x.k, x.v, x.gates, MemoryState.stack(alone), case.spec, x.features)
    assert together.position.tolist() == [14, 15, 21, 22, 33]
    for row, state in enumerate(alone):
        at = slice(row, row + 1)
        z, final = scan(x.q[at], x.k[at], x.v[at], x.gates.map(lambda g, at=at: g[at]), state, case.spec, x.features)
        assert_close(y[at], z, 1e-12, f"y of row {row}")
        for name, tensor in together.select([row]).tensors().items():
            assert_close(tensor, final.tensors()[name], 1e-12, f"{name} of row {row}")


def test_states_that_do_not_fit_are_not_stacked():
    state = after(KINDS[0], 5)
    other_heads = SPEC.initial_state([torch.zeros(2, *shape, dtype=torch.float64) for shape in SPEC.shapes], batch=1)
    with_conv = dataclasses.replace(state, conv=torch.zeros(2, 3, 8, dtype=torch.float64))
    for wrong in (after(KINDS[1], 5), other_heads, with_conv, state.to(torch.float32), state.to("meta")):
        with pytest.raises(ValueError, match=r"^stack: the states"):
            MemoryState.stack([state, wrong])
    with pytest.raises(ValueError, match="at least one"):
        MemoryState.stack([])


@every_kind
def test_detach_cuts_the_gradient_and_keeps_the_numbers(case):
    x = inputs(case, grad=True)
    _, state = scan(x.q, x.k, x.v, x.gates, x.state(case.spec), case.spec, x.features)
    assert state.weights[0].requires_grad
    cut = state.detach()
    assert not any(t.requires_grad for t in cut.tensors().values())
    assert state.weights[0].requires_grad
    assert_identical(cut, state)
    later = inputs(case, seed=2, grad=True)
    y, _ = scan(later.q, later.k, later.v, later.gates, cut, case.spec, x.features)
    assert torch.autograd.grad(y.sum(), x.k, allow_unused=True)[0] is None
    y, _ = scan(later.q, later.k, later.v, later.gates, state, case.spec, x.features)
    assert torch.autograd.grad(y.sum(), x.k)[0].abs().max() > 0


def test_a_state_widens_to_float64_and_goes_on_there():
    case = KINDS[0]
    narrow = after(case, 11, dtype=torch.float32)
    wide = narrow.to(torch.float64)
    assert {t.dtype for t in wide.tensors().values()} == {torch.float64, torch.int64}
    assert wide.chunk_offset == narrow.chunk_offset and torch.equal(wide.weights[0], narrow.weights[0].double())
    y, final = go_on(case, wide)
    assert y.dtype == torch.float64 and final.weights[0].dtype == torch.float64
    assert_identical(wide.to(torch.float32), narrow)
    for dtype in (torch.float16, torch.bfloat16, torch.int64):
        with pytest.raises(ValueError, match="float32 or float64"):
            narrow.to(dtype)


def test_a_state_moves_between_devices_with_everything_it_holds():
    state = dataclasses.replace(after(KINDS[0], 11), conv=torch.zeros(2, 3, 8))
    moved = state.to("meta")
    assert {t.device.type for t in moved.tensors().values()} == {"meta"}
    assert moved.nbytes == state.nbytes and moved.chunk_offset == state.chunk_offset
    assert {t.device.type for t in state.tensors().values()} == {"cpu"}


def test_bfloat16_weights_start_a_float32_state_and_gradients_reach_them():
    W0 = [torch.randn(3, *shape, dtype=torch.bfloat16).mul_(0.3).requires_grad_() for shape in SPEC.shapes]
    state = SPEC.initial_state(W0, batch=2)
    floats = [t for t in state.tensors().values() if t.is_floating_point()]
    assert {t.dtype for t in floats} == {torch.float32}
    assert torch.equal(state.weights[0][1], W0[0].float())
    q, k = torch.randn(2, 2, 20, 3, 4, dtype=torch.bfloat16)
    gates = Gates(lr=torch.full((2, 20, 3), 0.1, dtype=torch.bfloat16))
    y, final = scan(q, k, k, gates, state, SPEC)
    assert y.dtype == torch.bfloat16
    floats = [t for t in final.tensors().values() if t.is_floating_point()]
    assert {t.dtype for t in floats} == {torch.float32}
    y.float().sum().backward()
    assert all(w.grad is not None and w.grad.dtype == torch.bfloat16 and w.grad.abs().max() > 0 for w in W0)


def test_start_weights_of_mixed_types_start_a_state_of_the_widest():
    first, second = SPEC.shapes
    state = SPEC.initial_state([torch.zeros(3, *first), torch.zeros(3, *second, dtype=torch.float64)], batch=2)
    assert state.weights[1].dtype == torch.float64


# Size ---------------------------------------------------------------------------------------------------------------


@every_kind
def test_the_bytes_of_a_state_do_not_depend_on_how_much_it_has_read(case):
    sizes = {n: after(case, n).nbytes for n in (0, 1, 63, 64, 1000)}
    assert len(set(sizes.values())) == 1, sizes
    fresh = after(case, 0)
    assert after(case, 5, batch=4).nbytes == 2 * fresh.nbytes
    x = inputs(case, length=1)
    _, state = step(x.q, x.k, x.v, x.gates, fresh, case.spec, x.features)
    assert state.nbytes == fresh.nbytes
    assert MemoryState.stack([state, state]).nbytes == 2 * state.nbytes


@every_kind
def test_the_bytes_of_a_state_are_those_of_its_parts(case):
    spec, state = case.spec, after(case, 9)
    matrices = sum(a * b for a, b in spec.shapes) * (2 + spec.momentum + spec.retains.keeps_start)
    window = (spec.window - 1) * (spec.key_dim + spec.value_dim + 1)
    assert state.nbytes == 2 * 3 * (matrices + window) * 8 + 2 * 8


def storage_bytes(state: MemoryState) -> int:
    """Bytes that the tensors of a state keep alive."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in state.tensors().values()}
    return sum(storages.values())


@every_kind
@pytest.mark.parametrize(("batch", "heads"), [(2, 3), (1, 1)])
@pytest.mark.parametrize("grad", [False, True])
def test_a_state_after_a_long_scan_keeps_nothing_of_the_scan_alive(case, grad, batch, heads):
    length = 1003
    x = inputs(case, batch=batch, heads=heads, length=length)
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(0)) > 0.2
    with torch.set_grad_enabled(grad):
        _, state = scan(x.q, x.k, x.v, x.gates, x.state(case.spec), case.spec, x.features)
        assert storage_bytes(state) <= 2.5 * state.nbytes
        _, state = scan(x.q, x.k, x.v, x.gates, state, case.spec, x.features, mask=mask)
        assert storage_bytes(state) <= 2.5 * state.nbytes
        for t in range(9):
            _, state = step(*sliced(x, t, t + 1), state, case.spec, x.features)
        assert storage_bytes(state) <= 2.5 * state.nbytes


@every_kind
def test_a_state_made_without_gradients_holds_no_graph(case):
    x = inputs(case, length=100, grad=True)
    with torch.no_grad():
        _, state = scan(x.q, x.k, x.v, x.gates, x.state(case.spec), case.spec, x.features)
        _, state = step(*sliced(x, 0, 1), state, case.spec, x.features)
    assert all(t.grad_fn is None and not t.requires_grad for t in state.tensors().values())


@every_kind
@pytest.mark.parametrize("function", [scan, step])
def test_a_state_made_of_tensors_that_need_no_gradients_holds_no_graph(case, function):
    x = inputs(case, length=1 if function is step else 20)
    y, state = function(x.q, x.k, x.v, x.gates, x.state(case.spec), case.spec, x.features)
    assert not y.requires_grad and not any(t.requires_grad for t in state.tensors().values())


def test_the_forward_of_a_structure_without_a_chain_evaluates_every_tile_once(monkeypatch):
    case = KINDS[-1]
    forward, calls = type(case.spec.network).forward, []
    monkeypatch.setattr(type(case.spec.network), "forward", lambda *a: (calls.append(1), forward(*a))[1])
    x = inputs(case, batch=1, heads=1, length=256, grad=True)
    scan(x.q, x.k, x.v, x.gates, x.state(case.spec), case.spec)
    assert len(calls) <= 3 * 256 / case.spec.chunk_size, len(calls)  # keys and queries of each tile, and some slack


# Phase --------------------------------------------------------------------------------------------------------------


@every_kind
def test_the_phase_is_a_number_while_rows_agree_and_none_when_they_do_not(case):
    b = case.spec.chunk_size
    for n in (0, 1, b - 1, b, b + 1, 3 * b + 2):
        state = after(case, n)
        assert state.chunk_offset == n % b and isinstance(state.chunk_offset, int)
    apart = MemoryState.stack([after(case, 3, batch=1), after(case, b, batch=1), after(case, b + 3, batch=1)])
    assert apart.chunk_offset is None
    assert (
        apart.select([0, 2]).chunk_offset == 3
        and apart.select([1, 1]).chunk_offset == 0
        and apart.select([1, 2]).chunk_offset is None
    )
    assert MemoryState.stack([apart.select([0]), apart.select([2])]).chunk_offset == 3
    assert (
        apart.clone().chunk_offset is None
        and apart.to("meta").chunk_offset is None
        and apart.detach().chunk_offset is None
    )

    x = inputs(case, batch=3, length=b)
    mask = torch.zeros(3, b, dtype=torch.bool)
    mask[1, :3] = True  # brings row 1 to where the others are
    _, state = scan(x.q, x.k, x.v, x.gates, apart, case.spec, x.features, mask=mask)
    assert state.position.tolist() == [3, b + 3, b + 3] and state.chunk_offset == 3
    mask[0, 0] = True
    _, state = scan(x.q, x.k, x.v, x.gates, apart, case.spec, x.features, mask=mask)
    assert state.position.tolist() == [4, b + 3, b + 3] and state.chunk_offset is None


@every_kind
def test_the_phase_follows_masked_steps(case):
    state = after(case, 3)
    x = inputs(case, length=1)
    token = (x.q, x.k, x.v, x.gates)

    def masked(state: MemoryState, rows: list[bool]) -> MemoryState:
        return step(*token, state, case.spec, x.features, mask=torch.tensor(rows).unsqueeze(-1))[1]

    assert masked(state, [True, True]).chunk_offset == 4 % case.spec.chunk_size
    assert_identical(masked(state, [False, False]), state)
    apart = masked(state, [True, False])
    assert apart.position.tolist() == [4, 3] and apart.chunk_offset is None
    together = masked(apart, [False, True])
    assert together.position.tolist() == [4, 4]
    y, final = scan(*token, together, case.spec, x.features)
    ry, rfinal = reference_scan(*token, together, case.spec, x.features)
    assert_close(y, ry, 1e-10, "y")
    assert rfinal.chunk_offset == 5 % case.spec.chunk_size
    assert final.chunk_offset == rfinal.chunk_offset


@every_kind
def test_the_phase_is_a_number_again_when_rows_meet(case):
    b = case.spec.chunk_size
    x = inputs(case, length=b)
    state = after(case, b - 2)
    masks = ([True, False], [False, True], [True, False], [False, True])
    for t, (rows, chunk_offset) in enumerate(zip(masks, (None, b - 1, None, 0))):
        mask = torch.tensor(rows).unsqueeze(-1)
        _, state = step(*sliced(x, t, t + 1), state, case.spec, x.features, mask=mask)
        assert state.chunk_offset == chunk_offset
    assert state.position.tolist() == [b, b] and state.anchor[0] is state.weights[0]
    stale = dataclasses.replace(state, chunk_offset=None)  # as compiled code leaves it
    assert step(*sliced(x, 0, 1), stale, case.spec, x.features)[1].chunk_offset == 1 % b
    assert scan(*sliced(x, 0, b), stale, case.spec, x.features)[1].chunk_offset == 0


# Inference mode -----------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("function", [scan, step])
def test_inference_mode_gives_what_no_grad_gives(case, function):
    x = inputs(case, length=1 if function is step else 11)
    with torch.no_grad():
        y, state = function(x.q, x.k, x.v, x.gates, x.state(case.spec), case.spec, x.features)
    with torch.inference_mode():
        z, other = function(x.q, x.k, x.v, x.gates, x.state(case.spec), case.spec, x.features)
        assert torch.equal(y, z)
        assert_identical(state, other)
