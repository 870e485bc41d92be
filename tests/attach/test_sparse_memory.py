"""Attached memories with gating="sparse", as the adapter of examples/smollm_facts has them."""

from __future__ import annotations

import pytest
import torch
from tiny_models import attached, base_model, left_padded, tokens

from mnemos.attach import load_adapter, save_adapter

MEMORY = {
    "preset": "deltanet",
    "heads": 2,
    "key_dim": 5,
    "features": "monomials",
    "degree": 2,
    "gating": "sparse",
    "gate": "token",
    "gate_hidden": 8,
    "conv_width": 6,
    "chunk_size": 8,
}


def sparse(**fields):
    """A model whose memories write and read some tokens and leave out others."""
    model = attached(layers=[3], source=1, memory=dict(MEMORY), **fields)
    torch.manual_seed(5)
    with torch.no_grad():
        for memory in model.memories.values():
            for part in (memory.memory.gating.token, memory.memory.gating.read):
                part.weight.normal_(std=3.0)
            memory.memory.gating.read_offset.fill_(-2.2)  # reads begin half open
    return model


@torch.no_grad()
def test_logits_equal_those_of_the_base_exactly_before_training():
    base, model = base_model(), sparse(trained=False)
    padded, mask = left_padded(tokens(3, 20), [0, 5, 11])
    expected = base(padded, attention_mask=mask, use_cache=False).logits
    assert torch.equal(model(padded, attention_mask=mask, use_cache=False).logits, expected)


@torch.no_grad()
def test_logits_of_tokens_that_read_nothing_equal_those_of_the_base_exactly():
    base, model, ids = base_model(), sparse(), tokens(2, 40)
    expected, found = base(ids, use_cache=False).logits, model(ids, use_cache=False).logits
    same = (expected == found).all(-1)
    assert same.any() and not same.all()


@torch.no_grad()
def test_decoding_equals_one_forward():
    model, ids = sparse(window=8, sinks=2), tokens(2, 30)
    whole = model(ids, use_cache=False).logits
    cache, parts = model.new_cache(), []
    for begin, end in ((0, 11), (11, 12), (12, 13), (13, 30)):
        parts.append(model(ids[:, begin:end], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_left_padding_changes_no_logits():
    model, ids = sparse(window=8, sinks=2), tokens(3, 20)
    padded, mask = left_padded(ids, [0, 5, 11])
    found = model(padded, attention_mask=mask, use_cache=False).logits
    for row, begin in enumerate((0, 5, 11)):
        alone = model(padded[row : row + 1, begin:], use_cache=False).logits
        torch.testing.assert_close(found[row : row + 1, begin:], alone, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("what", ["writes", "reads"])
@torch.no_grad()
def test_without_writes_or_without_reads_logits_are_those_of_the_base(what):
    base, model, ids = base_model(), sparse(), tokens(2, 40)
    with model.memory.knock_out(what):
        assert torch.equal(model(ids, use_cache=False).logits, base(ids, use_cache=False).logits)


@torch.no_grad()
def test_an_adapter_and_a_state_are_saved_and_loaded(tmp_path):
    model, ids = sparse(window=8, sinks=2), tokens(2, 30)
    cache = model.state(ids[:, :20])
    model.save_state(cache, tmp_path / "state.safetensors")
    save_adapter(model, tmp_path / "adapter.safetensors")
    other = load_adapter(base_model(), tmp_path / "adapter.safetensors")
    opened = other.load_state(tmp_path / "state.safetensors")
    expected = model(ids[:, 20:], past_key_values=cache, use_cache=True).logits
    assert torch.equal(other(ids[:, 20:], past_key_values=opened, use_cache=True).logits, expected)
