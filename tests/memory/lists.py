"""What the tests of features "exp" share: the grid of memories, and the comparison of outputs, states and gradients."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Inputs, inputs

from helpers import assert_close
from mnemos.memory import MemorySpec, MemoryState, scan

EXACT = 1e-10
HEADS = 3


def exp_spec(**fields) -> MemorySpec:
    return MemorySpec(**({"key_dim": 4, "value_dim": 4, "expansion": 2, "features": "exp"} | fields))


SOFTMAX = {"structure": "linear", "objective": "dot", "normalize": True}
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


def start(x: Inputs, spec: MemorySpec, batch: int | None = None) -> MemoryState:
    batch = x.k.shape[0] if batch is None else batch
    return spec.initial_state(x.W0, batch) if x.W0 else spec.initial_state([], batch, x.k.shape[2], x.k.dtype)


def call(function, x: Inputs, case: Case, state=None, lo: int = 0, hi: int | None = None, **options):
    state = start(x, case.spec) if state is None else state
    tokens = (t[:, lo:hi] for t in (x.q, x.k, x.v))
    return function(*tokens, x.gates.map(lambda g: g[:, lo:hi]), state, case.spec, x.features, **options)


def assert_same_state(a: MemoryState, b: MemoryState, tolerance: float = EXACT) -> None:
    assert a.position.tolist() == b.position.tolist()
    assert a.tensors().keys() == b.tensors().keys()
    for (name, x), y in zip(a.tensors().items(), b.tensors().values()):
        if x.is_floating_point():
            assert_close(x, y, tolerance, f"state.{name}")


def x_rest(x: Inputs) -> tuple:
    return x.gates, x.W0, x.features


def after(case: Case, length: int, batch: int = 2, seed: int = 0) -> MemoryState:
    x = inputs(case, batch=batch, length=max(1, length), seed=seed)
    with torch.no_grad():
        return call(scan, x, case)[1] if length else start(x, case.spec)
