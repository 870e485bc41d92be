"""Before training, an attached model is its base model, to the bit, and the base model's weights stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import ARCHITECTURES, attached, base_model, left_padded, tokens

from mnemos.attach.identity import base_hash


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_logits_equal_those_of_the_base_exactly(name):
    base, model = base_model(name), attached(name, trained=False)
    ids = tokens(3, 20)
    assert torch.equal(model(ids, use_cache=False).logits, base(ids, use_cache=False).logits)
    padded, mask = left_padded(ids, [0, 5, 11])
    expected = base(padded, attention_mask=mask, use_cache=False).logits
    assert torch.equal(model(padded, attention_mask=mask, use_cache=False).logits, expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_logits_with_a_cache_equal_those_of_the_base_exactly(name):
    base, model = base_model(name), attached(name, trained=False)
    padded, mask = left_padded(tokens(3, 20), [0, 5, 11])
    theirs, ours = None, None
    for end, begin in ((13, 0), (14, 13), (20, 14)):
        inputs = {"input_ids": padded[:, begin:end], "attention_mask": mask[:, :end], "use_cache": True}
        theirs = base(**inputs, past_key_values=None if theirs is None else theirs.past_key_values)
        ours = model(**inputs, past_key_values=None if ours is None else ours.past_key_values)
        assert torch.equal(ours.logits, theirs.logits)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_generate_equals_that_of_the_base(name):
    base, model = base_model(name), attached(name, trained=False)
    padded, mask = left_padded(tokens(2, 12), [0, 5])
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True, "eos_token_id": None}
    theirs, ours = base.generate(padded, **options), model.generate(padded, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_base_weights_are_not_touched_by_attaching_or_training(name):
    base = base_model(name)
    before = base_hash(base)
    model = attached(name, trained=False)
    assert base_hash(model.base) == before
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in model.memories.parameters()}
    optimiser = torch.optim.AdamW(trained, lr=0.1)
    for _ in range(2):
        ids = tokens(2, 16)
        model(ids, labels=ids).loss.backward()
        optimiser.step()
    assert base_hash(model.base) == before
    assert all(torch.equal(a, b) for a, b in zip(model.base.parameters(), base.parameters()))


def test_the_gate_has_a_gradient_at_the_first_step_and_the_memory_from_the_second_on():
    model = attached(trained=False).train()
    ids = tokens(2, 16)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        optimiser.zero_grad()
        model(ids, labels=ids).loss.backward()
        for memory in model.memories.values():
            assert memory.gate.grad.abs().min() > 0
            assert (memory.memory.qkv.weight.grad.abs().max() > 0) == (step > 0)
        optimiser.step()


@torch.no_grad()
def test_packed_documents_equal_those_of_the_base_exactly():
    base, model = base_model(), attached(trained=False)
    ids, positions = tokens(1, 20), torch.cat([torch.arange(7), torch.arange(13)]).unsqueeze(0)
    expected = base(ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, expected)
    assert torch.equal(model(ids, cu_seqlens=torch.tensor([0, 7, 20]), use_cache=False).logits, expected)


@torch.no_grad()
def test_inside_the_window_a_windowed_model_equals_its_base():
    base, model = base_model(), attached(trained=False, window=20)
    ids = tokens(2, 20)
    assert (model(ids).logits - base(ids).logits).abs().max() < 1e-5


@torch.no_grad()
def test_the_base_of_a_windowed_model_has_full_attention():
    """So that it can teach the windowed one."""
    base, model = base_model(), attached(window=5)
    padded, mask = left_padded(tokens(2, 20), [0, 6])
    assert torch.equal(model.base(padded, attention_mask=mask).logits, base(padded, attention_mask=mask).logits)


@torch.no_grad()
def test_a_deep_copy_has_its_own_memories():
    model = attached()
    ids = tokens(2, 16)
    expected, other = model(ids).logits, copy.deepcopy(model)
    for memory in model.memories.values():
        memory.gate.zero_()
    assert torch.equal(other(ids).logits, expected)
    assert not torch.equal(model(ids).logits, expected)
