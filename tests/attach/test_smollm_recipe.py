"""The memory in training of examples/smollm_facts is the memory that the adapter has."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import attached, tokens

from mnemos.memory import Gates, NeuralMemory, read, scan

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm_facts"
pytestmark = pytest.mark.skipif(not EXAMPLE.is_dir(), reason="the examples are not here")


@pytest.fixture
def example(monkeypatch):
    """Imports a module of the example."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(EXAMPLE) in sys.modules[name].__file__:
            del sys.modules[name]


@pytest.fixture
def keeper(example):
    """A keeper of one small memory, without the base."""
    found = object.__new__(example("keeper").Keeper)
    torch.manual_seed(0)
    fields = {"structure": "linear", "anchor": "token", "momentum": False, "retain": False, "learn_w0": False}
    fields |= {"features": "monomials", "degree": 2, "gating": "sparse", "gate": "token", "conv_width": 4}
    found.memory = NeuralMemory(32, heads=2, key_dim=6, value_dim=8, max_lr=1.0, **fields)
    return found


@torch.no_grad()
def test_shares_of_written_values_give_what_the_memory_reads(keeper):
    """The delta rule over all tokens, of which only some are written, equals the system of equations over those that are."""
    memory = keeper.memory
    memory.features.log_coefficients_offset[:, 0] = -2.0
    q, k = (torch.nn.functional.normalize(torch.randn(1, n, 2, 6), dim=-1) for n in (5, 40))
    v, strength = torch.randn(1, 40, 2, 8), torch.rand(1, 40, 2)
    strength[:, torch.rand(40) < 0.6] = 0.0
    state = memory.initial_state(1)
    gates = Gates(lr=torch.ones(1, 40, 2), gate=strength)
    _, state = scan(None, k, v, gates, state, memory.spec, memory.features)
    expected = read(q, state, memory.spec, memory.features)[0]
    kept = (strength[0] > 0).any(-1)
    shares = keeper.shares(q[0], k[0, kept], strength[0, kept])  # H P N
    found = torch.einsum("hpn,nhv->phv", shares, v[0, kept])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_values_are_those_of_the_layer_where_its_convolution_sees_one_token(keeper):
    memory = keeper.memory
    q, k, v = memory.splits
    memory.conv.weight[:-1, q + k : q + k + v] = 0.0
    x = torch.randn(1, 9, 32)
    _, _, expected, _ = memory.project(x, memory.initial_state(1), None, None)
    torch.testing.assert_close(keeper.values(x[0]), expected[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("labels", [0.0, 0.3])
def test_distillation_has_the_gradient_of_its_cross_entropy(example, labels):
    torch.manual_seed(0)
    head, teacher, ids = torch.nn.Linear(8, 30), torch.randn(40, 8), torch.randint(30, (40,))
    states = torch.randn(40, 8).requires_grad_()
    found = example("wording").distil(
        head, states * 2, teacher, ids, labels, 3.0
    )  # 39 tokens are one chunk: it is drawn
    copy = states.detach().clone().requires_grad_()
    student, target = head(copy * 2)[:-1], head(teacher)[:-1].softmax(-1).detach()
    cross_entropy = torch.nn.functional.cross_entropy
    expected = (1 - labels) * cross_entropy(student, target) + labels * cross_entropy(student, ids[1:])
    (3 * expected).backward()
    assert found == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(states.grad, copy.grad, atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_the_late_layers_in_training_are_those_of_the_model_with_its_window(example):
    model, ids = attached(window=6, sinks=2), tokens(1, 30)
    states, full = example("teacher").streams(model, ids, 1)
    with model.memory.knock_out("reads"):
        expected = model(ids).logits
    found = model.base.lm_head(example("wording").last_states(model, 1, states[0]))
    torch.testing.assert_close(found, expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model.base.lm_head(full), model.base(ids).logits, atol=1e-5, rtol=1e-4)
