"""Memories that read the input of one early layer: `source`."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ARCHITECTURES, MEMORY, attached, base_model, left_padded, tokens

from mnemos.attach import AttachConfig, attach, load_adapter, save_adapter


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_logits_with_a_source_equal_those_of_the_base_exactly_before_training(name):
    base, model = base_model(name), attached(name, trained=False, layers=[1, 3], source=0)
    padded, mask = left_padded(tokens(3, 20), [0, 5, 11])
    expected = base(padded, attention_mask=mask, use_cache=False).logits
    assert torch.equal(model(padded, attention_mask=mask, use_cache=False).logits, expected)


@torch.no_grad()
def test_a_source_equal_to_the_layer_itself_changes_nothing():
    ids = tokens(2, 20)
    own, named = attached(layers=[2]), attached(layers=[2], source=2)
    named.load_state_dict(own.state_dict())
    assert torch.equal(named(ids).logits, own(ids).logits)


@torch.no_grad()
def test_memories_read_the_source_and_not_their_own_layer():
    """What lies between source and memory changes the stream, and nothing in the state of the memory."""
    model, ids = attached(layers=[3], source=1), tokens(2, 20)
    before = model.state(ids)
    model.base.model.layers[2].mlp.down_proj.weight.mul_(2.0)
    after = model.state(ids)
    assert all(torch.equal(a, after.memory[3].tensors()[n]) for n, a in before.memory[3].tensors().items())
    model.base.model.layers[0].mlp.down_proj.weight.mul_(2.0)
    changed = model.state(ids)
    assert not all(torch.equal(a, changed.memory[3].tensors()[n]) for n, a in before.memory[3].tensors().items())


@torch.no_grad()
def test_decoding_with_a_source_equals_one_forward():
    model, ids = attached(layers=[2, 3], source=1, window=8, sinks=2), tokens(2, 30)
    whole = model(ids, use_cache=False).logits
    cache, parts = model.new_cache(), []
    for begin, end in ((0, 11), (11, 12), (12, 13), (13, 30)):
        parts.append(model(ids[:, begin:end], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-4, rtol=1e-4)


def test_training_with_a_source_gives_equal_gradients_with_gradient_checkpointing():
    model, ids = attached(layers=[2, 3], source=1).train(), tokens(2, 16)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.memories.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for a, b in zip(gradients(), plain):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_an_adapter_keeps_its_source(tmp_path):
    model, ids = attached(layers=[3], source=1), tokens(2, 12)
    save_adapter(model, tmp_path / "a.safetensors")
    loaded = load_adapter(base_model(), tmp_path / "a.safetensors")
    assert loaded.attach_config.source == 1
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_source_behind_a_memory_or_of_another_kind_raises_an_error():
    with pytest.raises(ValueError, match="source=3 must not lie behind 1"):
        attach(base_model(), AttachConfig(layers=[1, 3], source=3, memory=dict(MEMORY)))
    for wrong in (-1, 1.0, True, "2"):
        with pytest.raises(ValueError, match="source="):
            AttachConfig(source=wrong)
