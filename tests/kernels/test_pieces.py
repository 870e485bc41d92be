"""A block reads a piece of some tokens as one call of a kernel: what token after token gives, wherever chunks end in it."""

from __future__ import annotations

import pytest
import torch
from decoding import tensors

from helpers import assert_close, needs_kernel
from mnemos.backends.cpu import token
from mnemos.models import MnemosForCausalLM, presets

pytestmark = needs_kernel

START = {"memory_retention": "start"}
FAMILY = {
    "lmm": ("titans-lmm", {}),
    "lmm, three maps, wide heads": ("titans-lmm", {"memory_depth": 3, "memory_heads": 1, "memory_expansion": 2.5}),
    "lmm, gated": ("titans-lmm", {"memory_structure": "gated_mlp"}),
    "lmm, gated, before": ("titans-lmm", {"memory_structure": "gated_mlp", "memory_read": "before", **START}),
    "lmm, linear": ("titans-lmm", {"memory_structure": "linear"}),
    "lmm, dot": ("titans-lmm", {"memory_structure": "linear", "memory_objective": "dot"}),
    "lmm, no momentum": ("titans-lmm", {"memory_momentum": False}),
    "lmm, no decay": ("titans-lmm", {"memory_retain": False, "memory_momentum": False}),
    "lmm, fixed retain": ("titans-lmm", {"memory_retain": "fixed", **START}),
    "lmm, residual": ("titans-lmm", {"memory_residual": True}),
    "lmm, start not read": ("titans-lmm", {"memory_residual": True, "memory_w0_branch": False}),
    "lmm, token gate": ("titans-lmm", {"memory_gate": "token"}),
    "lmm, no convolution": ("titans-lmm", {"memory_conv_width": 0}),
    "lmm, chunks of one token": ("titans-lmm", {"memory_chunk_size": 1}),
    "lmm, no output gate": ("titans-lmm", {"memory_output_gate": False}),
    "mag": ("titans-mag", {}),
    "mag, additive": ("titans-mag", {"gate_mode": "additive"}),
    "mag, convolution": ("titans-mag", {"attention_conv_width": 4}),
    "mal": ("titans-mal", {}),
    "mal, convolution of one token": ("titans-mal", {"attention_conv_width": 1}),
    "swa": ("swa", {}),
    "swa, convolution": ("swa", {"attention_conv_width": 3}),
}


def small(name: str, **choices) -> MnemosForCausalLM:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=40, num_attention_heads=2, num_hidden_layers=2, attention_window=6)
    if name != "swa":
        sizes |= {"memory_chunk_size": 5}
    model = MnemosForCausalLM(presets.config(name, "nano", **(sizes | choices))).eval().double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    return model


def everything(cache) -> list[torch.Tensor]:
    states = [state for layer in cache.layers for state in layer.values()]
    return [x for state in states for x in (*state.tensors().values(), *getattr(state, "anchor", ()))]


@pytest.fixture
def calls(monkeypatch):
    """The numbers of tokens of all calls of the block's kernel."""
    found, block = [], token.block
    monkeypatch.setattr(token, "block", lambda x, *a, **k: (found.append(x.shape[1]), block(x, *a, **k))[1])
    return found


@torch.no_grad()
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", FAMILY)
def test_pieces_of_any_size_give_what_token_after_token_gives(name, batch, inplace, calls):
    preset, choices = FAMILY[name]
    model, ids = small(preset, **choices), torch.randint(0, 64, (batch, 40))
    with torch.enable_grad():  # keeps the kernels away
        right = model(ids, use_cache=True)
    cache, logits, at = model.state(ids[:, :3]), [], 3
    calls.clear()
    for size in (2, 5, 3, 12, 1, 7, 4, 3):  # chunks of 5 end within pieces, with them, and between them
        cache.inplace = inplace
        held, before = everything(cache), [x.clone() for x in everything(cache)]
        output = model(ids[:, at : at + size], past_key_values=cache, use_cache=True)
        assert inplace or all(torch.equal(x, y) for x, y in zip(held, before))
        cache, at = output.past_key_values, at + size
        logits.append(output.logits)
    assert at == 40 and calls == [size for size in (2, 5, 3, 12, 1, 7, 4, 3) for _ in range(2)]
    assert_close(torch.cat(logits, 1), right.logits[:, 3:], 1e-9)
    expected = right.past_key_values.detach()
    assert all(a.chunk_offset == b.chunk_offset for a, b in memories(cache, expected))
    for found, x in zip(everything(cache), everything(expected), strict=True):
        assert_close(found, x, 1e-9)


def memories(*caches):
    return list(zip(*([layer["memory"] for layer in c.layers if "memory" in layer] for c in caches)))


@torch.no_grad()
def test_pieces_in_single_precision_are_exact_to_rounding(calls):
    model, ids = small("titans-mag").float(), torch.randint(0, 64, (1, 60))
    one = piece = model.state(ids[:, :9])
    for t in range(9, 60):
        output = model(ids[:, t : t + 1], past_key_values=one, use_cache=True)
        one = output.past_key_values
    calls.clear()
    found = model(ids[:, 9:], past_key_values=piece, use_cache=True)
    assert calls == [51, 51]
    assert_close(found.logits[:, -1], output.logits[:, -1], 1e-4)
    for a, b in zip(everything(found.past_key_values), everything(one), strict=True):
        assert_close(a, b, 1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "preset, choices", [("omeganet", {}), ("atlas-mag", {}), ("titans-mag", {"memory_features": "monomials"})]
)
def test_memories_that_the_kernel_reads_only_token_by_token_go_another_way(preset, choices, calls):
    model, ids = small(preset, **choices), torch.randint(0, 64, (1, 20))
    right = model(ids).logits
    cache = model.state(ids[:, :9])
    calls.clear()
    assert_close(model(ids[:, 9:], past_key_values=cache, use_cache=True).logits, right[:, 9:], 1e-8)
    assert not calls


@torch.no_grad()
def test_rows_at_different_positions_go_another_way(calls):
    model, ids = small("titans-mag"), torch.randint(0, 64, (1, 30))
    cache = type(model.state(ids)).stack([model.state(ids[:, :9]), model.state(ids[:, :12])])
    calls.clear()
    both = model(torch.cat([ids[:, 9:14], ids[:, 12:17]]), past_key_values=cache, use_cache=True).logits
    assert not calls
    right = model(ids).logits
    assert_close(both, torch.cat([right[:, 9:14], right[:, 12:17]]), 1e-8)


@torch.no_grad()
def test_a_piece_with_a_gate_that_is_not_finite_is_refused_and_changes_nothing():
    model, ids = small("titans-mag"), torch.randint(0, 64, (1, 20))
    cache = model.state(ids[:, :9])
    model.model.layers[0].mixer.memory.gating.offset.fill_(float("nan"))
    held = everything(cache)
    before = [x.clone() for x in held]
    with pytest.raises(ValueError, match="lr"):
        model(ids[:, 9:], past_key_values=cache.with_inplace(True), use_cache=True)
    assert all(torch.equal(x, y) for x, y in zip(held, before))


@torch.no_grad()
def test_any_number_of_threads_reads_the_same_bits():
    token.share_from(1, 1)
    model, ids = small("titans-mag"), torch.randint(0, 64, (2, 30))
    cache, found, before = model.state(ids[:, :7]), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            output = model(ids[:, 7:], past_key_values=cache, use_cache=True)
            memory = output.past_key_values.layers[0]["memory"]
            found.append([output.logits, *tensors(memory)])
    finally:
        torch.set_num_threads(before)
        token.share_from()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


@torch.no_grad()
def test_a_hook_on_a_part_is_called_for_pieces_too():
    model, ids, heard = small("titans-mag"), torch.randint(0, 64, (1, 20)), []
    cache = model.state(ids[:, :9])
    model.model.layers[1].mixer.memory.register_forward_hook(lambda module, given, output: heard.append(given[0].shape))
    model(ids[:, 9:], past_key_values=cache, use_cache=True)
    assert heard == [(1, 11, 40)]
