"""`model.memory`: scale, reset, frozen writes, and knock-outs, which must change the output where a memory matters."""

from __future__ import annotations

import pytest
import torch
from tiny_models import attached, base_model, shared, tokens

from helpers import assert_close, relative_rms

WINDOWED = {"window": 6, "sinks": 2}
BOTH = pytest.mark.parametrize("fields", [{}, WINDOWED], ids=["full", "window"])


@BOTH
@pytest.mark.parametrize("what", ["writes", "reads", "swap"])
@torch.no_grad()
def test_a_knock_out_changes_the_output_and_holds_for_any_split(fields, what):
    model, ids = shared(**fields), tokens(2, 30)
    normal = model(ids).logits
    with model.memory.knock_out(what):
        whole, cache = model(ids, use_cache=False).logits, model.new_cache()
        parts = [model(part, past_key_values=cache).logits for part in ids.split([7] + [1] * 10 + [13], 1)]
    assert relative_rms(whole, normal) > 0.1
    assert_close(torch.cat(parts, 1), whole, 5e-6)
    assert torch.equal(model(ids).logits, normal), "the switches are as before"


@torch.no_grad()
def test_without_reads_the_model_is_its_base():
    model, ids = shared(), tokens(2, 20)
    model.memory.scale = 0
    try:
        assert torch.equal(model(ids).logits, base_model()(ids).logits)
    finally:
        model.memory.scale = 1
    with model.memory.knock_out("reads"):
        assert torch.equal(model(ids).logits, base_model()(ids).logits)


@torch.no_grad()
def test_memories_that_add_nothing_are_not_computed_where_no_state_is_kept():
    model, ids, computed = attached(**WINDOWED), tokens(2, 20), []
    for i, added in model.memories.items():
        added.memory.register_forward_pre_hook(lambda *_, i=i: computed.append(i))
    with model.memory.knock_out("reads"):
        expected, cache = model(ids, use_cache=False).logits, model.new_cache()
        assert computed == []
        assert_close(model(ids, past_key_values=cache).logits, expected, 5e-6)
    assert computed == list(model.memories)


@torch.no_grad()
def test_swapped_rows_read_each_others_memory():
    """With equal rows nothing changes; with others, a row's output depends on the tokens of the next row."""
    model, ids = shared(**WINDOWED), tokens(2, 20)
    same = ids[:1].expand(2, -1)
    expected = model(same).logits
    with model.memory.knock_out("swap"):
        assert_close(model(same).logits, expected, 5e-6)
        other = ids.clone()
        other[1, 3] = (ids[1, 3] + 1) % 61
        assert not torch.equal(model(ids).logits[0], model(other).logits[0])
        with pytest.raises(ValueError, match="two rows or more"):
            model(ids[:1])


@torch.no_grad()
def test_frozen_writes_leave_the_state_as_it_was():
    model, ids = attached(**WINDOWED), tokens(2, 24)
    cache = model.state(ids[:, :12])
    before = {i: [w.clone() for w in state.weights] for i, state in cache.memory.items()}
    model.memory.freeze_writes()
    model(ids[:, 12:], past_key_values=cache)
    for i, state in cache.memory.items():
        assert all(torch.equal(a, b) for a, b in zip(state.weights, before[i])) and state.position.tolist() == [12, 12]
    assert cache.position.tolist() == [24, 24]
    model.memory.freeze_writes(False)
    model(ids, past_key_values=cache)
    assert not torch.equal(cache.memory[1].weights[0], before[1][0])


@torch.no_grad()
def test_reset_lets_the_memories_of_caches_begin_again_and_keeps_attention():
    model, ids = attached(**WINDOWED), tokens(2, 24)
    kept, lone = model.state(ids[:, :12]), model.state(ids[:, :12])
    model.memory.reset(lone)
    expected = model(ids[:, 12:], past_key_values=lone).logits
    model.memory.reset()
    assert torch.equal(model(ids[:, 12:], past_key_values=kept).logits, expected)
    assert kept.position.tolist() == [24, 24] and kept.memory[1].position.tolist() == [12, 12]


def test_wrong_switches_are_refused():
    memory = attached().memory
    for wrong in (-0.1, 1.5, "half", True, float("nan")):
        with pytest.raises(ValueError, match=r"must be a number in 0\.\.1"):
            memory.scale = wrong
    with pytest.raises(ValueError, match="knock_out 'read' is unknown; did you mean reads"), memory.knock_out("read"):
        pass
