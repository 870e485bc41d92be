"""Generating from a past reads every new token, once, and no other; nothing that was said is lost between two turns."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from helpers import assert_close, randomise
from mnemos.models import MnemosCache, MnemosConfig, MnemosForCausalLM
from mnemos.models.cache_io import to_tensors

VOCAB, PAST, NEW = 61, 16, 6
GREEDY = dict(max_new_tokens=NEW, do_sample=False)
each_block = pytest.mark.parametrize("layers", ["lmm", "mag", "mac", "attention"])


@functools.cache
def model_of(layers: str) -> MnemosForCausalLM:
    torch.manual_seed(0)
    config = MnemosConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        layers=layers,
        attention_window=8,
        segment_length=8,
        memory_heads=2,
        memory_chunk_size=8,
    )
    return randomise(MnemosForCausalLM(config).double().eval(), scale=0.15)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def answers(model, ids, **options) -> torch.Tensor:
    """What is generated behind ids, in one prompt."""
    return model.generate(ids, **GREEDY | options)[:, ids.shape[1] :]


def assert_same(model, one: MnemosCache, two: MnemosCache) -> None:
    """Both caches give the same logits for the same next tokens."""
    probe = tokens(one.batch, 5, seed=99)
    with torch.no_grad():
        assert_close(model(probe, past_key_values=one).logits, model(probe, past_key_values=two).logits, 1e-9)


@each_block
@pytest.mark.parametrize("length", [1, PAST, PAST + 1, 40])
def test_a_question_of_any_length_is_read_whole(layers, length):
    model, before, question = model_of(layers), tokens(2, PAST), tokens(2, length, seed=1)
    past = model.state(before)
    expected = answers(model, torch.cat([before, question], 1))
    ones = torch.ones_like(question)
    embedded = model.get_input_embeddings()(question).detach()
    for how in (
        dict(inputs=question),
        dict(input_ids=question),
        dict(input_ids=question, attention_mask=ones),  # what tokenizers send
        dict(input_ids=question, attention_mask=torch.cat([torch.ones_like(before), ones], 1)),
        dict(input_ids=question, attention_mask=ones.bool()),
        dict(input_ids=question, use_cache=False),
        dict(input_ids=question, attention_mask=ones, prefill_chunk_size=3),
        dict(inputs_embeds=embedded),
        dict(inputs_embeds=embedded, attention_mask=ones),
    ):
        found = model.generate(past_key_values=past, **how, **GREEDY)
        assert torch.equal(found[:, -NEW:], expected), list(how)


@each_block
def test_the_first_logits_behind_a_question_are_those_of_one_prompt(layers):
    model, before, question = model_of(layers), tokens(1, PAST), tokens(1, 25, seed=1)
    options = dict(return_dict_in_generate=True, output_logits=True)
    expected = model.generate(torch.cat([before, question], 1), **GREEDY, **options).logits
    mask = torch.ones_like(question)
    found = model.generate(question, attention_mask=mask, past_key_values=model.state(before), **GREEDY, **options)
    for one, two in zip(found.logits, expected):
        assert_close(one, two, 1e-6)  # transformers keeps logits in float32


@each_block
@pytest.mark.parametrize("length", [7, 30])
def test_a_padded_batch_of_questions_is_a_batch_of_questions(layers, length):
    model, before, question = model_of(layers), tokens(2, PAST), tokens(2, length, seed=1)
    past, short = model.state(before), length - 4
    padded = torch.cat([question[:1], torch.cat([question.new_zeros(1, 4), question[1:, :short]], 1)])
    mask = torch.ones_like(padded)
    mask[1, :4] = 0
    expected = [
        answers(model, torch.cat([before[:1], question[:1]], 1)),
        answers(model, torch.cat([before[1:], question[1:, :short]], 1)),
    ]
    both = torch.cat([torch.ones_like(before), mask], 1)
    for how in (dict(attention_mask=mask), dict(attention_mask=both), dict(pad_token_id=0)):
        found = model.generate(padded, past_key_values=past, **how, **GREEDY)[:, length:]
        assert torch.equal(found, torch.cat(expected)), list(how)


@pytest.mark.parametrize(
    "options",
    [
        dict(num_beams=3, num_return_sequences=2),
        dict(do_sample=True, top_k=20),
        dict(do_sample=True, num_return_sequences=3),
        dict(num_beams=2, do_sample=True),
    ],
)
def test_beams_and_samples_behind_a_past_are_those_of_one_prompt(options):
    model, before, question = model_of("mag"), tokens(2, PAST), tokens(2, 25, seed=1)
    found = []
    for ids, past in ((torch.cat([before, question], 1), None), (question, model.state(before))):
        torch.manual_seed(3)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=past, **GREEDY | options)
        found.append(out[:, ids.shape[1] :])
    assert torch.equal(*found)


def test_one_past_serves_several_questions_and_several_pasts_never_mix():
    model, before = model_of("mag"), tokens(2, PAST)
    past, questions = model.state(before), tokens(4, 20, seed=1)
    found = model.generate(questions, attention_mask=torch.ones_like(questions), past_key_values=past, **GREEDY)
    assert torch.equal(found[:, 20:], answers(model, torch.cat([before.repeat_interleave(2, 0), questions], 1)))
    for options in ({}, dict(num_return_sequences=2, do_sample=True), dict(num_beams=2)):  # one question, two pasts
        with pytest.raises(
            ValueError, match=r"past_key_values has 2 batch rows, but input_ids has 1; see cache\.select"
        ):
            model.generate(questions[:1], past_key_values=past, **GREEDY | options)


@pytest.mark.parametrize("columns", [1, 11, 13, PAST, PAST + 11, PAST + 13, 2 * PAST + 12])
def test_a_mask_of_any_other_length_is_refused(columns):
    model = model_of("lmm")
    past, question = model.state(tokens(1, PAST)), tokens(1, 12)
    mask = torch.ones(1, columns, dtype=torch.long)
    sentence = rf"attention_mask has shape \(1, {columns}\), but \(1, 12\) \(the new tokens\) or \(1, 28\) \(the past"
    with pytest.raises(ValueError, match=sentence):
        model.generate(question, attention_mask=mask, past_key_values=past, **GREEDY)
    with pytest.raises(ValueError, match=sentence):
        model(question, attention_mask=mask, past_key_values=past)


def test_a_mask_longer_than_its_tokens_is_refused_without_a_past():
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 9\), but \(1, 5\) is expected"):
        model_of("lmm")(tokens(1, 5), attention_mask=torch.ones(1, 9))


def test_a_past_without_new_tokens_is_refused():
    model = model_of("lmm")
    past = model.state(tokens(1, PAST))
    for how in ({}, dict(bos_token_id=3), dict(input_ids=tokens(1, 0)), dict(inputs_embeds=torch.zeros(1, 0, 32))):
        with pytest.raises(ValueError, match="input_ids must hold the new tokens"):
            model.generate(past_key_values=past, **how, **GREEDY)


def test_a_cache_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache, but must be a MnemosCache"):
        model_of("lmm").generate(tokens(1, 5), past_key_values=DynamicCache(), **GREEDY)


def test_generating_without_a_cache_leaves_the_past_as_it_is():
    model = model_of("lmm")
    past = model.state(tokens(1, PAST))
    copy = past.clone()
    model.generate(tokens(1, 3), past_key_values=past, use_cache=False, **GREEDY)
    assert not past.inplace
    model.state(tokens(1, 1), past)
    for one, two in zip(past.layers, copy.layers):
        for key in one:
            for a, b in zip(to_tensors(one[key])[0].values(), to_tensors(two[key])[0].values()):
                assert torch.equal(a, b)


@each_block
@pytest.mark.parametrize("use_cache", [True, False])
def test_three_turns_lose_no_token(layers, use_cache):
    model, past, said = model_of(layers), None, []
    for turn, length in enumerate((9, 30, 2)):
        question = tokens(1, length, seed=turn)
        out = model.generate(
            question,
            attention_mask=torch.ones_like(question),
            past_key_values=past,
            return_dict_in_generate=True,
            use_cache=use_cache,
            **GREEDY,
        )
        said.append(out.sequences)
        everything = torch.cat(said, 1)
        assert torch.equal(answers(model, everything[:, :-NEW]), everything[:, -NEW:])
        past = model.state_after(out)
        assert past.get_seq_length() == everything.shape[1]
        assert_same(model, past, model.state(everything))


@each_block
def test_the_state_after_a_batch_has_read_no_padding(layers):
    model, before, question = model_of(layers), tokens(2, PAST), tokens(2, 9, seed=2)
    past = model.state(before)
    mask = torch.ones_like(question)
    mask[1, :2] = 0
    plain = model.generate(question, attention_mask=mask, past_key_values=past, **GREEDY)[:, 9:].tolist()
    end = next(
        t for one, two in (plain, plain[::-1]) for t in one[:-1] if t not in two
    )  # one row ends, the other does not
    out = model.generate(
        question,
        attention_mask=mask,
        past_key_values=past,
        eos_token_id=end,
        pad_token_id=0,
        return_dict_in_generate=True,
        **GREEDY,
    )
    found = model.state_after(out)
    rows = []
    for row in range(2):
        generated = out.sequences[row, 9:].tolist()
        if end in generated:
            generated = generated[: generated.index(end) + 1]
        valid = question[row][mask[row].bool()].tolist()
        rows.append(model.state(torch.tensor([before[row].tolist() + valid + generated])))
    assert 0 in out.sequences[:, 9:]  # a row was padded
    assert_same(model, found, MnemosCache.stack(rows))


def test_the_state_after_a_batch_that_a_criterion_ended_has_read_no_padding():
    class Third(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= 12, False])

    model, question = model_of("mag"), tokens(2, 9, seed=2)
    options = dict(return_dict_in_generate=True, stopping_criteria=StoppingCriteriaList([Third()]))
    unused = next(t for t in range(VOCAB) if t not in answers(model, question))
    out = model.generate(question, eos_token_id=unused, pad_token_id=0, **GREEDY, **options)
    assert out.sequences[0, 12:].tolist() == [0, 0, 0]
    whole = [model.state(out.sequences[:1, :12]), model.state(out.sequences[1:])]
    assert_same(model, model.state_after(out), MnemosCache.stack(whole))
    out = model.generate(question, **GREEDY, **options)  # without an eos, no row is padded
    assert_same(model, model.state_after(out), model.state(out.sequences))


@pytest.mark.parametrize("from_embeddings", [False, True])
def test_the_state_after_beam_search_is_that_of_the_sequences_it_returned(from_embeddings):
    model, before, question = model_of("mag"), tokens(2, PAST), tokens(2, 9, seed=2)
    past = model.state(before)
    read = dict(inputs_embeds=model.get_input_embeddings()(question).detach()) if from_embeddings else {}
    read = read or dict(input_ids=question)
    options = dict(num_beams=3, num_return_sequences=2, pad_token_id=0, return_dict_in_generate=True)

    def search(**more):
        out = model.generate(**read, past_key_values=past, **GREEDY | options | more)
        return out, out.sequences if from_embeddings else out.sequences[:, 9:]

    for end in search()[1].unique().tolist():  # a token at which one of the returned sequences ends early
        out, generated = search(eos_token_id=end)
        if any(end in said[:-1] for said in generated.tolist()):
            break
    rows = []
    for row, said in enumerate(generated.tolist()):
        said = said[: said.index(end) + 1] if end in said else said
        rows.append(model.state(torch.tensor([before[row // 2].tolist() + question[row // 2].tolist() + said])))
    assert any(end in said for said in generated.tolist())
    assert_same(model, model.state_after(out), MnemosCache.stack(rows))


def test_state_after_refuses_what_holds_no_record():
    model = model_of("lmm")
    for outputs in (model.generate(tokens(1, 3), **GREEDY), model(tokens(1, 3))):
        with pytest.raises(ValueError, match="must be the output of generate"):
            model.state_after(outputs)


def test_a_cache_that_claims_too_many_tokens_is_refused_before_a_mask_of_them_is_made():
    """Found by the fuzzer: generate asked for terabytes."""
    model = MnemosForCausalLM(
        MnemosConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, layers="swa")
    )
    cache = model.state(torch.tensor([[1, 2, 3]]))
    cache.length = 2**40
    with pytest.raises(ValueError, match=r"has read 1099511627776 tokens, and generate keeps a mask"):
        model.generate(torch.tensor([[4]]), past_key_values=cache, max_new_tokens=1)
