"""Retention "start": forgetting towards the initial weights, which the state carries."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case, inputs
from layers import build, some
from safetensors.torch import load_file, save_file

from helpers import assert_close
from mnemos.memory import MemorySpec, MemoryState, NeuralMemory, read, scan, step
from mnemos.models import MnemosCache, MnemosForCausalLM, presets

SPEC = MemorySpec(4, 4, expansion=2, chunk_size=8, retention="start")
ZERO = dataclasses.replace(SPEC, retention="zero")


def test_weights_without_writes_return_to_w0_by_retain_at_every_token():
    W0 = [torch.randn(1, *shape, dtype=torch.float64) for shape in SPEC.shapes]
    state = SPEC.initial_state(W0, batch=1)
    moved = dataclasses.replace(state, weights=[w + 1 for w in state.weights])
    x = inputs(Case(SPEC, ("retain",)), batch=1, length=11, heads=1)
    x.gates.lr.zero_()
    _, final = scan(x.q, x.k, x.v, x.gates, moved, SPEC)
    kept = x.gates.retain.prod()
    for w, w0 in zip(final.weights, W0):
        assert_close(w[0], w0 + kept, 1e-12)


@pytest.mark.parametrize("anchor", ["chunk", "token"])
def test_a_linear_memory_is_one_that_forgets_towards_0_with_its_start_read_beside_it(anchor):
    """With W - W0 in W's place the formulas are those of retention "zero", for values from which the start's share is subtracted."""
    start = MemorySpec(4, 3, structure="linear", chunk_size=8, retention="start", anchor=anchor)
    case = Case(start, ("momentum", "retain"))
    x = inputs(case)
    zero = dataclasses.replace(start, retention="zero")
    y, state = scan(x.q, x.k, x.v, x.gates, x.state(start), start)
    (W0,) = x.W0
    share = torch.einsum("bthk,hkv->bthv", x.k, W0)
    z, other = scan(x.q, x.k, x.v - share, x.gates, zero.initial_state([torch.zeros_like(W0)], 2), zero)
    assert_close(y, z + torch.einsum("bthk,hkv->bthv", x.q, W0), 1e-12)
    assert_close(state.weights[0], other.weights[0] + W0, 1e-12)


def test_from_initial_weights_of_0_both_retentions_are_the_same():
    x = inputs(Case(SPEC))
    x.W0 = [torch.zeros_like(w) for w in x.W0[:-1]] + [torch.zeros_like(x.W0[-1])]
    found = [scan(x.q, x.k, x.v, x.gates, x.state(spec), spec)[0] for spec in (SPEC, ZERO)]
    assert torch.equal(*found)


def test_rows_share_the_start_until_they_are_picked_and_gradients_reach_it():
    x = inputs(Case(SPEC), batch=3, grad=True)
    state = x.state(SPEC)
    _, state = scan(x.q, x.k, x.v, x.gates, state, SPEC)
    assert all(w.stride(0) == 0 for w in state.start)
    cut = dataclasses.replace(state, weights=[w.detach() for w in state.weights], anchor=state.detach().anchor)
    y, _ = scan(x.q, x.k, x.v, x.gates, cut, SPEC)  # from here on gradients reach W0 through `start` alone
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(y.sum(), x.W0))
    picked = state.select([2, 0])
    assert all(torch.equal(w[0], w0) and w.shape[0] == 2 for w, w0 in zip(picked.start, x.W0))
    assert ZERO.initial_state(x.W0, 2).start == []


@pytest.mark.parametrize("features", ["identity", "exp"])
def test_an_optimiser_that_moves_w0_does_not_move_the_start_of_a_state(features):
    layer = NeuralMemory(32, heads=2, retention="start", features=features)
    state = layer.write(some(1, 9, 32, dtype=torch.float32)).detach()
    kept = state.clone()
    with torch.no_grad():
        for w in layer.W0:
            w.add_(1)
    assert all(torch.equal(a, b) for a, b in zip(state.start, kept.start))


def test_a_state_that_widens_takes_its_start_with_it():
    x = inputs(Case(SPEC, dtype=torch.float32))
    state = x.state(SPEC)
    wide = x.double()
    for function, length in ((scan, 23), (step, 1)):
        part = slice(0, length)
        gates = wide.gates.map(lambda g, part=part: g[:, part])
        _, final = function(wide.q[:, part], wide.k[:, part], wide.v[:, part], gates, state, SPEC)
        assert {t.dtype for t in final.tensors().values()} == {torch.float64, torch.int64}


# Checks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [scan, step, read])
def test_a_state_whose_start_does_not_fit_is_refused(function):
    x = inputs(Case(SPEC), length=1)
    state = x.state(SPEC)
    first = state.start[0]
    wrong = {
        "0 matrices in start, but 2": [],
        "1 matrices in start, but 2": [first],
        r"start\[0\] of shape \(2, 3, 4, 7\)": [first[..., :-1], state.start[1]],
        r"start\[0\] of shape \(1, 3, 4, 8\)": [first[:1], state.start[1]],
    }
    for message, start in wrong.items():
        broken = dataclasses.replace(state, start=start)
        with pytest.raises(ValueError, match=message):
            if function is read:
                read(x.q, broken, SPEC)
            else:
                function(x.q, x.k, x.v, x.gates, broken, SPEC)
    extra = dataclasses.replace(x.state(ZERO), start=state.start)
    with pytest.raises(ValueError, match="2 matrices in start, but 0 are expected"):
        scan(x.q, x.k, x.v, x.gates, extra, ZERO)


@torch.no_grad()
@pytest.mark.parametrize("retention", ["zero", "start"])
def test_a_layer_does_not_decode_from_a_state_without_its_start_or_with_a_strangers(retention):
    layer, other = (
        NeuralMemory(32, heads=2, retention=name) for name in (retention, {"zero": "start"}.get(retention, "zero"))
    )
    state = layer.write(some(1, 5, 32, dtype=torch.float32))
    wrong = dataclasses.replace(state, start=other.initial_state(1).start)
    for tokens in (1, 6):
        with pytest.raises(ValueError, match=r"matrices in start, but \d are expected"):
            layer(some(1, tokens, 32, dtype=torch.float32), wrong)


@pytest.fixture
def saved(tmp_path):
    """The tensors of a saved state and its header, and a function that opens them changed."""
    path = tmp_path / "state"
    layer = build("towards the start")
    layer.write(some(2, 9, 12)).save(path)
    tensors = load_file(path)

    def opened(changed: dict, spec: MemorySpec = layer.spec) -> MemoryState:
        save_file(changed, path, {"format": "mnemos.memory-state/1", "spec": spec.to_json()})
        return MemoryState.load(path)

    return layer, tensors, opened


def test_a_file_with_a_start_that_does_not_fit_is_refused(saved):
    layer, tensors, opened = saved
    assert {"start.0", "start.1"} <= tensors.keys()
    opened(tensors)
    start = tensors["start.0"]
    without = {name: x for name, x in tensors.items() if name != "start.0"}
    for changed, message in (
        (without, "start.0 has shape none"),
        (tensors | {"start.0": start[:, :, :-1].clone()}, r"start.0 has shape \(2, 3, 3, 16\)"),
        (tensors | {"start.0": start[:1].clone()}, r"start.0 has shape \(1, 3, 4, 16\)"),
        (tensors | {"start.2": start.clone()}, "start.2 has shape .* but none is expected"),
        (tensors | {"start.0": torch.full_like(start, float("nan"))}, "start.0 that are not finite"),
        (tensors | {"start.0": start.float()}, "mixes number types"),
        (tensors | {"start.0": start.to(torch.int64)}, "torch.int64 in start.0"),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            opened(changed)
        assert "\n" not in str(refused.value)
    zero = dataclasses.replace(layer.spec, retention="zero")
    with pytest.raises(ValueError, match=r"start.0 has shape .* but none is expected \(and 1 more\)"):
        opened(tensors, zero)
    with pytest.raises(ValueError, match=r"start\.0 has shape none"):
        opened({name: x for name, x in tensors.items() if not name.startswith("start.")})


# Files and other initial weights ------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("case", ["towards the start", "towards the start, online", "towards the start, muon"])
def test_a_loaded_state_resumes_in_its_own_layer_and_is_refused_by_one_with_another_w0(case, tmp_path):
    layer, x = build(case), some(2, 9, 12)
    layer.write(x).save(tmp_path / "state")
    loaded = MemoryState.load(tmp_path / "state", layer.spec)
    right, _ = layer(x, layer.write(x))
    for tokens in (1, 9):
        y, after = layer(x[:, :tokens], loaded)
        assert_close(y, right[:, :tokens], 1e-10)
        assert loaded.start_from_file and not after.start_from_file  # compared once, not at every token
    other = build(case)
    other.W0[0][:, 0] += 0.01
    copies = loaded.clone(), loaded.select([0, 1]), MemoryState.stack([loaded.select([0]), layer.write(x[:1])])
    for state in (loaded, *copies):
        for call in (other, lambda x, state: other(x[:, :1], state), other.read, other.write):
            with pytest.raises(ValueError, match="initial weights that are not this layer's") as refused:
                call(x, state)
            assert "\n" not in str(refused.value)
    other(x, layer.write(x))  # a state that was not loaded goes on with the start it has


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_loaded_state_fits_its_layer_in_another_precision(dtype, tmp_path):
    torch.manual_seed(0)
    layer, x = NeuralMemory(32, heads=2, retention="start"), some(1, 9, 32, dtype=torch.float32)
    layer.write(x).save(tmp_path / "state")
    layer = layer.to(dtype)
    y, _ = layer(x.to(dtype), MemoryState.load(tmp_path / "state"))
    assert y.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("name", ["titans-lmm", "titans-mac", "atlas-mag"])
def test_a_loaded_cache_is_refused_by_a_model_with_another_w0(name, tmp_path):
    torch.manual_seed(0)
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, memory_retention="start")
    model = MnemosForCausalLM(presets.config(name, "nano", **small)).eval()
    ids = torch.randint(0, 64, (2, 12))
    model.state(ids).save(tmp_path / "cache")
    cache = MnemosCache.load(tmp_path / "cache", model.config)
    right = model(ids[:, :1], past_key_values=model.state(ids)).logits
    assert_close(model(ids[:, :1], past_key_values=cache).logits, right, 1e-6)
    model.model.layers[1].mixer.memory.W0[0].mul_(1.01)
    for tokens in (1, 5):
        with pytest.raises(ValueError, match="initial weights that are not this layer's"):
            model(ids[:, :tokens], past_key_values=cache)
    model(ids[:, :1], past_key_values=cache.with_any_start())


# Long streams -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def learned(layer: NeuralMemory, state: MemoryState) -> float:
    """By how much the inner loss of a chunk falls while it is shown six times."""
    chunk, losses = some(1, layer.spec.chunk_size, 64, seed=1, dtype=torch.float32), []
    for _ in range(6):
        _, state, trace = layer(chunk, state, trace=True)
        losses.append(trace.surprise.mean().item())
    return losses[0] - losses[-1]


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 2])
def test_a_network_still_learns_after_20000_tokens_if_it_forgets_towards_its_start(heads):
    noise = some(1, 313 * 64, 64, dtype=torch.float32)
    found = {}
    for retention in ("zero", "start"):
        torch.manual_seed(0)
        layer = NeuralMemory(dim=64, heads=heads, retention=retention)
        found[retention] = learned(layer, layer.write(noise)) / learned(layer, layer.initial_state(1))
    assert found["start"] >= 0.8 and found["zero"] < 0.1, found
