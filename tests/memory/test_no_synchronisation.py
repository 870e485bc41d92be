"""The torch backend never waits for a number: a scan of uniform rows, forward and backward, reads no tensor's value on the host.

The checks of values in `mnemos.memory.scan` do, in eager mode; these tests call the backend below them.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case, inputs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mnemos.backends import torch as backend
from mnemos.memory import MemorySpec

SMALL = dict(key_dim=4, value_dim=4, chunk_size=8)
FAMILIES = {
    "linear rule, mlp": Case(MemorySpec(**SMALL, expansion=2, window=3)),
    "linear rule, several chunks in a tile": Case(MemorySpec(**SMALL, structure="linear")),
    "linear rule, a network without a chain": Case(MemorySpec(**SMALL, structure="test_composed")),
    "linear rule, monomials": Case(MemorySpec(**SMALL, features="monomials", expansion=2)),
    "solved": Case(MemorySpec(**SMALL, structure="linear", anchor="token", decay_first=True), ("retain",)),
    "committed, muon": Case(MemorySpec(**SMALL, rule="muon", structure="gated_mlp", expansion=2, commit_every=4)),
    "committed, nesterov": Case(MemorySpec(**SMALL, rule="muon", expansion=2, nesterov=True)),
    "linear rule, towards the start": Case(MemorySpec(**SMALL, expansion=2, retention="start")),
    "solved, towards the start": Case(
        MemorySpec(**SMALL, structure="linear", anchor="token", decay_first=True, retention="start"), ("retain",)
    ),
    "committed, towards the start": Case(MemorySpec(**SMALL, rule="muon", expansion=2, retention="start")),
    "growing, towards the start": Case(MemorySpec(**SMALL, features="exp", expansion=2, retention="start")),
    "growing, exp": Case(MemorySpec(**SMALL, features="exp", expansion=2)),
    "growing, normalised": Case(
        MemorySpec(**SMALL, features="exp", structure="linear", objective="dot", normalize=True)
    ),
}
each_family = pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)

aten = torch.ops.aten
READS = {  # operators whose result, or its size, has to be known to the host
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.equal,
    aten.allclose,
    aten.nonzero,
    aten.nonzero_numpy,
    aten.masked_select,
    aten.unique_dim,
    aten._unique2,
    aten.repeat_interleave,
    aten._to_cpu,
}


class NoReads(TorchDispatchMode):
    """An error at every operator that reads a value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        boolean = func.overloadpacket in (aten.index, aten._index_put_impl_, aten.index_put, aten.index_put_)
        if boolean:
            boolean = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if boolean or func.overloadpacket in READS:
            raise AssertionError(f"{func} reads a value on the host")
        return func(*args, **kwargs or {})


def converted(x, to):
    """A tensor, or a dataclass with all tensors in it, after `to`."""
    if dataclasses.is_dataclass(x):
        parts = {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if field.init}
        return dataclasses.replace(
            x, **{name: part if name == "spec" else converted(part, to) for name, part in parts.items()}
        )
    if isinstance(x, torch.nn.Module):
        for module in x.modules():
            for registry in (module._parameters, module._buffers):
                registry.update({name: converted(p, to) for name, p in registry.items()})
        return x
    if isinstance(x, (list, tuple)):
        return [converted(part, to) for part in x]
    return to(x.detach()) if isinstance(x, torch.Tensor) else x


def arguments(case: Case, to=torch.clone) -> tuple:
    """Of a scan over several tiles, chunks and a rest."""
    x, heads = inputs(case, length=19), 3
    state = x.state(case.spec) if x.W0 else case.spec.initial_state([], 2, heads, torch.float64, x.k.device)
    return *(converted(part, to) for part in (x.q, x.k, x.v, x.gates, state)), case.spec, converted(x.features, to)


def run(q, k, v, gates, state, spec, features) -> list[torch.Tensor]:
    """y, the final weights and the gradients of q, k, v and lr."""
    leaves = [x.requires_grad_() for x in (q, k, v, gates.lr)]
    y, state = backend.scan(q, k, v, gates, state, spec, features, None, None)
    total = y.square().sum() + sum(w.square().sum() for w in state.weights)
    return [y, *state.weights, *torch.autograd.grad(total, leaves)]


@each_family
def test_a_scan_reads_no_value_of_a_tensor(case):
    given = arguments(case)
    with NoReads():
        found = run(*given)
    assert all(torch.equal(a, b) for a, b in zip(found, run(*given)))


@each_family
def test_a_scan_runs_on_tensors_without_values(case):
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # constants of feature maps
    given = arguments(case, mode.from_tensor)
    with mode:
        found = run(*given)
    assert all(isinstance(x, FakeTensor) for x in found)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in run(*arguments(case))]


@each_family
def test_a_scan_runs_on_the_meta_device(case):
    found = run(*arguments(case, lambda x: x.to("meta")))
    assert all(x.is_meta for x in found)
    assert [x.shape for x in found] == [x.shape for x in run(*arguments(case))]


def test_the_mode_of_these_tests_finds_reads():
    x = torch.ones(2)
    for read in (lambda: x.sum().item(), lambda: bool(x[0]), x.nonzero, lambda: x[x > 0], lambda: torch.equal(x, x)):
        with NoReads(), pytest.raises(AssertionError, match="on the host"):
            read()
