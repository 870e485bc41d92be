"""What the tests of a memory's state share: the kinds of memory, and states after some tokens."""

from __future__ import annotations

import pytest
import torch
from cases import Case, inputs

from mnemos.memory import MemorySpec, MemoryState, scan

KINDS = [
    Case(MemorySpec(4, 4, expansion=2, window=3, chunk_size=8)),
    Case(MemorySpec(4, 3, structure="linear", chunk_size=4, window=2)),
    Case(MemorySpec(4, 3, structure="linear", anchor="token", window=3, chunk_size=8)),
    Case(MemorySpec(4, 4, structure="gated_mlp", expansion=2, chunk_size=8, read="before")),
    Case(MemorySpec(4, 4, expansion=2, rule="muon", window=3, chunk_size=8, commit_every=4)),
    Case(MemorySpec(4, 4, expansion=2, features="monomials", momentum=False, chunk_size=8), ("retain",)),
    Case(MemorySpec(4, 4, expansion=2, retention="start", window=3, chunk_size=8)),
    Case(MemorySpec(4, 3, structure="linear", retention="start", anchor="token", chunk_size=4)),
    Case(MemorySpec(4, 4, structure="test_composed", window=5, chunk_size=4)),
]
every_kind = pytest.mark.parametrize("case", KINDS, ids=str)
SPEC = MemorySpec(4, 4, expansion=2, window=3, chunk_size=8)


def sliced(x, lo: int, hi: int) -> tuple:
    return x.q[:, lo:hi], x.k[:, lo:hi], x.v[:, lo:hi], x.gates.map(lambda g: g[:, lo:hi])


def after(case: Case, length: int, batch: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0) -> MemoryState:
    """A state that has read `length` random tokens, without a graph."""
    case = Case(case.spec, case.gates, dtype)
    x = inputs(case, batch=batch, length=max(1, length), seed=seed)
    with torch.no_grad():
        state = x.state(case.spec)
        return scan(x.q, x.k, x.v, x.gates, state, case.spec, x.features)[1] if length else state


def go_on(case: Case, state: MemoryState, length: int = 13, seed: int = 9):
    x = inputs(case, batch=state.batch, length=length, seed=seed)
    return scan(x.q, x.k, x.v, x.gates, state, case.spec, x.features)


def assert_identical(a: MemoryState, b: MemoryState) -> None:
    assert a.spec == b.spec and a.chunk_offset == b.chunk_offset
    x, y = a.tensors(), b.tensors()
    assert x.keys() == y.keys()
    for name in x:
        assert x[name].dtype == y[name].dtype, name
        assert torch.equal(x[name], y[name]), name
