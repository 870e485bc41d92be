"""Reads, writes, what the window counts, and gates at the ends of their range. Shapes as in `loops.py`."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from loops import (
    EXACT,
    B,
    D,
    E,
    H,
    T,
    apply,
    assert_same,
    f64,
    gate,
    mlp,
    normal,
    rows,
    run,
    scalar,
    tokens,
    track,
)
from torch import Tensor

from helpers import assert_close
from mnemos.memory import Gates, MemorySpec, read, scan, step

pytestmark = pytest.mark.usefixtures("seed")


# Reading and writing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["gd", "muon"])
@pytest.mark.parametrize("structure", ["linear", "mlp"])
def test_reading_before_the_write_sees_the_weights_after_the_token_before(structure, rule):
    after = MemorySpec(D, D, structure=structure, expansion=2, rule=rule, chunk_size=4, window=2)
    before = dataclasses.replace(after, read="before")
    q, k, v = tokens(D, D)
    gates = Gates(lr=gate(high=0.1), momentum=gate(high=0.9), retain=gate(low=0.8))
    W0 = [normal(H, *shape, scale=0.4) for shape in after.shapes]
    leaves = track(q=q, k=k, v=v, lr=gates.lr)
    actual = run(before, q, k, v, gates, W0)

    state, ys = after.initial_state(W0, batch=B), []
    for t in range(T):
        W = state.weights
        ys.append(apply(q[:, t], W[0]) if structure == "linear" else mlp(q[:, t], W))
        at = slice(t, t + 1)
        _, state = step(q[:, at], k[:, at], v[:, at], gates.map(lambda x, at=at: x[:, at]), state, after)
    assert_same(actual, (torch.stack(ys, 1), state.weights), leaves)


@pytest.mark.parametrize("anchor", ["token", "chunk"])
def test_a_memory_recalls_orthonormal_keys_exactly_without_training(anchor):
    keys = torch.linalg.qr(normal(B, H, 8, 8)).Q.transpose(1, 2).contiguous()  # B 8 H 8, orthonormal over tokens
    values = normal(B, 8, H, E)
    spec = MemorySpec(8, E, structure="linear", anchor=anchor, chunk_size=4)
    gates = Gates(lr=torch.ones(B, 8, H, dtype=f64))
    y, state = scan(keys, keys, values, gates, spec.initial_state([torch.zeros(H, 8, E, dtype=f64)], batch=B), spec)
    assert_close(y, values, 1e-12, "read at once")
    assert_close(read(keys, state, spec), values, 1e-12, "read at the end")
    for t in range(8):
        assert_close(read(keys[:, t : t + 1], state, spec), values[:, t : t + 1], 1e-12, f"token {t}")


FALLING = {
    "gd": {"lr": 0.1},
    "gd with momentum": {"lr": 0.02, "momentum": 0.9},
    "window 4": {"lr": 0.03, "window": 4},
    "window 4 with momentum": {"lr": 0.005, "momentum": 0.9, "window": 4},
    "muon": {"lr": 0.04, "momentum": 0.9, "rule": "muon"},
    "muon, convergent": {"lr": 0.04, "momentum": 0.9, "rule": "muon", "ns_coefficients": "convergent"},
    "muon with window 4": {"lr": 0.04, "momentum": 0.9, "rule": "muon", "window": 4},
    "muon per token": {"lr": 0.01, "momentum": 0.9, "rule": "muon", "commit_every": 1},
}


def write_repeatedly(structure: str, objective: str, options: dict) -> list[float]:
    """Mean inner loss (l2) or alignment (dot) on three pairs, before and after each of eight rounds of writing them."""
    options = dict(options)
    lr, momentum = options.pop("lr"), options.pop("momentum", None)
    spec = MemorySpec(6, 6, structure=structure, expansion=2, objective=objective, chunk_size=4, **options)
    k = torch.nn.functional.normalize(normal(B, 3, H, 6), dim=-1)
    v = k + normal(B, 3, H, 6)
    state = spec.initial_state([normal(H, *shape, scale=0.3) for shape in spec.shapes], batch=B)
    many_k, many_v = k.repeat(1, 8, 1, 1), v.repeat(1, 8, 1, 1)
    gates = Gates(
        lr=torch.full((B, 24, H), lr, dtype=f64),
        momentum=None if momentum is None else torch.full((B, 24, H), momentum, dtype=f64),
    )
    scores = []
    for _ in range(9):
        output = read(k, state, spec)
        scores.append(((output - v).square().sum(-1) / 2 if objective == "l2" else (output * v).sum(-1)).mean().item())
        _, state = scan(many_k, many_k, many_v, gates, state, spec)
    return scores


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("structure", ["linear", "mlp", "gated_mlp"])
def test_the_inner_loss_falls_when_the_same_pairs_are_written_again(structure, name):
    losses = write_repeatedly(structure, "l2", FALLING[name])
    assert losses[1] < losses[0], losses
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("structure", ["linear", "mlp", "gated_mlp"])
def test_the_alignment_grows_under_the_dot_objective(structure, name):
    options = FALLING[name]
    scores = write_repeatedly(structure, "dot", options | {"lr": options["lr"] / 10})
    assert all(b > a for a, b in itertools.pairwise(scores)), scores


# What the window counts ---------------------------------------------------------------------------------------------


def weights_after(spec: MemorySpec, k: Tensor, v: Tensor, gates: Gates, cuts: list[int]) -> Tensor:
    """The weights of a linear memory after all tokens, written in calls that end at `cuts`."""
    state = spec.initial_state([torch.ones(1, D, E, dtype=f64)], batch=1)
    for lo, hi in zip([0, *cuts], [*cuts, k.shape[1]]):
        part = (k[:, lo:hi], k[:, lo:hi], v[:, lo:hi], gates.map(lambda x, lo=lo, hi=hi: x[:, lo:hi]))
        _, state = (step if hi - lo == 1 else scan)(*part, state, spec)
    return state.weights[0]


@pytest.mark.parametrize("anchor", ["chunk", "token"])
@pytest.mark.parametrize("cuts", [[], [11], [9, 10, 13], list(range(1, 16))], ids=["one call", "two", "four", "steps"])
@pytest.mark.parametrize(("window", "chunk"), [(1, 4), (3, 4), (5, 16), (7, 4), (4, 1)])
def test_the_window_counts_tokens_across_chunks_and_calls(window, chunk, cuts, anchor):
    spec = MemorySpec(D, E, structure="linear", objective="dot", window=window, chunk_size=chunk, anchor=anchor)
    t = 13  # the only token that writes
    k, v = normal(1, 16, 1, D), normal(1, 16, 1, E)
    lr = torch.zeros(1, 16, 1, dtype=f64)
    lr[:, t] = 1
    gates = Gates(lr=lr)
    W = weights_after(spec, k, v, gates, cuts)
    for i in range(16):
        inside = t - window < i <= t
        for changed_k, changed_v in ((k.clone(), v), (k, v.clone())):
            (changed_k if changed_k is not k else changed_v)[:, i] += 1
            moved = (weights_after(spec, changed_k, changed_v, gates, cuts) - W).abs().max().item()
            assert (moved > 0.1) if inside else (moved == 0.0), f"token {i}: {moved}"


# Gates at their ends ------------------------------------------------------------------------------------------------


ENDS = [
    MemorySpec(D, E, structure="linear", chunk_size=8, window=3),
    MemorySpec(D, E, structure="linear", anchor="token", window=3),
    MemorySpec(D, E, structure="linear", anchor="token", decay_first=True),
    MemorySpec(D, D, structure="mlp", expansion=2, chunk_size=4),
    MemorySpec(D, D, structure="mlp", expansion=2, chunk_size=4, momentum=False),
    MemorySpec(D, D, structure="gated_mlp", expansion=2, chunk_size=1),
    MemorySpec(D, D, structure="mlp", expansion=2, chunk_size=8, rule="muon", window=3, commit_every=4),
]
every_end = pytest.mark.parametrize("spec", ENDS, ids=[f"{s.structure},{s.rule},{s.anchor},{s.momentum}" for s in ENDS])


def ordinary(spec: MemorySpec) -> tuple:
    q, k, v = tokens(spec.key_dim, spec.value_dim)
    W0 = [normal(H, *shape, scale=0.4) for shape in spec.shapes]
    gates = Gates(lr=gate(high=0.05), momentum=gate() if spec.momentum else None, retain=gate(low=0.5), gate=gate())
    return q, k, v, gates, W0


@every_end
def test_a_learning_rate_of_zero_leaves_the_memory_exactly_as_it_was(spec):
    q, k, v, gates, W0 = ordinary(spec)
    silent = dataclasses.replace(gates, lr=torch.zeros(B, T, H, dtype=f64), retain=None)
    y, W = run(spec, q, k, v, silent, W0)
    for a, b in zip(W, rows(W0)):
        assert torch.equal(a, b)
    at_start = read(q, spec.initial_state(W0, batch=B), spec)
    assert_close(y, at_start, 1e-14, "y")


@every_end
def test_a_learning_rate_of_zero_leaves_nothing_but_the_decay(spec):
    q, k, v, gates, W0 = ordinary(spec)
    silent = dataclasses.replace(gates, lr=torch.zeros(B, T, H, dtype=f64))
    _, W = run(spec, q, k, v, silent, W0)
    kept = torch.ones(B, H, dtype=f64)
    for t in range(T):
        kept = kept * gates.retain[:, t]
    for a, b in zip(W, rows(W0)):
        assert_close(a, scalar(kept) * b, 1e-13, "weights")


@every_end
def test_a_gate_of_zero_everywhere_leaves_memory_and_momentum_as_they_were(spec):
    q, k, v, gates, W0 = ordinary(spec)
    silent = dataclasses.replace(gates, gate=torch.zeros(B, T, H, dtype=f64), retain=None)
    _, state = scan(q, k, v, silent, spec.initial_state(W0, batch=B), spec)
    for a, b in zip(state.weights, rows(W0)):
        assert torch.equal(a, b)
    assert all(s.abs().max() == 0 for s in state.momentum)


@every_end
def test_retain_zero_wipes_the_memory_exactly(spec):
    """After a wipe with no momentum carried over it, nothing of W0 or of earlier tokens is left."""
    q, k, v, gates, W0 = ordinary(spec)
    t = 18  # in the middle of a chunk
    gates.retain[:, t] = 0
    gates.lr[:, t:] = 0
    if gates.momentum is not None:
        gates.momentum[:, t] = 0
    if spec.rule == "muon":
        gates.gate[:] = 0
    y, W = run(spec, q, k, v, gates, W0)
    assert all(w.abs().max() == 0 for w in W)
    nothing = q[:, t:] if spec.has_residual else torch.zeros(B, T - t, H, spec.value_dim, dtype=f64)
    assert torch.equal(y[:, t:], nothing)


def test_after_a_wipe_a_hebbian_memory_does_not_depend_on_what_was_before_at_all():
    spec = MemorySpec(D, E, structure="linear", objective="dot", chunk_size=8, window=3)
    q, k, v, gates, W0 = ordinary(spec)
    t = 18
    gates.retain[:, t] = gates.momentum[:, t] = 0
    y, W = run(spec, q, k, v, gates, W0)
    other_k, other_v = k.clone(), v.clone()
    other_k[:, : t - 2] += 1  # beyond the window of token t
    other_v[:, : t - 2] *= 3
    z, V = run(spec, q, other_k, other_v, gates, [5 * W0[0]])
    assert torch.equal(W[0], V[0]) and torch.equal(y[:, t:], z[:, t:])
    assert not torch.equal(y[:, :t], z[:, :t])


@every_end
def test_a_token_with_gate_zero_writes_nothing_now_or_later_but_still_decays(spec):
    q, k, v, gates, W0 = ordinary(spec)
    silent = [0, 3, 17, 18, 36]
    gates.gate[:, silent] = 0
    y, W = run(spec, q, k, v, gates, W0)
    other_k, other_v = k.clone(), v.clone()
    other_k[:, silent] = normal(B, len(silent), H, spec.key_dim)
    other_v[:, silent] += 5
    z, V = run(spec, q, other_k, other_v, gates, W0)
    assert torch.equal(y, z) and all(torch.equal(a, b) for a, b in zip(W, V))

    cuts = [0, 18, 19, T]  # a silent token stays silent in the window buffers of the next call
    state, pieces = spec.initial_state(W0, batch=B), []
    for lo, hi in itertools.pairwise(cuts):
        at = slice(lo, hi)
        y_part, state = scan(q[:, at], k[:, at], v[:, at], gates.map(lambda x, at=at: x[:, at]), state, spec)
        pieces.append(y_part)
    assert_close(torch.cat(pieces, 1), y, EXACT, "y in three calls")

    alone = gates.map(lambda x: x[:, :1])
    _, once = run(spec, q[:, :1], k[:, :1], v[:, :1], alone, W0)
    for a, b in zip(once, rows(W0)):
        assert_close(a, scalar(gates.retain[:, 0]) * b, 1e-14, "one silent token")
