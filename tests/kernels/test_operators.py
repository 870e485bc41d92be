"""The C++ kernels as operators of torch: schemas, fake implementations and gradients, as torch.library's own checks see them."""

from __future__ import annotations

import pytest
import torch

from helpers import needs_kernel
from mnemos.backends.cpu import engine, layer
from mnemos.backends.torch.chunking import ChunkRun
from mnemos.backends.torch.coefficients import Coefficients
from mnemos.backends.torch.engine import RunInputs
from mnemos.memory import Gates, MemorySpec, scan

pytestmark = needs_kernel
B, T, H, D = 2, 13, 2, 4


def random(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def recorded(monkeypatch, spec: MemorySpec, reads: bool = True) -> list[tuple]:
    """Arguments of the scan operator in one call of `scan`, as leaves of their own."""
    name, calls = ("windowed" if spec.windowed else "muon" if spec.rule == "muon" else "chain"), []
    real = engine.SCANS[name]
    monkeypatch.setitem(engine.SCANS, name, lambda *inputs: (calls.append(inputs), real(*inputs))[1])
    W0 = [random(H, *shape) for shape in spec.shapes]
    names = ("lr", "momentum", "retain") if spec.momentum else ("lr", "retain")
    gates = Gates(**{name: torch.rand(B, T, H, dtype=torch.float64) for name in names})
    q, k, v = random(3, B, T, H, D)
    scan(q if reads else None, k, v, gates, spec.initial_state(W0, B), spec, backend="cpu")

    def leaf(x):
        return x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) else x

    return [tuple(map(leaf, inputs)) for inputs in calls]


SCANS = {
    "chain_scan": MemorySpec(key_dim=D, value_dim=D, expansion=2, chunk_size=8, window=3),
    "muon_scan": MemorySpec(key_dim=D, value_dim=D, structure="gated_mlp", expansion=2, chunk_size=8, rule="muon"),
    "windowed_scan": MemorySpec(
        key_dim=D, value_dim=D, expansion=2, chunk_size=8, window=3, rule="muon", commit_every=1, momentum=False
    ),
}


@pytest.mark.parametrize("reads", [True, False], ids=["read", "write only"])
@pytest.mark.parametrize("name", SCANS)
def test_the_scans_are_operators_with_gradients(name, reads, monkeypatch):
    for inputs in recorded(monkeypatch, SCANS[name], reads):
        torch.library.opcheck(getattr(torch.ops.mnemos, name).default, inputs)


@pytest.mark.parametrize("keeps_start", [False, True])
def test_a_scan_that_continues_inside_a_chunk_is_an_operator_with_gradients(keeps_start, monkeypatch):
    torch.manual_seed(0)
    spec, calls = SCANS["chain_scan"], []
    real = engine.SCANS["chain"]
    monkeypatch.setitem(engine.SCANS, "chain", lambda *inputs: (calls.append(inputs), real(*inputs))[1])
    N, G, L, E = 1, B * H, 4, 6
    run = ChunkRun(0, N, 1, L, 1, fresh=False, commit=False)
    co = Coefficients(random(N, G, L + 1, E), *(random(N, G, L + 1) for _ in "bf"), random(N, G, E), random(N, G))
    W, S, A, W0 = ([random(G, *shape) for shape in spec.shapes] for _ in range(4))
    q, k, v = random(N, G, L, D), random(N, G, E, D), random(N, G, E, D)
    kernels = engine.CpuEngine()
    state, anchor, start = (kernels.open(spec, *maps) for maps in ((W, S), (A, []), (W0, [])))
    given = RunInputs(run, q, k, v, co, rate=None, retain=None)
    kernels.run(spec, given, state, anchor, start if keeps_start else None)
    (inputs,) = calls
    assert inputs[8].numel() == (G * sum(a * b for a, b in spec.shapes) if keeps_start else 0)
    assert inputs[10] is not None
    torch.library.opcheck(
        torch.ops.mnemos.chain_scan.default,
        [x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x for x in inputs],
    )


def test_decay_products_are_an_operator_with_gradients():
    torch.library.opcheck(torch.ops.mnemos.decay_products.default, (random(2, 3, 5), engine.UNDERFLOW[torch.float64]))


@pytest.mark.parametrize("width", [0, 4])
def test_project_heads_is_an_operator_with_gradients(width):
    tail, weight = (random(B, width - 1, H * 12), random(width, H * 12)) if width else (None, None)
    numbers = H, [D, D, D], [1.0, 1.0, 0.25], [1e-6, 1e-6, 1.0]
    torch.library.opcheck(torch.ops.mnemos.project_heads.default, (random(B, T, H * 12), tail, weight, *numbers))


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_rms_norm_is_an_operator_with_gradients(scale, gate):
    inputs = random(B, T, H, D), random(H, D) if scale else None, random(B, T, H, D) if gate else None, 1e-6
    torch.library.opcheck(torch.ops.mnemos.rms_norm.default, inputs)


def test_operators_and_eager_calls_have_the_same_bits(monkeypatch):
    """Strided arguments too: both make them contiguous."""
    x, least = random(5, 3, 2).transpose(0, 2), 1e-290
    y, gate = random(7, 2, 6, D).transpose(0, 2), random(6, 2, 7, D)
    mixed = random(T, B, H * 12).transpose(0, 1)
    norms = ((1.0, 1e-6), (1.0, 1e-6), (0.25, 1.0))
    results = []
    for compiling in (False, True):
        monkeypatch.setattr("torch.compiler.is_compiling", lambda compiling=compiling: compiling)
        found = [layer.decay_products(x, least), layer.gated_norm(y, None, gate, 1e-6)]
        found += layer.mix(mixed, None, None, H, (D, D, D), norms)[:3]
        grads = torch.autograd.grad([z.sin().sum() for z in found], [x, y, gate, mixed])
        results.append([*found, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results))
