"""Generating: beams, samples, streams and conversations, with caches that go on exactly."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from zoo import KINDS, OTHER_RETENTION, each_block, logits, make, model_of, tokens

from helpers import assert_close, randomise
from mnemos.models.cache_io import to_tensors


@pytest.mark.parametrize("name", [*KINDS, *OTHER_RETENTION])
def test_beam_search_with_a_cache_is_beam_search_without(name):
    model, ids = model_of(name), tokens(2, 10)
    options = dict(num_beams=3, max_new_tokens=8, do_sample=False, num_return_sequences=2)
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@each_block
def test_sampling_with_a_cache_is_sampling_without(name):
    model, ids = model_of(name), tokens(2, 10)
    options = dict(do_sample=True, top_k=20, top_p=0.9, min_p=0.02, temperature=1.3, max_new_tokens=8)
    found = []
    for cached in (True, False):
        torch.manual_seed(1)
        found.append(model.generate(ids, use_cache=cached, num_return_sequences=3, **options))
    assert torch.equal(*found) and found[0].shape == (6, 18)


@each_block
def test_generating_from_embeddings_is_generating_from_tokens(name):
    model, ids = model_of(name), tokens(2, 10)
    embedded = model.get_input_embeddings()(ids).detach()
    found = model.generate(inputs_embeds=embedded, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, model.generate(ids, max_new_tokens=4, do_sample=False)[:, 10:])


@each_block
def test_a_row_without_tokens_stays_where_it_was(name):
    model, ids = model_of(name), tokens(2, 12)
    half = torch.tensor([[1], [0]]).expand(2, 12)
    with torch.no_grad():
        cache = model(ids, attention_mask=half, use_cache=True).past_key_values
        found = model(ids, past_key_values=cache, use_cache=True)
        cache = model(ids, past_key_values=found.past_key_values, attention_mask=half, use_cache=True).past_key_values
        last = model(ids, past_key_values=cache)
    assert_close(found.logits[1], logits(model, ids)[1], 1e-9)
    assert_close(last.logits[1], logits(model, torch.cat([ids, ids], 1))[1, 12:], 1e-9)
    assert_close(last.logits[0], logits(model, torch.cat([ids] * 4, 1))[0, 36:], 1e-9)


def test_streaming_and_stopping():
    class Recorder(BaseStreamer):
        def __init__(self):
            self.ids, self.ended = [], False

        def put(self, value):
            self.ids += value.flatten().tolist()

        def end(self):
            self.ended = True

    class Enough(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 14)

    model, ids, streamer = model_of("atlas-mag"), tokens(1, 10), Recorder()
    everything = dict(attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    out = model.generate(ids, streamer=streamer, stopping_criteria=StoppingCriteriaList([Enough()]), **everything)
    assert out.shape == (1, 14) and streamer.ids == out[0].tolist() and streamer.ended
    end = out[0, 11].item()
    stopped = model.generate(ids, eos_token_id=end, pad_token_id=0, **everything)
    assert stopped[0].tolist() == out[0, : out[0, 10:].tolist().index(end) + 11].tolist()


@each_block
def test_a_conversation_goes_on_from_its_cache_with_only_the_new_tokens(name):
    model, first, second = model_of(name), tokens(2, 9), tokens(2, 20, seed=4)
    options = dict(max_new_tokens=5, do_sample=False)
    out = model.generate(first, return_dict_in_generate=True, **options)
    cache, said = out.past_key_values, out.sequences
    assert cache.get_seq_length() == said.shape[1] - 1  # the last token was never read
    everything = torch.cat([said, second], 1)
    expected = model.generate(everything, **options)
    new = everything[:, cache.get_seq_length() :]
    for mask in ({}, dict(attention_mask=torch.ones_like(everything))):
        found = model.generate(new, past_key_values=cache, **mask, **options)
        assert torch.equal(found[:, -5:], expected[:, -5:]), list(mask)
    few = new[:, :3]
    expected = model.generate(torch.cat([said[:, :-1], few], 1), **options)[:, -5:]
    for mask in ({}, dict(attention_mask=torch.ones_like(few))):
        assert torch.equal(model.generate(few, past_key_values=cache, **mask, **options)[:, -5:], expected)


@each_block
def test_generate_writes_only_into_caches_of_its_own(name):
    model, ids = model_of(name), tokens(2, 19)
    before = model.state(ids)
    copy = before.clone()
    options = dict(max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    out = model.generate(tokens(2, 1), past_key_values=before, **options)
    again = model.generate(tokens(2, 1), past_key_values=before, **options)
    assert torch.equal(out.sequences, again.sequences)
    for one, two in zip(before.layers, copy.layers):
        for key in one:
            for a, b in zip(to_tensors(one[key])[0].values(), to_tensors(two[key])[0].values()):
                assert torch.equal(a, b)
    after = [model.generate(tokens(2, 1), past_key_values=out.past_key_values, **options) for _ in range(2)]
    assert torch.equal(after[0].sequences, after[1].sequences)


@each_block
def test_a_model_in_training_with_checkpointing_generates_what_it_does_in_evaluation(name):
    model, ids = randomise(make(name), scale=0.15), tokens(2, 10)
    options = dict(max_new_tokens=6, do_sample=False)
    expected = model.generate(ids, **options)
    model.train().gradient_checkpointing_enable()
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(
        model.generate(ids[:, 7:], past_key_values=model.state(ids[:, :7]), **options)[:, 3:], expected[:, 10:]
    )


@each_block
def test_one_cache_serves_many_continuations(name):
    model, ids = model_of(name), tokens(1, 17)
    cache = model.state(ids)
    options = dict(max_new_tokens=6, num_return_sequences=4, do_sample=True)
    torch.manual_seed(0)
    found = model.generate(tokens(1, 2, seed=1), past_key_values=cache, **options)
    torch.manual_seed(0)
    expected = model.generate(torch.cat([ids, tokens(1, 2, seed=1)], 1), **options)
    assert torch.equal(found, expected[:, 17:])


def test_a_long_prompt_can_be_read_in_chunks():
    model, ids = model_of("titans-mac"), tokens(2, 50)
    cache = None
    for part in ids[:, :-1].split(13, 1):
        cache = model.state(part, cache)
    found = model.generate(ids[:, -1:], past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(found[:, 1:], model.generate(ids, max_new_tokens=4, do_sample=False)[:, 50:])
