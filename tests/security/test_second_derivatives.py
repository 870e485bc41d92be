"""Second derivatives are right to 1e-6, or an error names the alternative; torch.func transforms raise an error."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers import every_backend
from mnemos.memory import Gates, MemorySpec, NeuralMemory, Structure, newton_schulz, reference_scan, scan
from mnemos.memory.features import Exp
from mnemos.memory.networks import STRUCTURES
from mnemos.memory.newton_schulz import NS_COEFFICIENTS
from mnemos.models.loss import cross_entropy
from mnemos.nn.norm import RMSNorm

T, H, D = 5, 2, 3
SPECS = {
    "linear": dict(structure="linear"),
    "mlp": dict(structure="mlp", expansion=1.0),
    "mlp with a window": dict(structure="mlp", expansion=1.0, window=2),
    "gated mlp": dict(structure="gated_mlp", expansion=1.0),
    "token anchor": dict(structure="linear", anchor="token"),
    "muon, linear": dict(structure="linear", rule="muon"),
    "muon, mlp": dict(structure="mlp", expansion=1.0, rule="muon"),
    "exp": dict(structure="linear", features="exp"),
}
OWN = {"own structure": dict(structure="test_tanh"), "muon, own structure": dict(structure="test_tanh", rule="muon")}
DIFFERENTIABLE = {"token anchor", "exp", *OWN}


class Tanh(Structure):
    name = "test_tanh"

    def shapes(self):
        return [(self.dim_in, 4), (4, self.dim_out)]

    def forward(self, x, fast):
        return fast(1, fast(0, x).tanh())


@pytest.fixture(autouse=True)
def own_structure(monkeypatch):
    monkeypatch.setitem(STRUCTURES, Tanh.name, Tanh)


def problem(name: str):
    """Inputs as one dict of leaves, and a function of them whose last layer is a plain sum."""
    spec = MemorySpec(key_dim=D, value_dim=D, chunk_size=4, momentum=True, **(SPECS | OWN)[name])
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    leaves = {x: torch.nn.functional.normalize(draw(1, T, H, D), dim=-1) for x in ("q", "k", "v")}
    leaves |= {x: draw(1, T, H).sigmoid() for x in ("lr", "momentum", "retain")}
    leaves |= {f"W{i}": 0.7 * draw(H, *shape) for i, shape in enumerate(spec.shapes)}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    features = Exp(D, H).double() if spec.is_kv_cache else None

    def run(leaves, engine, **options):
        gates = Gates(**{x: leaves[x] for x in ("lr", "momentum", "retain")})
        start = [leaves[f"W{i}"] for i in range(len(spec.shapes))]
        state = spec.initial_state(start, 1) if start else spec.initial_state([], 1, H, torch.float64)
        y, state = engine(leaves["q"], leaves["k"], leaves["v"], gates, state, spec, features, **options)
        return y.sum() + sum(w.sum() for w in state.weights)

    return leaves, run


def second_derivatives(leaves, run) -> dict:
    """Gradients of <first gradients, fixed directions>, with respect to every leaf."""
    first = torch.autograd.grad(run(leaves), list(leaves.values()), create_graph=True, materialize_grads=True)
    total = sum((g * x.detach().cos()).sum() for g, x in zip(first, leaves.values()))
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found))


def finite_differences(leaves, run, step: float = 1e-5) -> dict:
    """The same: how first gradients change along the directions."""
    moved = []
    for sign in (1, -1):
        at = {n: (x + sign * step * x.cos()).detach().requires_grad_() for n, x in leaves.items()}
        moved.append(torch.autograd.grad(run(at), list(at.values()), materialize_grads=True))
    return {n: (a - b) / (2 * step) for n, a, b in zip(leaves, *moved)}


def assert_right(found, expected):
    size = max(x.abs().max().item() for x in expected.values())
    for name, x in expected.items():
        assert (found[name] - x).abs().max().item() <= 1e-6 * size, name


@pytest.mark.parametrize("name", [*SPECS, *OWN])
def test_the_reference_has_right_second_derivatives(name):
    leaves, run = problem(name)

    def reference(leaves):
        return run(leaves, reference_scan)

    assert_right(second_derivatives(leaves, reference), finite_differences(leaves, reference))


@every_backend
@pytest.mark.parametrize("name", [*SPECS, *OWN])
def test_second_derivatives_of_a_scan_are_right_or_refused(name, backend):
    leaves, run = problem(name)

    def engine(leaves):
        return run(leaves, scan, backend=backend)

    if backend == "torch" or name in DIFFERENTIABLE:
        assert_right(second_derivatives(leaves, engine), finite_differences(leaves, engine))
    else:
        with pytest.raises(NotImplementedError, match=r"no second derivatives.* use mnemos.memory.reference_scan"):
            second_derivatives(leaves, engine)


@pytest.mark.parametrize("shape", [(3, 4), (2, 9)])
def test_newton_schulz_has_right_second_derivatives(shape):
    S = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda x: newton_schulz(x, 3, NS_COEFFICIENTS["muon"]), (S,), atol=1e-6, rtol=1e-5
    )


@every_backend
@pytest.mark.parametrize("anchor", ["token", "chunk"])
def test_second_derivatives_of_a_layer_are_right_or_refused(anchor, backend):
    torch.manual_seed(0)
    mem = NeuralMemory(8, heads=2, structure="linear", anchor=anchor, chunk_size=4, backend=backend).double()
    leaves = {"x": torch.randn(1, T, 8, dtype=torch.float64, requires_grad=True)}

    def run(leaves):
        return mem(leaves["x"])[0].sin().sum()

    if backend == "torch":
        assert_right(second_derivatives(leaves, run), finite_differences(leaves, run))
    else:
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            second_derivatives(leaves, run)


def test_the_loss_of_a_model_refuses_second_derivatives():
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    total, _ = cross_entropy(hidden, weight, torch.arange(4))
    with pytest.raises(NotImplementedError, match=r"CrossEntropy has no second derivatives.*from logits"):
        torch.autograd.grad(total, hidden, create_graph=True)


@every_backend
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_still_has_its_gradients(reentrant, backend):
    torch.manual_seed(0)
    mem = NeuralMemory(8, heads=2, chunk_size=4, backend=backend).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    plain = torch.autograd.grad(mem(x)[0].sum(), x)[0]
    checkpoint(lambda x: mem(x)[0], x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(x.grad, plain, rtol=1e-12, atol=1e-14)


@every_backend
@pytest.mark.parametrize("structure", ["linear", "mlp"])
def test_transforms_of_torch_func_are_refused(structure, backend):
    mem = NeuralMemory(8, heads=2, structure=structure, chunk_size=4, backend=backend)
    parameters, x = dict(mem.named_parameters()), torch.randn(2, 1, T, 8)

    def loss(parameters, x):
        return torch.func.functional_call(mem, parameters, (x,))[0].square().mean()

    assert loss(parameters, x[0]).isfinite()
    for call in (
        lambda: torch.func.grad(loss)(parameters, x[0]),
        lambda: torch.func.vmap(loss, in_dims=(None, 0))(parameters, x),
        lambda: torch.func.vmap(lambda x: mem(x)[0])(x[:, :, :1]),
        lambda: torch.func.jvp(lambda x: mem(x)[0], (x[0],), (x[1],)),
    ):
        with pytest.raises(NotImplementedError, match=r"torch.func transforms"):
            call()


def test_norms_work_under_torch_func():
    norm, x = RMSNorm(64), torch.randn(3, 700, 64)
    found = torch.func.grad(lambda x: norm(x).sin().sum())(x)
    other = x.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(norm(other).sin().sum(), other)[0])


def test_batched_gradients_are_refused_in_a_sentence():
    layer = NeuralMemory(dim=16, heads=2, chunk_size=4)
    x = torch.randn(1, 6, 16, requires_grad=True)
    y, _ = layer(x)
    with pytest.raises(NotImplementedError, match="one gradient at a time"):
        torch.autograd.grad(y, x, torch.randn(3, *y.shape), is_grads_batched=True)
