"""Losses and retentions of Miras against the paper's own equations, and what memories made of them learn at test time."""

from __future__ import annotations

import pytest
import torch

from helpers import assert_close
from mnemos.memory import Gates, MemorySpec, NeuralMemory, scan
from mnemos.memory.losses import LOSSES

f64 = torch.float64


def stream(length: int = 17, dim: int = 4, seed: int = 0):
    """q, k, v (1, T, 1, D), lr and retain (1, T, 1), W0 (1, D, D)."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, length, 1, dim, generator=draw, dtype=f64)
    lr, retain = (
        0.2 * torch.rand(1, length, 1, generator=draw, dtype=f64),
        0.8 + 0.2 * torch.rand(1, length, 1, dtype=f64),
    )
    return q, 0.5 * k, v, lr, retain, torch.randn(1, dim, dim, generator=draw, dtype=f64)


def outputs(spec: MemorySpec, q, k, v, W0, **gates) -> torch.Tensor:
    return scan(q, k, v, Gates(**gates), spec.initial_state([W0], batch=1), spec)[0][0, :, 0]


def test_yaad_is_equation_26():
    """W_t = alpha W - eta (gradient of l2 if |r| <= delta, else delta times the gradient of l1)."""
    q, k, v, lr, retain, W0 = stream()
    delta = 0.3 + 2 * torch.rand(lr.shape, dtype=f64)
    spec = MemorySpec(4, 4, structure="linear", objective="huber_switch", chunk_size=1, momentum=False)
    W, expected, far = W0[0], [], 0
    for t in range(q.shape[1]):
        r = k[0, t] @ W - v[0, t]
        near = r.norm() <= delta[0, t]
        far += not near
        error = r if near else delta[0, t] * r / (r.square() + 1e-6).sqrt()
        W = retain[0, t] * W - lr[0, t] * k[0, t].T @ error
        expected.append(q[0, t] @ W)
    assert 0 < far < q.shape[1]
    assert_close(outputs(spec, q, k, v, W0, lr=lr, retain=retain, threshold=delta), torch.cat(expected), 1e-12)


@pytest.mark.parametrize("p, q_norm", [(3, 4), (2, 3), (3, 2)])
def test_moneta_is_equations_24_and_25(p, q_norm):
    """A_t = alpha A - eta gradient of lp at W_{t-1}; W_t = A / |A|_q^(q-2)."""
    q, k, v, lr, retain, W0 = stream()
    choices = {"objective": f"lp(p={p})", "retention": f"lq(q={q_norm})"}
    spec = MemorySpec(4, 4, structure="linear", chunk_size=1, **choices)

    def norm(A):
        return A.abs().pow(q_norm).sum() ** (1 / q_norm)

    A, expected = W0[0] / norm(W0[0]), []
    W = A / norm(A) ** (q_norm - 2)
    for t in range(q.shape[1]):
        r = k[0, t] @ W - v[0, t]
        A = retain[0, t] * A - lr[0, t] * k[0, t].T @ (r * (r.square() + 1e-6) ** (p / 2 - 1))
        W = A / norm(A) ** (q_norm - 2)
        expected.append(q[0, t] @ W)
    assert_close(outputs(spec, q, k, v, W0, lr=lr, retain=retain), torch.cat(expected), 1e-12)


def test_memora_is_equation_27():
    """W_t = softmax(alpha log W_{t-1} - eta gradient of l2 at W_{t-1}), over the inputs of each output."""
    q, k, v, lr, retain, W0 = stream()
    spec = MemorySpec(4, 4, structure="linear", retention="kl(scale=1)", chunk_size=1)
    W = (2 * W0[0] / W0[0].square().mean().sqrt()).softmax(0)
    expected = []
    for t in range(q.shape[1]):
        r = k[0, t] @ W - v[0, t]
        W = (retain[0, t] * W.log() - lr[0, t] * k[0, t].T @ r).softmax(0)
        expected.append(q[0, t] @ W)
    assert_close(outputs(spec, q, k, v, W0, lr=lr, retain=retain), torch.cat(expected), 1e-12)


@pytest.mark.parametrize("name", ["huber", "huber_norm", "huber_switch", "lp", "lp(p=1)", "lp(p=1.5)", "l2", "dot"])
def test_the_error_of_a_loss_is_its_derivative(name):
    loss = LOSSES.make(name)
    output = (2 * torch.randn(50, 6, dtype=f64)).requires_grad_()
    value = torch.randn(50, 6 + loss.has_threshold, dtype=f64)
    if loss.has_threshold:
        value[:, -1] = 4 * torch.rand(50, dtype=f64)
    (expected,) = torch.autograd.grad(loss.loss(output, value).sum(), output)
    assert_close(loss.error(output, value).expand_as(expected), expected, 1e-12)


@pytest.mark.parametrize("name", ["huber", "huber_norm", "huber_switch"])
def test_a_large_threshold_makes_a_huber_loss_l2_and_a_small_one_bounds_its_error(name):
    loss, l2 = LOSSES.make(name), LOSSES.make("l2")
    output, value = torch.randn(2, 50, 6, dtype=f64)

    def with_threshold(delta: float) -> torch.Tensor:
        return torch.cat([value, torch.full((50, 1), delta, dtype=f64)], -1)

    assert torch.equal(loss.error(output, with_threshold(100.0)), l2.error(output, value))
    assert float(loss.error(output, with_threshold(0.01)).abs().max()) <= 0.01


@pytest.mark.parametrize("window", [1, 3])
def test_a_missing_threshold_is_that_of_the_loss(window):
    q, k, v, lr, retain, W0 = stream()
    spec = MemorySpec(4, 4, structure="linear", objective="huber(delta=0.7)", chunk_size=4, window=window)
    given = outputs(spec, q, k, v, W0, lr=lr, retain=retain, threshold=torch.full_like(lr, 0.7))
    assert_close(outputs(spec, q, k, v, W0, lr=lr, retain=retain), given, 1e-14)


@pytest.mark.parametrize(
    "choices, sentence",
    [
        ({"objective": "lp(p=0.5)"}, "objective='lp' needs p from 1 to 8, not 0.5"),
        ({"objective": "lp(q=3)"}, r"objective='lp\(q=3\)': lp has the options p, not q"),
        ({"objective": "lp(p=x)"}, "must have options of the form name=number"),
        ({"objective": "lp(p=inf)"}, "must have options of the form name=number"),
        ({"objective": "lp(p=3"}, r"objective='lp\(p=3' is unknown; choose one of 'l2', 'dot'"),
        ({"objective": "l2(p=3)"}, r"objective='l2\(p=3\)': l2 has no options, not p"),
        ({"objective": "huber(delta=-1)"}, "needs delta > 0"),
        ({"retention": "lq(q=1)"}, "retention='lq' needs q from 2 to 8, not 1"),
        ({"retention": "kl(scale=0)"}, "retention='kl' needs scale > 0"),
        ({"retention": "ql"}, "retention='ql' is unknown; choose one of 'zero'"),
        ({"retention": "kl", "rule": "muon"}, "retention='kl' goes with rule='gd'"),
        ({"retention": "kl", "features": "exp"}, "retention='kl' goes with rule='gd'"),
        ({"retention": "kl", "momentum": False}, r"momentum=True \(its accumulator\)"),
        ({"retention": "kl", "structure": "linear", "anchor": "token"}, "anchor="),
        ({"retention": "kl", "commit_every": 3}, "commit_every=3 must divide chunk_size=64"),
        ({"structure": "mlp()"}, r"structure='mlp\(\)' is unknown"),
    ],
)
def test_choices_that_do_not_fit_are_one_sentence(choices, sentence):
    with pytest.raises(ValueError, match=sentence):
        MemorySpec(key_dim=4, value_dim=4, **choices)


def test_gates_that_a_memory_does_not_have_are_refused():
    q, k, v, lr, retain, W0 = stream()
    spec = MemorySpec(4, 4, structure="linear", retention="kl")
    with pytest.raises(ValueError, match="retention='kl' has no momentum"):
        outputs(spec, q, k, v, W0, lr=lr, momentum=retain)
    with pytest.raises(ValueError, match="objective='l2' has no threshold per token"):
        outputs(spec, q, k, v, W0, lr=lr, threshold=retain)
    with pytest.raises(ValueError, match="has no momentum: use momentum=False"):
        NeuralMemory(32, retention="kl")


MEMORIES = {
    "yaad": {"objective": "huber_switch"},
    "moneta": {"objective": "lp(p=3)", "retention": "lq(q=4, floor=1)", "commit_every": 4},
    "memora": {"retention": "kl(scale=2)", "commit_every": 4},
}


@pytest.mark.parametrize("name, read_before", [("yaad", 0), ("moneta", 0), ("memora", 0), ("memora", 2000)])
def test_a_chunk_shown_again_has_a_lower_inner_loss(name, read_before):
    torch.manual_seed(0)
    layer = NeuralMemory(dim=64, heads=2, momentum=False, conv_width=0, chunk_size=16, **MEMORIES[name])
    x, losses = torch.randn(2, 16, 64), []
    with torch.no_grad():
        state = layer(torch.randn(2, read_before, 64))[1] if read_before else None
        for _ in range(6):
            _, state, trace = layer(x, state, trace=True)
            losses.append(float(trace.surprise.mean()))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.999 * losses[0], losses


def test_weights_of_memora_stay_positive_and_sum_to_their_scale():
    layer = NeuralMemory(dim=32, heads=2, momentum=False, retention="kl(scale=3)", chunk_size=8)
    with torch.no_grad():
        _, state = layer(torch.randn(2, 100, 32))
    for w in state.weights:
        assert float(w.min()) > 0 and torch.allclose(w.sum(-2), torch.full_like(w.sum(-2), 3.0), atol=1e-4)


def test_the_threshold_of_a_layer_is_learned_and_begins_at_delta():
    layer = NeuralMemory(dim=32, heads=2, momentum=False, objective="huber_norm(delta=0.4)", chunk_size=8)
    x = torch.randn(2, 20, 32)
    assert torch.allclose(layer.gating(x).threshold, torch.tensor(0.4))
    layer(x)[0].square().sum().backward()
    at = list(layer.gating.sizes).index("threshold") * layer.heads
    assert bool((layer.gating.offset.grad[at : at + layer.heads] != 0).all())
