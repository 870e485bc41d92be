"""`write_mask`: a token that is read but not written leaves nothing behind, and time passes as ever."""

from __future__ import annotations

import pytest
import torch
from cases import grid, inputs
from layers import CASES, DIM, T, build, some
from oracle import assert_is_the_reference, assert_states_close, in_calls, token_by_token

from helpers import assert_close, assert_close_rms, every_backend
from mnemos.memory import MemoryState, NeuralMemory, reference_scan, scan, step
from mnemos.memory.retention import decayed

GRID = grid()[::9]  # of every part of the grid some
every_case = pytest.mark.parametrize("case", GRID, ids=str)
LAYERS = [*CASES, "exp", "exp attention", "muon per token", "window beyond the sequence", "kl"]
MORE = {
    "exp": dict(features="exp", window=3),
    "exp attention": dict(features="exp", structure="linear", objective="dot", normalize=True),
    "muon per token": dict(rule="muon", commit_every=1, momentum=False, window=3, retention="start", max_lr=0.02),
    "window beyond the sequence": dict(window=23, gate="decay", max_lr=0.01),
    "kl": dict(retention="kl", momentum=False, window=2),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def layer(name: str) -> NeuralMemory:
    return build("titans", **MORE[name]) if name in MORE else build(name)


def some_mask(batch: int, length: int, seed: int = 1, share: float = 0.5) -> torch.Tensor:
    return torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < share


def run(function, x, case, writes, state: MemoryState | None = None, part: slice = slice(None), **options):
    gates = x.gates.masked(writes, case.spec.window).map(lambda g: g[:, part])
    state = x.state(case.spec) if state is None else state
    return function(x.q[:, part], x.k[:, part], x.v[:, part], gates, state, case.spec, x.features, **options)


@every_case
@every_backend
def test_keys_and_values_of_unwritten_tokens_change_nothing(case, backend):
    x, writes = inputs(case), some_mask(2, 23)
    y, state = run(scan, x, case, writes, backend=backend)
    other = inputs(case)
    noise = inputs(case, seed=5)
    for name in ("k", "v"):
        setattr(other, name, torch.where(writes[..., None, None], getattr(x, name), getattr(noise, name)))
    y2, state2 = run(scan, other, case, writes, backend=backend)
    assert torch.equal(y, y2)
    matrices = ("weights", "momentum", "anchor", "pairs.weight", "pairs.momentum", "pairs.anchor", "window_gate")
    for name, a in state.tensors().items():
        if name.startswith(matrices):
            assert torch.equal(a, state2.tensors()[name]), name


@every_case
def test_an_unwritten_token_lets_the_memory_decay_and_momentum_move_it(case):
    x, spec, t = inputs(case), case.spec, 12
    writes = torch.ones(2, 23, dtype=torch.bool)
    writes[:, t] = False
    _, before = run(scan, x, case, writes, part=slice(0, t))
    _, after = run(step, x, case, writes, before, slice(t, t + 1))
    assert after.position.tolist() == [t + 1, t + 1]
    if spec.window > 1:
        assert (after.window_gate[:, -1] == 0).all()
    if spec.commits or spec.is_kv_cache:
        return
    one = torch.ones_like(x.gates.lr)
    retain, momentum = (one if g is None else g for g in (x.gates.retain, x.gates.momentum))
    for i, w in enumerate(after.weights):
        kept = decayed(before.weights[i], before.start[i] if before.start else None, retain[:, t, :, None, None])
        if before.momentum:
            kept = kept + (0 if x.gates.momentum is None else momentum[:, t, :, None, None]) * before.momentum[i]
        assert_close(w, kept, 1e-12, f"map {i}")


@every_case
def test_with_unwritten_tokens_scan_is_the_reference_and_any_split(case):
    x, writes = inputs(case, length=17), some_mask(2, 17)
    writes[0, :4] = False
    y, state = run(scan, x, case, writes)
    expected, end = run(reference_scan, x, case, writes)
    assert_close(y, expected, 1e-10, "y")
    for (name, a), b in zip(state.tensors().items(), end.tensors().values()):
        assert_close(a, b, 1e-10, name)
    again, outputs = None, []
    for part in (slice(0, 1), slice(1, 8), slice(8, 9), slice(9, 17)):
        function = step if part.stop - part.start == 1 else scan
        out, again = run(function, x, case, writes, again, part)
        outputs.append(out)
    assert_close(torch.cat(outputs, 1), y, 1e-10, "y in parts")
    for (name, a), b in zip(again.tensors().items(), state.tensors().values()):
        assert_close(a, b, 1e-10, name)


@each_layer
def test_a_layer_with_a_write_mask_is_the_reference_with_every_gradient(name, monkeypatch):
    assert_is_the_reference(layer(name), monkeypatch, some(2, T, DIM), write_mask=some_mask(2, T))


@each_layer
def test_a_write_mask_holds_in_any_split_token_by_token_and_in_a_trace(name):
    mem, x, writes = layer(name), some(2, T, DIM), some_mask(2, T)
    whole, end = mem(x, write_mask=writes)
    for y, state in (in_calls(mem, x, [1, 7, 13], write_mask=writes), token_by_token(mem, x, write_mask=writes)):
        assert_close_rms(y, whole, 1e-10)
        assert_states_close(state, end)
    y, state, trace = mem(x, trace=True, write_mask=writes)
    assert_close_rms(y, whole, 1e-10)
    assert_states_close(state, end)
    assert (trace.gate[~writes] == 0).all() and (trace.gradient_norm[~writes] == 0).all()
    assert (trace.surprise[~writes] != 0).any()  # it is measured, and not written
    assert_states_close(mem.write(x, write_mask=writes), end)


@each_layer
def test_a_write_mask_goes_with_skipped_tokens_and_packed_documents(name):
    mem, x, writes, mask = layer(name), some(2, T, DIM), some_mask(2, T), some_mask(2, T, seed=3, share=0.7)
    y, end = mem(x, mask=mask, write_mask=writes)
    for row in range(2):
        alone, alone_end = mem(x[row : row + 1, mask[row]], write_mask=writes[row : row + 1, mask[row]])
        assert_close_rms(y[row : row + 1, mask[row]], alone, 1e-10)
        assert_states_close(end.select([row]), alone_end)
    bounds = [0, 2, 9, 10, T]
    y, end = mem(x[:1], cu_seqlens=bounds, write_mask=writes[:1])
    for n, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        alone, alone_end = mem(x[:1, lo:hi], write_mask=writes[:1, lo:hi])
        assert_close_rms(y[:, lo:hi], alone, 1e-10)
        assert_states_close(end.select([n]), alone_end)


@each_layer
def test_a_write_mask_of_true_changes_nothing(name):
    mem, x = layer(name), some(2, T, DIM)
    y, end = mem(x, write_mask=torch.ones(2, T, dtype=torch.bool))
    expected, expected_end = mem(x)
    assert_close_rms(y, expected, 1e-12)
    assert_states_close(end, expected_end, 1e-12)


def test_float32_agrees_with_float64_under_a_write_mask():
    mem, x, writes = build("omega"), some(2, T, DIM), some_mask(2, T)
    expected, _ = mem(x, write_mask=writes)
    y, _ = mem.float()(x.float(), write_mask=writes)
    assert_close_rms(y, expected, 2e-5)


def test_a_write_mask_that_does_not_fit_is_refused():
    mem, x = build(), some(2, T, DIM)
    for wrong in (torch.ones(2, T), torch.ones(2, T + 1, dtype=torch.bool), [True]):
        with pytest.raises(ValueError, match=r"^write_mask .*bool \(2, 21\) is expected"):
            mem(x, write_mask=wrong)
