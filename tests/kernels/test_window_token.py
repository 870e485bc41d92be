"""One token of memories with windows, gates, monomials and Muon by the compiled kernel: the numbers of the torch path and of the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from decoding import tensors

from helpers import assert_close, needs_kernel
from mnemos.backends.cpu import token
from mnemos.memory import Gates, MemorySpec, MemoryState, NeuralMemory, reference_scan, step
from mnemos.memory.features import make_features

pytestmark = needs_kernel

MUON = {"rule": "muon", "commit_every": 1, "momentum": False}
LIFTED = {"features": "monomials", "key_dim": 4}
LAYERS = {
    "atlas": MUON | LIFTED | {"window": 4, "gate": "token", "retention": "start"},
    "atlas, window 1": MUON | LIFTED | {"window": 1, "gate": "token", "retention": "start"},
    "atlas, window 8": MUON | LIFTED | {"window": 8, "gate": "token*decay", "retention": "start"},
    "atlas++": MUON | LIFTED | {"window": 3, "gate": "token", "retention": "start", "structure": "gated_mlp"},
    "towards 0, degree 3": MUON | LIFTED | {"window": 4, "gate": "token*decay*per-lag", "degree": 3},
    "nuclear": MUON | {"window": 3, "muon_scale": "nuclear", "lr_position": "inside", "residual": True},
    "matrix, read before": MUON | {"window": 6, "structure": "linear", "read": "before", "gate": "decay"},
    "no decay": MUON | {"window": 3, "retain": False, "w0_branch": False, "objective": "dot"},
    "omeganet": LIFTED | {"window": 4, "gate": "token", "momentum": False, "retention": "start"},
    "momentum": LIFTED | {"window": 4, "gate": "token*decay"},
    "gated": {"window": 3, "gate": "per-lag", "structure": "gated_mlp", "retain": "fixed"},
    "longer than the sequence": {"window": 30, "residual": True},
}
TYPES = [(torch.float64, 1e-10), (torch.float32, 5e-4)]


def make_layer(dtype: torch.dtype = torch.float64, **choices) -> NeuralMemory:
    torch.manual_seed(0)
    layer = NeuralMemory(dim=24, heads=3, chunk_size=5, **choices).to(dtype)
    for p in layer.parameters():
        p.data += 0.1 * torch.randn(p.shape, dtype=torch.float64).to(dtype)
    return layer


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Names of the kernels that were called."""
    found, run = [], token._run
    monkeypatch.setattr(token, "_run", lambda name, *rest: (found.append(name), run(name, *rest))[1])
    return found


@torch.no_grad()
@pytest.mark.parametrize("dtype, tolerance", TYPES)
@pytest.mark.parametrize("batch, inplace", [(1, True), (3, False), (3, True)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_decodes_what_it_computes_at_once(name, batch, inplace, dtype, tolerance, calls):
    layer, plain = (make_layer(dtype, **LAYERS[name], backend=backend) for backend in ("auto", "torch"))
    x = torch.randn(batch, 17, 24, dtype=dtype)
    right, right_state = plain(x)
    found, state = [], None
    for t in range(x.shape[1]):
        if state is not None:
            state.inplace = inplace
        before = None if inplace or state is None else [x.clone() for x in tensors(state)]
        y, new = layer(x[:, t : t + 1], state)
        assert before is None or all(torch.equal(a, b) for a, b in zip(before, tensors(state)))
        found, state = [*found, y], new
    assert calls.count("layer") == 17
    assert_close(torch.cat(found, 1), right, tolerance)
    for a, b in zip([*tensors(state), state.position], [*tensors(right_state), right_state.position]):
        assert_close(a, b, tolerance)


@torch.no_grad()
@pytest.mark.parametrize("name", ["atlas", "atlas++", "omeganet"])
def test_rows_at_different_positions_decode_in_place_as_they_do_alone(name):
    layer = make_layer(**LAYERS[name])
    x = torch.randn(4, 20, 24, dtype=torch.float64)
    alone = [layer(x[i : i + 1, : 1 + 3 * i])[1] for i in range(4)]  # the first knows less than a window
    together = MemoryState.stack(alone)
    for t in range(10, 20):
        together.inplace = True
        y, together = layer(x[:, t : t + 1], together)
        for i in range(4):
            right, alone[i] = layer(x[i : i + 1, t : t + 1], alone[i])
            assert_close(y[i : i + 1], right, 1e-10)
    for a, b in zip(tensors(together), tensors(MemoryState.stack(alone))):
        assert_close(a, b, 1e-10)


@torch.no_grad()
def test_a_fork_stays_as_it_was_when_its_origin_goes_on_in_place():
    layer = make_layer(**LAYERS["atlas"])
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    _, state = layer(x[:, :4])
    for t in range(4, 9):
        state.inplace = True
        _, state = layer(x[:, t : t + 1], state)
    fork = state.clone()
    before = [x.clone() for x in tensors(fork)]
    for t in range(9, 12):
        state.inplace = True
        _, state = layer(x[:, t : t + 1], state)
    assert all(torch.equal(a, b) for a, b in zip(tensors(fork), before))


@torch.no_grad()
@pytest.mark.parametrize("dtype, tolerance", TYPES)
@pytest.mark.parametrize("structure", ["linear", "mlp", "gated_mlp"])
@pytest.mark.parametrize("window", [1, 3, 4])
def test_steps_with_masked_rows_are_those_of_the_reference(structure, window, dtype, tolerance, calls):
    torch.manual_seed(0)
    spec = MemorySpec(
        key_dim=3,
        value_dim=5,
        structure=structure,
        window=window,
        chunk_size=4,
        retention="start",
        features="monomials",
        **MUON,
    )
    B, H, T = 3, 2, 11
    features = make_features(spec, H).to(dtype)
    q, k = torch.randn(2, B, T, H, 3, dtype=dtype)
    v, mask = torch.randn(B, T, H, 5, dtype=dtype), torch.rand(B, T) < 0.7
    gates = Gates(*(torch.rand(B, T, H, dtype=dtype) for _ in range(4)), decay=torch.rand(H, dtype=dtype))
    gates.momentum = None
    W0 = [torch.randn(H, *shape, dtype=dtype) * 0.3 for shape in spec.shapes]
    right, right_state = reference_scan(q, k, v, gates, spec.initial_state(W0, B), spec, features, mask)
    found, state = [], spec.initial_state(W0, B)
    for t in range(T):
        one = slice(t, t + 1)
        now = gates.map(lambda x, one=one: x[:, one])
        y, state = step(q[:, one], k[:, one], v[:, one], now, state, spec, features, mask[:, one], backend="cpu")
        found.append(y)
    assert calls.count("step") == T
    assert_close(torch.cat(found, 1), right, tolerance)
    for a, b in zip(tensors(state), tensors(right_state)):
        assert_close(a, b, tolerance)


@torch.no_grad()
def test_zero_gates_and_equal_keys_give_the_step_of_torch():
    spec = MemorySpec(key_dim=4, value_dim=4, window=4, chunk_size=8, retention="start", **MUON)
    W0 = [torch.randn(1, *shape, dtype=torch.float64) for shape in spec.shapes]
    key = torch.randn(1, 1, 1, 4, dtype=torch.float64)
    for gate in (0.0, 1.0):
        states = {backend: spec.initial_state(W0, 1) for backend in ("torch", "cpu")}
        for _ in range(6):
            numbers = [torch.full((1, 1, 1), x, dtype=torch.float64) for x in (0.1, 0.9, gate)]
            gates = Gates(numbers[0], retain=numbers[1], gate=numbers[2])
            found = {}
            for backend, state in states.items():
                found[backend], states[backend] = step(key, key, 2 * key, gates, state, spec, backend=backend)
            assert_close(found["cpu"], found["torch"], 1e-10)


@torch.no_grad()
def test_a_hook_on_the_features_is_heard_and_other_features_are_left_to_torch(calls):
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    layer = make_layer(**LAYERS["atlas"])
    layer.features.register_forward_hook(lambda module, given, out: out * 1.5)
    other = make_layer(**MUON, features="elementwise", window=3)
    for kind in (layer, other):
        right, state = kind(x)[0], None
        for t in range(6):
            y, state = kind(x[:, t : t + 1], state)
            assert_close(y, right[:, t : t + 1], 1e-10)
    assert "layer" not in calls


@torch.no_grad()
def test_the_iterations_of_a_call_are_not_those_of_the_layer():
    layer, x = make_layer(**LAYERS["atlas"]), torch.randn(1, 4, 24, dtype=torch.float64)
    _, state = layer(x)
    few, many = layer(x[:, :1], state, ns_steps=1)[0], layer(x[:, :1], state)[0]
    assert not torch.allclose(few, many)
    plain = make_layer(**LAYERS["atlas"], ns_steps=1, backend="torch")
    assert_close(few, plain(x[:, :1], dataclasses.replace(state, spec=plain.spec))[0], 1e-10)


@torch.no_grad()
@pytest.mark.parametrize("name", ["token_offset", "decay_offset", "offset"])
def test_a_gate_that_is_not_finite_is_refused_and_changes_nothing(name):
    layer = make_layer(**LAYERS["atlas, window 8"])
    _, state = layer(torch.randn(1, 7, 24, dtype=torch.float64))
    getattr(layer.gating, name).fill_(float("nan"))
    state.inplace, before = True, [x.clone() for x in tensors(state)]
    with pytest.raises(ValueError):
        layer(torch.randn(1, 1, 24, dtype=torch.float64), state)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(state)))
