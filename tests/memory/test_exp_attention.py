"""Features "exp": softmax attention, what a list learns, what is refused, and the layer: DeepTransformer, SWDT, Dot."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from cases import Case, inputs
from lists import (
    EXACT,
    HEADS,
    SOFTMAX,
    assert_same_state,
    call,
    exp_spec,
    start,
)

from helpers import assert_close, randomise
from mnemos.memory import FeatureMap, Gates, MemorySpec, NeuralMemory, read, scan
from mnemos.memory.features import Exp

# Softmax attention --------------------------------------------------------------------------------------------------


def attention_inputs(length: int, dtype=torch.float64, size: float = 1.0, dim: int = 8):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, HEADS, dim, generator=g, dtype=torch.float64).to(dtype) for _ in range(3))
    return [x.requires_grad_() for x in (size * q, size * k, v)]


@pytest.mark.parametrize("length", [1, 7, 64, 65, 200])
@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_a_normalised_linear_memory_under_dot_is_softmax_attention(length, strength):
    q, k, v = attention_inputs(length)
    spec = exp_spec(**SOFTMAX, key_dim=8, value_dim=8, momentum=False)
    lr = torch.full(q.shape[:3], strength, dtype=torch.float64)
    y, _ = scan(q * 8**-0.5, k, v, Gates(lr=lr), spec.initial_state([], 2, heads=HEADS), spec)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    assert_close(y, expected, 1e-12, "y")
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((o * direction).sum(), (q, k, v)) for o in (y, expected))):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_without_the_division_it_is_the_numerator_of_attention():
    q, k, v = attention_inputs(50, size=0.5)
    spec = exp_spec(structure="linear", objective="dot", key_dim=8, value_dim=8, momentum=False)
    lr = torch.ones(q.shape[:3], dtype=torch.float64)
    y, _ = scan(q, k, v, Gates(lr=lr), spec.initial_state([], 2, heads=HEADS), spec)
    scores = torch.einsum("bthd,bshd->bhts", q, k).exp().tril()
    assert_close(y, torch.einsum("bhts,bshe->bthe", scores, v), 1e-12, "y")


def test_retention_is_a_bias_on_the_logits():
    q, k, v = attention_inputs(60)
    spec = exp_spec(**SOFTMAX, key_dim=8, value_dim=8, momentum=False)
    g = torch.Generator().manual_seed(2)
    retain = torch.rand(q.shape[:3], generator=g, dtype=torch.float64) * 0.3 + 0.7
    lr = torch.rand(q.shape[:3], generator=g, dtype=torch.float64) + 0.1
    y, _ = scan(q, k, v, Gates(lr=lr, retain=retain), spec.initial_state([], 2, heads=HEADS), spec)
    logs = retain.log().cumsum(1).transpose(1, 2)  # B H T
    bias = logs.unsqueeze(-1) - logs.unsqueeze(-2) + lr.log().transpose(1, 2).unsqueeze(-2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) + bias
    weights = scores.masked_fill(torch.ones(60, 60).triu(1).bool(), -torch.inf).softmax(-1)
    assert_close(y, torch.einsum("bhts,bshe->bthe", weights, v), 1e-11, "y")


@pytest.mark.parametrize("split", [None, 40])
def test_large_logits_stay_finite_and_right_in_float32(split):
    q, k, v = attention_inputs(100, torch.float32, size=8.5)
    scores = torch.einsum("bthd,bshd->bhts", q, k)
    assert scores.max() > 400
    spec = exp_spec(**SOFTMAX, key_dim=8, value_dim=8, momentum=False)
    state, outputs = spec.initial_state([], 2, heads=HEADS), []
    for part in (slice(None),) if split is None else (slice(split), slice(split, None)):
        y, state = scan(q[:, part], k[:, part], v[:, part], Gates(lr=torch.ones(q[:, part].shape[:3])), state, spec)
        outputs.append(y)
    y = torch.cat(outputs, 1)
    expected = F.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=1.0
    ).transpose(1, 2)
    assert_close(y, expected, 2e-5, "y")
    grads = torch.autograd.grad(y.square().sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for a, b in zip(grads, wanted):
        assert a.isfinite().all()
        assert_close(a, b, 1e-4, "gradient")
    assert read(q, state, spec).isfinite().all()


def test_what_was_forgotten_does_not_drown_what_is_left():
    """A maximum over pairs without weight would underflow the rest."""
    spec = exp_spec(**SOFTMAX, key_dim=1, value_dim=1, momentum=False)
    q = torch.full((1, 3, 1, 1), 14.0)
    k, v = torch.tensor([14.0, 14.0, -14.0]).reshape(1, 3, 1, 1), torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
    retain = torch.tensor([1.0, 1.0, 0.0]).reshape(1, 3, 1)
    for cuts in ([0, 3], [0, 2, 3], [0, 1, 2, 3]):
        state, outputs = spec.initial_state([], 1, heads=1), []
        for lo, hi in zip(cuts, cuts[1:]):
            gates = Gates(lr=torch.ones(1, hi - lo, 1), retain=retain[:, lo:hi])
            y, state = scan(q[:, lo:hi], k[:, lo:hi], v[:, lo:hi], gates, state, spec)
            outputs.append(y)
        assert torch.cat(outputs, 1).flatten().tolist() == [1.0, 1.5, 3.0]


def test_a_memory_that_nothing_was_written_to_reads_zero():
    spec = exp_spec(**SOFTMAX, read="before")
    x = inputs(Case(spec, ()), grad=True)
    y, _ = scan(x.q, x.k, x.v, Gates(lr=torch.zeros_like(x.gates.lr)), start(x, spec), spec, x.features)
    assert y.abs().max() == 0.0
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [x.q, x.k, x.v]))
    y, _ = call(scan, x, Case(spec, ()))
    assert y[:, 0].abs().max() == 0.0 and y[:, 1].abs().min() > 0


# Learning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"structure": "linear"}, {"depth": 2}, {"depth": 3}], ids=str)
@pytest.mark.parametrize("window", [1, 4])
def test_the_inner_loss_falls_under_l2(fields, window):
    """The Dot model: what is written is read back, better with each pass over it."""
    spec = exp_spec(**fields, key_dim=8, value_dim=8, expansion=4, window=window, chunk_size=4, momentum=False)
    g = torch.Generator().manual_seed(0)
    k = F.normalize(torch.randn(1, 12, 1, 8, generator=g), dim=-1)
    v = F.normalize(torch.randn(1, 12, 1, 8, generator=g), dim=-1)
    phi = Exp(8, heads=1)
    W0 = [(4 / shape[0]) ** 0.5 * torch.randn(1, *shape, generator=g) for shape in spec.shapes]
    state = spec.initial_state(W0, 1) if W0 else spec.initial_state([], 1, heads=1)
    losses = []
    with torch.no_grad():
        for _ in range(20):
            losses.append((read(k, state, spec, phi) - v).square().sum(-1).mean().item())
            _, state = scan(k, k, v, Gates(lr=torch.full((1, 12, 1), 0.2 / window)), state, spec, phi)
    assert all(b < a for a, b in zip(losses[:5], losses[1:6])), losses
    assert losses[-1] < 0.1 * losses[0], losses


def test_a_list_holds_more_pairs_than_its_keys_have_dimensions():
    spec = exp_spec(structure="linear", key_dim=2, value_dim=4, chunk_size=1)
    g = torch.Generator().manual_seed(0)
    angle = torch.arange(10) * (2 * math.pi / 10)
    k = torch.stack([angle.cos(), angle.sin()], -1).reshape(1, 10, 1, 2).repeat(1, 200, 1, 1)
    v = torch.randn(1, 10, 1, 4, generator=g).repeat(1, 200, 1, 1)
    phi = Exp(2, heads=1)
    with torch.no_grad():
        phi.log_scale_offset += math.log(20.0) - phi.log_scale
        _, state = scan(None, k, v, Gates(lr=torch.ones(1, 2000, 1)), spec.initial_state([], 1, heads=1), spec, phi)
        assert_close(read(k[:, :10], state, spec, phi), v[:, :10], 1e-3, "recall of 10 keys of 2 dims")


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rule": "muon"}, "goes with structure='linear' or 'mlp', rule='gd' and anchor='chunk'.*not .*rule='muon'"),
        ({"structure": "gated_mlp"}, "goes with structure='linear' or 'mlp'.*two maps that start at 0"),
        ({"structure": "linear", "anchor": "token"}, "goes with.*anchor='chunk'.*anchor='token'; chunk_size=1 is the"),
        ({"normalize": True}, "normalize=True goes with.*structure='linear' and objective='dot', not .*'mlp'.*'l2'"),
        ({"normalize": True, "structure": "linear"}, "normalize=True goes with.*objective='l2'"),
        ({"normalize": True, "structure": "linear", "objective": "dot", "features": "identity"}, "features='identity'"),
        ({"normalize": 1}, "normalize=1 must be True or False"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_does(fields, words):
    with pytest.raises(ValueError, match=words) as caught:
        exp_spec(**fields)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 320


def test_a_start_that_does_not_fit_is_refused():
    linear, deep = exp_spec(structure="linear"), exp_spec()
    with pytest.raises(ValueError, match="heads=None must be a whole number"):
        linear.initial_state([], 2)
    with pytest.raises(ValueError, match="W0 has 1 matrices, but"):
        linear.initial_state([torch.zeros(2, 4, 4)], 2)
    with pytest.raises(ValueError, match="W0 has 2 matrices, but"):
        deep.initial_state([torch.zeros(2, 4, 8), torch.zeros(2, 8, 4)], 2)
    with pytest.raises(ValueError, match="those of W0"):
        deep.initial_state([torch.zeros(2, 8, 4)], 2, heads=2)
    with pytest.raises(ValueError, match="W0 has 0 matrices, but"):
        deep.initial_state([], 2, heads=2)


def test_a_spec_survives_json():
    spec = exp_spec(**SOFTMAX)
    assert MemorySpec.from_json(spec.to_json()) == spec
    old = json.loads(spec.to_json())
    del old["normalize"]
    assert MemorySpec.from_json(json.dumps(old)).normalize is False


# The layer ----------------------------------------------------------------------------------------------------------


LAYERS = [
    {"structure": "linear"},
    SOFTMAX,
    SOFTMAX | {"momentum": False, "retain": False, "qk_norm": "none"},
    {},
    {"objective": "dot", "window": 3, "gate": "token*decay"},
    {"depth": 3, "qk_norm": "rms"},
]
every_layer = pytest.mark.parametrize("fields", LAYERS, ids=str)


def layer(**fields) -> NeuralMemory:
    torch.manual_seed(0)
    return NeuralMemory(dim=16, heads=2, features="exp", **({"chunk_size": 4} | fields))


@every_layer
def test_a_layer_gives_the_same_however_it_is_called(fields):
    mem = randomise(layer(**fields).double(), 0.1)
    x = torch.randn(2, 19, 16, dtype=torch.float64)
    y, final = mem(x)
    first, state = mem(x[:, :7])
    outputs = [first]
    with torch.no_grad():
        for t in range(7, 13):
            out, state = mem(x[:, t : t + 1], state)
            outputs.append(out)
        out, state = mem(x[:, 13:], state)
    assert_close(torch.cat([*outputs, out], 1), y, EXACT, "y")
    assert_same_state(state, final)
    assert_same_state(mem.write(x), final)
    packed, _ = mem(x.reshape(1, 38, 16), cu_seqlens=torch.tensor([0, 19, 38]))
    assert_close(packed.reshape(2, 19, 16), y, EXACT, "packed")
    if fields.get("read", "after") == "after":
        assert mem.read(x[:, -1:], final).shape == (2, 1, 16)


@every_layer
def test_every_parameter_of_a_layer_is_trained(fields):
    mem = layer(**fields)
    mem(torch.randn(2, 19, 16))[0].square().sum().backward()
    for name, parameter in mem.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@every_layer
def test_a_layer_is_traced(fields):
    mem = layer(**fields)
    x = torch.randn(2, 11, 16)
    y, _ = mem(x)
    z, _, trace = mem(x, trace=True)
    assert_close(z, y, 2e-5, "y")
    assert trace.surprise.shape == (2, 11, 2) and trace.surprise.isfinite().all()
    assert trace.weight_norms.shape == (2, 3, 2, len(mem.spec.network.shapes()))
    assert trace.weight_norms.isfinite().all() and (trace.weight_norms > 0).all()


@every_layer
def test_long_sequences_stay_finite_at_the_defaults_in_both_precisions(fields):
    mem = layer(chunk_size=64, **fields)
    x = torch.randn(1, 600, 16) + 1.0
    y, state = mem(x)
    y.square().mean().backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in mem.parameters())
    assert all(t.abs().amax() < 1e3 for t in state.tensors().values() if t.numel() and t.is_floating_point())
    with torch.autocast("cpu", torch.bfloat16):
        z, _ = mem(x)
    assert z.isfinite().all()


def test_the_kernel_of_the_layer_is_one_for_a_key_with_itself():
    for fields in LAYERS:
        phi = layer(**fields).features
        key = F.normalize(torch.randn(5, 2, 8), dim=-1) * phi.key_norm
        assert_close((phi(key).square().sum(-1) + phi.offset).exp(), torch.ones(5, 2), 1e-5, "kernel")
    assert isinstance(phi, FeatureMap)
    phi.log_scale_offset.data.fill_(1.0)
    phi.reset_parameters()
    assert_close(phi.log_scale.detach(), torch.full((2,), -math.log(8) / 2), 1e-6, "start")
