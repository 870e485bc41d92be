"""Scan against the reference at sizes of real use, where other code paths of torch and of the engine run than at toy sizes;
and with many tiles in a piece."""

from __future__ import annotations

import functools

import pytest
import torch

from helpers import assert_close, every_backend
from mnemos.backends.cpu import engine as cpu_engine
from mnemos.backends.torch import chunking as tiles
from mnemos.backends.torch import engine as torch_engine
from mnemos.memory import Gates, MemorySpec, reference_scan, scan


def inputs(spec: MemorySpec, batch: int, length: int, heads: int, dtype: torch.dtype):
    """Leaves with the same numbers, which float32 has, in every dtype."""
    torch.manual_seed(0)
    unit = torch.nn.functional.normalize
    q, k = (unit(torch.randn(batch, length, heads, spec.key_dim), dim=-1) for _ in range(2))
    v = torch.randn(batch, length, heads, spec.value_dim)
    rows = (low + (high - low) * torch.rand(batch, length, heads) for low, high in ((0, 0.05), (0, 0.9), (0.9, 1)))
    W0 = [torch.randn(heads, *shape) * shape[0] ** -0.5 for shape in spec.shapes]
    return [x.to(dtype).requires_grad_() for x in (q, k, v, *rows, *W0)]


def run(function, spec: MemorySpec, leaves: list, batch: int):
    q, k, v, lr, momentum, retain, *W0 = leaves
    gates = Gates(lr, momentum if spec.momentum else None, retain)
    y, state = function(q, k, v, gates, spec.initial_state(W0, batch=batch), spec)
    ends = [*state.weights, *state.momentum]
    loss = y.square().sum() + sum(((i + 1) * x).square().mean() for i, x in enumerate(ends))
    return [x.detach() for x in (y, *ends)], torch.autograd.grad(loss, leaves, allow_unused=True)


@functools.lru_cache(maxsize=2)  # the tests of one spec follow each other
def expected(spec: MemorySpec, batch: int, length: int, heads: int):
    """Outputs and gradients by the reference in float64."""
    return run(reference_scan, spec, inputs(spec, batch, length, heads, torch.float64), batch)


def compare(spec: MemorySpec, batch: int, length: int, heads: int, dtype: torch.dtype, bound: float, backend) -> None:
    """The scan in `dtype` against the reference in float64: the errors are those of the scan alone."""
    leaves = inputs(spec, batch, length, heads, dtype)
    found, grads = run(functools.partial(scan, backend=backend), spec, leaves, batch)
    right, right_grads = expected(spec, batch, length, heads)
    for x, y in zip(found, right, strict=True):
        assert_close(x, y.to(dtype), bound)
    for x, y in zip(grads, right_grads, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert_close(x, y.to(dtype), bound)


REAL = [
    dict(chunk_size=64),
    dict(chunk_size=16),
    dict(chunk_size=128, momentum=False),
    dict(chunk_size=64, window=4),
    dict(structure="gated_mlp", chunk_size=16),
    dict(depth=3, expansion=2, chunk_size=64),
    dict(rule="muon", chunk_size=32),
    dict(retention="start", chunk_size=64),
    dict(retention="start", structure="gated_mlp", chunk_size=16, window=4),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@every_backend
@pytest.mark.parametrize("choices", REAL, ids=str)
def test_heads_of_64(choices, dtype, backend):
    spec = MemorySpec(key_dim=64, value_dim=64, **choices)
    bounds = (1e-8, 5e-4) if spec.rule == "muon" else (1e-10, 2e-5)
    compare(spec, 2, 150, 2, dtype, bounds[dtype == torch.float32], backend)


@every_backend
def test_matrices_too_large_for_a_batch(backend):
    spec = MemorySpec(key_dim=256, value_dim=256, chunk_size=16)
    assert spec.shapes[0][0] * spec.shapes[0][1] >= 1 << 18
    compare(spec, 2, 40, 1, torch.float64, 1e-10, backend)


MANY = [
    dict(chunk_size=8),
    dict(chunk_size=2, window=3),
    dict(chunk_size=32),
    dict(chunk_size=2, depth=1, objective="dot"),
    dict(chunk_size=4, depth=3, objective="dot", momentum=False),
    dict(chunk_size=4, structure="gated_mlp", read="before"),
]


@pytest.mark.parametrize("every", [1, 2, 4])
@every_backend
@pytest.mark.parametrize("choices", MANY, ids=str)
def test_many_tiles_and_states_made_again(choices, every, backend, monkeypatch):
    """More tiles than are prepared at once, and a last group that is not full."""
    monkeypatch.setattr(tiles, "TILE", 8)
    monkeypatch.setattr(cpu_engine, "tiles_per_state", lambda piece: every)
    monkeypatch.setattr(torch_engine, "_tiles_per_group", lambda piece: every)
    compare(MemorySpec(key_dim=4, value_dim=4, expansion=2, **choices), 2, 150, 2, torch.float64, 1e-10, backend)


@every_backend
def test_several_chunks_in_a_tile_with_one_map_and_the_dot_objective(backend):
    spec = MemorySpec(key_dim=4, value_dim=4, depth=1, objective="dot", chunk_size=8)
    compare(spec, 2, 32, 2, torch.float64, 1e-10, backend)


def test_a_single_head_gets_states_of_their_own():
    spec = MemorySpec(key_dim=4, value_dim=4)
    leaves = inputs(spec, 1, 9, 1, torch.float64)
    q, k, v, lr, momentum, retain, *W0 = leaves
    with torch.no_grad():
        _, state = scan(q, k, v, Gates(lr, momentum, retain), spec.initial_state(W0, batch=1), spec)
    for x in (*state.weights, *state.momentum):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_scan_keeps_for_its_backward_is_its_inputs_and_few_states(autocast):
    """Activations of a tile and the states between groups of tiles are recomputed."""
    spec, batch, heads = MemorySpec(key_dim=16, value_dim=16, chunk_size=4), 1, 1
    state_bytes = 2 * 4 * sum(a * b for a, b in spec.shapes)
    kept = []
    for length in (256, 1024):
        found: dict[int, int] = {}

        def keep(x, found=found):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        q, k, v, lr, momentum, retain, *W0 = inputs(spec, batch, length, heads, torch.float32)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        ):
            gates = Gates(lr, momentum, retain)
            y, _ = scan(q, k, v, gates, spec.initial_state(W0, batch=batch), spec, backend="torch")
        kept.append(sum(found.values()))
        y.sum().backward()
    groups = [(length // 4) ** 0.5 for length in (256, 1024)]
    assert kept[1] - kept[0] < 1.5 * state_bytes * (groups[1] - groups[0]) + 768 * 4 * 200, kept
