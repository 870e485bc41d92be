"""Perplexity where it is known, where it can be had another way, and against lm-evaluation-harness."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from oracles import BYTES, Scripted, uniform

from helpers import randomise
from mnemos.eval import LanguageModel, frozen_memory, perplexity, perplexity_by_context
from mnemos.eval.text_loss import document_losses, windows
from mnemos.models import MnemosForCausalLM, presets

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "memory_heads": 2, "num_attention_heads": 2, "attention_window": 16}


def small(preset: str) -> MnemosForCausalLM:
    torch.manual_seed(0)
    return randomise(MnemosForCausalLM(presets.config(preset, **SMALL, segment_length=16)), 0.05).eval()


def test_a_model_that_finds_every_byte_alike_has_perplexity_256_and_8_bits_per_byte():
    found = perplexity(uniform(), BYTES, ["some text", "und ein längerer"])
    assert found.tokens == found.bytes == 9 + 17
    assert found.perplexity == pytest.approx(256) and found.bits_per_byte == found.bits_per_token == pytest.approx(8)


def test_a_model_that_knows_the_text_has_perplexity_1(text):
    ids = [0, *BYTES.encode(text[:300])]
    knows = Scripted(lambda read: ids[len(read)] if len(read) < len(ids) else None)
    assert perplexity(knows, BYTES, text[:300]).perplexity == pytest.approx(1)


def test_every_token_counts_alike_whatever_text_it_is_in():
    """Sure of the token after each "a", and of nothing else: 8 of 10 tokens in one text, none of 2 in the other."""
    sure = Scripted(lambda ids: 98 if ids[-1] == 97 else None)
    found = perplexity(sure, BYTES, ["ababababab", "cd"])
    assert found.tokens == 12 and found.loss == pytest.approx(7 / 12 * math.log(256), rel=1e-6)
    assert found.perplexity == pytest.approx(256 ** (7 / 12), rel=1e-6)


def test_bytes_are_bytes_whatever_the_tokens_are(model, hf_bytes):
    found = perplexity(model, hf_bytes, "über den Fluß")
    assert found.bytes == 15
    assert found.bits_per_byte == pytest.approx(found.loss * found.tokens / math.log(2) / 15)


def test_without_a_first_special_token_the_first_token_is_only_read():
    class Bare(type(BYTES)):
        eos_token_id = bos_token_id = None

    found = perplexity(uniform(), Bare(), ["üabc"])
    assert found.tokens == found.bytes == 4
    assert found.by_position[0]["tokens"] == 4


@pytest.mark.parametrize(
    "preset", ["titans-lmm", "titans-mac", "titans-mal", "atlas-mag", "deeptransformer", "transformer"]
)
def test_streaming_through_the_state_is_one_pass(preset, text):
    model, ids = small(preset), torch.tensor([[0, *BYTES.encode(text[:150])]])
    with torch.no_grad():
        whole = model(ids, labels=ids).loss.item()
    for piece in (1, 19, 10_000):
        streamed = perplexity(LanguageModel(model, BYTES, piece), None, text[:150]).loss
        assert abs(streamed - whole) <= 1e-6, (piece, streamed, whole)


def test_in_float64_streaming_is_one_pass_to_rounding(text):
    model, ids = small("titans-mac").double(), torch.tensor([[0, *BYTES.encode(text[:500])]])
    with torch.no_grad():
        whole = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).item()
    assert abs(perplexity(LanguageModel(model, BYTES, 37), None, text[:500]).loss - whole) < 1e-12


def test_the_buckets_by_position_add_up_to_the_whole(text):
    model = small("titans-lmm")
    found = perplexity(model, BYTES, [text[:300], text[:700]])
    assert [row["start"] for row in found.by_position] == [0, 32, 64, 128, 256, 512]
    assert [row["tokens"] for row in found.by_position] == [64, 64, 128, 256, 44 + 256, 188]
    assert sum(r["tokens"] * r["loss"] for r in found.by_position) == pytest.approx(found.tokens * found.loss)
    ids = torch.tensor([[0, *BYTES.encode(text[:700])]])
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    assert found.by_position[-1]["loss"] == pytest.approx(losses[512:].mean().item(), rel=1e-5)


@pytest.mark.parametrize("length, context, stride", [(10, 4, 2), (10, 4, 4), (100, 7, 3), (5, 10, 5), (2, 1, 1)])
def test_windows_count_every_prediction_once_and_see_no_more_than_the_context(length, context, stride):
    counted = []
    for start, new, stop in windows(length, context, stride):
        counted += range(new, stop)
        assert 0 <= start < new and stop - 1 - start <= context
        assert start == 0 or new - start >= context - stride + 1
    assert counted == list(range(1, length))


def test_windows_start_from_a_fresh_state(text):
    model, ids = small("titans-lmm"), np.array(BYTES.encode(text[:100]))
    lm = LanguageModel(model, BYTES)
    found = torch.cat([losses for _, losses in document_losses(lm, ids, context=16, stride=4)])
    whole = torch.tensor([0, *ids.tolist()])
    for start, new, stop in windows(101, 16, 4):
        with torch.no_grad():
            log_p = model(whole[None, start : stop - 1]).logits[0].log_softmax(-1)
        expected = -log_p[torch.arange(new - start - 1, stop - start - 1), whole[new:stop]]
        assert torch.allclose(found[new - 1 : stop - 1], expected, atol=1e-5)


def test_the_same_tokens_are_predicted_at_every_context_length(text):
    """A model that needs to look 20 tokens back: sure with a long context, at a loss with a short one."""
    period = BYTES.encode("abcdefghijklmnopqrst")
    looks_back = Scripted(lambda ids: ids[-20] if len(ids) >= 20 else None)
    rows = perplexity_by_context(looks_back, BYTES, BYTES.decode(period * 20), [4, 64], tokens=100)
    assert [row["tokens"] for row in rows] == [100, 100]
    assert rows[0]["perplexity"] == pytest.approx(256) and rows[1]["perplexity"] == pytest.approx(1)
    with pytest.raises(ValueError, match="leaves none to predict"):
        perplexity_by_context(looks_back, BYTES, "short", [64])


@pytest.mark.parametrize("preset", ["titans-lmm", "atlas-mag", "gated-deltanet", "retnet"])
def test_a_frozen_memory_learns_nothing_and_is_itself_again_afterwards(preset, text):
    model = small(preset)
    ids = torch.tensor([BYTES.encode(text[:300])])
    learning = perplexity(model, BYTES, text[:300]).loss
    frozen = perplexity(model, BYTES, text[:300], memory="frozen").loss
    assert frozen != learning
    assert perplexity(model, BYTES, text[:300]).loss == learning
    with frozen_memory(model):
        cache = model.state(ids)
    for layer, block in zip(cache.layers, model.model.layers):
        memory = next(m for m in block.modules() if hasattr(m, "initial_state") and hasattr(m, "W0"))
        state = next(s for s in layer.values() if hasattr(s, "momentum"))
        for w, start in zip(state.weights, memory.initial_state(1).weights):
            assert torch.equal(w, start)


def test_models_of_transformers_are_streamed_and_cut_where_they_end(text):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    short, ids = text[:60], torch.tensor([[0, *BYTES.encode(text[:60])]])
    with torch.no_grad():
        whole = model(ids, labels=ids).loss.item()
    assert perplexity(LanguageModel(model, BYTES, 7), None, short).loss == pytest.approx(whole, abs=1e-6)
    cut = perplexity(model, BYTES, text[:300])
    assert cut.tokens == 300
    assert cut.loss == pytest.approx(perplexity(model, BYTES, text[:300], context=64, stride=32).loss)


def test_lm_eval_has_the_same_rolling_perplexity_whole_and_in_windows(model, hf_bytes, text):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    document = text[:700]
    requests = [Instance("loglikelihood_rolling", {}, (document,), 0)]
    for length, choices in ((2048, {}), (64, {"context": 64, "stride": 64})):
        peer = HFLM(pretrained=copy.deepcopy(model), tokenizer=hf_bytes, device="cpu", max_length=length, batch_size=1)
        theirs = peer.loglikelihood_rolling(requests, disable_tqdm=True)[0]
        ours = perplexity(model, hf_bytes, document, **choices)
        assert ours.tokens == 700
        assert -ours.loss * ours.tokens == pytest.approx(theirs, rel=1e-6)


def test_what_cannot_be_measured_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="no token to predict"):
        perplexity(uniform(), BYTES, [""])
    with pytest.raises(ValueError, match="memory='off' is unknown"):
        perplexity(uniform(), BYTES, "abc", memory="off")
    with pytest.raises(ValueError, match="stride=9 must lie between 1 and context=4"):
        perplexity(uniform(), BYTES, "abcdefgh", context=4, stride=9)
