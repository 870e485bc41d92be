"""With a window: attention sees its window and the sinks alone, whatever the calls, and its cache is a ring of constant size."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ARCHITECTURES, attached, base_model, left_padded, shared, tokens

from helpers import assert_close

WINDOW, SINKS = 6, 2
OPTIONS = {"window": WINDOW, "sinks": SINKS}


def seen(length: int, window: int, sinks: int) -> torch.Tensor:
    """(1, 1, T, T), True where a token sees another."""
    i, j = torch.arange(length).unsqueeze(1), torch.arange(length)
    return ((j <= i) & ((i - j < window) | (j < sinks)))[None, None]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("window, sinks", [(6, 2), (6, 0), (1, 3), (30, 4), (7, 9)])
@torch.no_grad()
def test_attention_equals_a_dense_mask(implementation, window, sinks):
    base, model = base_model(), attached(trained=False, window=window, sinks=sinks)
    base.set_attn_implementation(implementation)
    model.set_attn_implementation(implementation)
    ids, mask = tokens(2, 23), seen(23, window, sinks)
    if implementation == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert_close(model(ids).logits, base(ids, attention_mask=mask).logits, 2e-6)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_decoding_token_by_token_and_any_split_equal_one_forward(name):
    model, ids = attached(name, **OPTIONS), tokens(2, 26)
    expected = model(ids, use_cache=False).logits
    for split in ([1] * 26, [5, 1, 1, 13, 1, 5]):
        cache = model.new_cache()
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(split, 1)]
        assert_close(torch.cat(parts, 1), expected, 5e-6, str(split))


@pytest.mark.parametrize("fields", [{}, OPTIONS], ids=["full", "window"])
@pytest.mark.parametrize("memory", ["titans", "omeganet", "atlas", "deltanet", "yaad"])
@torch.no_grad()
def test_decoding_equals_one_forward_for_every_kind_of_memory(memory, fields):
    chosen = {"preset": memory, "heads": 2, "chunk_size": 8}
    model, ids = attached(memory=chosen, **fields), tokens(2, 21)
    expected, cache = model(ids, use_cache=False).logits, model.new_cache()
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([7] + [1] * 14, 1)]
    assert_close(torch.cat(parts, 1), expected, 1e-4)


@pytest.mark.parametrize("fields", [{}, OPTIONS], ids=["full", "window"])
@torch.no_grad()
def test_padded_rows_equal_the_rows_alone(fields):
    model, ids = shared(**fields), tokens(3, 20)
    padded, mask = left_padded(ids, [0, 5, 13])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(padded, attention_mask=mask, position_ids=positions).logits
    for row, skip in enumerate([0, 5, 13]):
        assert_close(found[row, skip:], model(ids[row : row + 1, skip:]).logits[0], 5e-6)


@torch.no_grad()
def test_padding_in_the_middle_is_skipped_by_attention_and_memory():
    """As in a batch of conversations, whose turns have different lengths."""
    model, ids = shared(**OPTIONS), tokens(2, 24)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 9:14] = 0
    cache = model.new_cache()
    parts = [
        model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits for a, b in ((0, 12), (12, 24))
    ]
    alone = model(ids[1:, mask[1].bool()]).logits[0]
    assert_close(torch.cat(parts, 1)[1][mask[1].bool()], alone, 5e-6)
    assert cache.position.tolist() == [24, 19]


@pytest.mark.parametrize("fields", [{}, OPTIONS], ids=["full", "window"])
@torch.no_grad()
def test_packed_documents_equal_the_documents_alone(fields):
    model, ids = shared(**fields), tokens(1, 30)
    found = model(ids, cu_seqlens=torch.tensor([0, 4, 19, 30]), use_cache=False).logits
    positions = torch.cat([torch.arange(n) for n in (4, 15, 11)]).unsqueeze(0)
    assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, found)
    for a, b in ((0, 4), (4, 19), (19, 30)):
        assert_close(found[:, a:b], model(ids[:, a:b], use_cache=False).logits, 5e-6)


@pytest.mark.parametrize("fields", [{}, OPTIONS], ids=["full", "window"])
@torch.no_grad()
def test_later_tokens_change_earlier_logits_by_exactly_zero(fields):
    model, ids = shared(**fields), tokens(2, 24)
    expected = model(ids, use_cache=False).logits
    for t in (1, 5, 6, 8, 17, 23):
        other = ids.clone()
        other[:, t:] = tokens(2, 24 - t, seed=t)
        found = model(other, use_cache=False).logits
        assert torch.equal(found[:, :t], expected[:, :t])
        assert not torch.equal(found[:, t:], expected[:, t:])


@torch.no_grad()
def test_information_beyond_every_window_passes_through_the_memory_alone():
    """Four layers of windows of 4 reach 13 tokens back; without sinks, only a memory reaches further."""
    model, ids = attached(window=4, sinks=0), tokens(1, 40)
    other = ids.clone()
    other[0, 3] = (ids[0, 3] + 1) % 61
    assert not torch.equal(model(ids).logits[:, 30:], model(other).logits[:, 30:])
    with model.memory.knock_out("reads"):
        assert torch.equal(model(ids).logits[:, 30:], model(other).logits[:, 30:])


@torch.no_grad()
def test_the_state_has_a_constant_size_beyond_the_window():
    model, sizes = shared(**OPTIONS), set()
    cache = model.new_cache()
    for part in tokens(2, 120).split([10] * 10 + [1] * 20, 1):
        model(part, past_key_values=cache)
        sizes.add(cache.nbytes)
    assert len(sizes) == 1
    assert all(layer.keys.shape[2] == WINDOW + SINKS for layer in cache.layers)


@torch.no_grad()
def test_a_base_with_a_shorter_window_of_its_own_keeps_it():
    model = attached("Mistral", trained=False, window=16, sinks=2)  # its own window is 9
    assert model.limits == [(9, 0, None)] * 4
    base, ids = base_model("Mistral"), tokens(2, 30)
    assert_close(model(ids).logits, base(ids).logits, 2e-6)


def test_gradients_with_checkpointing_equal_those_without():
    ids, grads = tokens(2, 24), []
    for checkpointing in (False, True):
        model = attached(**OPTIONS).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids, attention_mask=left_padded(ids, [0, 6])[1]).loss.backward()
        grads.append([p.grad for p in model.memories.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert all(grad.abs().max() > 0 for grad in grads[0])


def test_a_window_refuses_attention_without_masks():
    model = shared(**OPTIONS)
    with pytest.raises(ValueError, match="'sdpa' or 'eager', but the model has 'flash_attention_2'"):
        model.set_attn_implementation("flash_attention_2")
