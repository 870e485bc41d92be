"""Features "exp": the state of a memory that is a list, its file, its copies, its rows."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Inputs, inputs
from lists import (
    HEADS,
    KINDS,
    after,
    assert_same_state,
    call,
    every_kind,
    x_rest,
)

from helpers import assert_close
from mnemos.memory import MemorySpec, MemoryState, scan

# The state ----------------------------------------------------------------------------------------------------------


def go_on(case: Case, state: MemoryState, length: int = 7):
    return call(scan, inputs(case, batch=state.batch, length=length, seed=9), case, state)


def test_the_state_grows_and_says_so():
    case = KINDS[4]
    sizes = [after(case, n).nbytes for n in (0, 10, 20)]
    assert sizes[0] < sizes[1] and sizes[1] - sizes[0] == sizes[2] - sizes[1]
    state = after(case, 10)
    assert state.is_kv_cache and case.spec.is_kv_cache and state.pairs.length == 10
    assert state.batch == 2 and state.heads == HEADS
    assert state.pairs.key.shape == (2, 10, HEADS, 4) and state.pairs.weight.shape == (2, 10, HEADS, 8)
    finite = MemorySpec(4, 4, structure="linear")
    assert not finite.is_kv_cache and not finite.initial_state([torch.zeros(1, 4, 4)], 1).is_kv_cache


@every_kind
@pytest.mark.parametrize("length", [0, 1, 8, 11])
def test_save_load_continue_is_identical_to_the_last_bit(case, length, tmp_path):
    state = after(case, length)
    state.save(tmp_path / "a")
    loaded = MemoryState.load(tmp_path / "a", case.spec)
    assert_same_state(loaded, state, 0.0)
    (y, final), (z, other) = go_on(case, state), go_on(case, loaded)
    assert torch.equal(y, z) and loaded.chunk_offset == state.chunk_offset
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
    assert not any(t.requires_grad for t in cut.tensors().values())
    kept, fork = cut.clone(), cut.clone()
    for t in fork.tensors().values():
        t.add_(1)
    assert_same_state(cut, kept, 0.0)
    narrow = cut.to(torch.float32)
    assert {t.dtype for t in narrow.tensors().values()} == {torch.float32, torch.int64}
    assert {t.device.type for t in cut.to("meta").tensors().values()} == {"meta"}
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
