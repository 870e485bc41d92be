"""What `inspect` sees is what the model does."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from reporting import TEXT, data_of, small_model, unpack

from helpers import randomise
from mnemos.data import open_tokenizer, train_bpe
from mnemos.memory import distance_from_w0, scan
from mnemos.memory.vitality import lowest_rank
from mnemos.report import inspect, inspect_page
from mnemos.report.texts import read_text, token_texts

PRESETS = ["titans-lmm", "titans-mag", "titans-mac", "titans-mal", "atlas-mag", "deltanet", "dot", "qk-mag", "swa"]


@pytest.mark.parametrize("preset", PRESETS)
def test_loss_and_final_weights_are_the_models_own(preset, tokenizer):
    model = small_model(preset)
    seen = inspect(model, tokenizer, TEXT, 150)
    ids = torch.tensor([tokenizer.encode(TEXT)[:150]])
    assert seen.loss[1:].mean().item() == pytest.approx(model(ids, labels=ids).loss.item(), abs=1e-5)
    cache = model.state(ids)
    for layer, states in zip(seen.layers, cache.layers):
        assert all(x.shape[0] == 150 and x.isfinite().all() for x in layer.values.values())
        if not layer.spectra:
            assert "surprise" not in layer.values
            continue
        assert layer.moments[0] == 0 and layer.moments[-1] == 150 and layer.moments == sorted(set(layer.moments))
        matrices = [s for s in layer.spectra if s.shape is not None]
        for found, weights in zip(matrices, states["memory"].weights):
            torch.testing.assert_close(found.norm[-1], weights[0].flatten(1).norm(dim=-1), rtol=1e-3, atol=1e-5)


def test_values_are_those_the_memory_reports_of_itself(tokenizer):
    model = small_model("titans-lmm", memory_window=3, memory_gate="token*decay")
    seen = inspect(model, tokenizer, TEXT, 100)
    ids = torch.tensor([tokenizer.encode(TEXT)[:100]])
    x = model.model.embed_tokens(ids)
    x = torch.cat([model.model.persistent.unsqueeze(0), x], 1)
    block = model.model.layers[0]
    with torch.no_grad():
        _, _, trace = block.mixer.memory(block.mixer_norm(x), trace=True)
    for name in ("surprise", "gradient_norm", "momentum_norm", "lr", "retain", "momentum", "gate"):
        expected = getattr(trace, name)[0, model.config.num_persistent_tokens :]
        torch.testing.assert_close(seen.layers[0].values[name], expected, rtol=1e-4, atol=1e-6)


def test_reads_put_together_from_all_tokens_are_what_a_hebbian_memory_reads(tokenizer, monkeypatch):
    T = 70
    monkeypatch.setattr("mnemos.report.watching.RESEMBLED", T)
    model = randomise(small_model("swla", num_hidden_layers=1, memory_window=4), 0.1)
    reads = inspect(model, tokenizer, TEXT, T).layers[0].reads
    block = model.model.layers[0]
    memory, state = block.mixer.memory, block.mixer.memory.initial_state(1)
    with torch.no_grad():
        x = block.mixer_norm(model.model.embed_tokens(torch.tensor([tokenizer.encode(TEXT)[:T]])))
        q, k, v, _ = memory.project(x, state, None, None)
        y, _ = scan(q, k, v, memory.gates(x, state, None, None), state, memory.spec, memory.features)
    for head in range(memory.heads):
        values, token, weight = v[0, :, head], reads.token[1 + head], reads.weight[1 + head]
        sums = (weight.masked_fill(token < 0, 0.0).unsqueeze(-1) * values[token.clamp(min=0)]).sum(1)
        sums += reads.own[1 + head].unsqueeze(-1) * values
        torch.testing.assert_close(sums, y[0, :, head], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["convex", "additive"])
def test_routing_says_how_far_the_gate_lets_the_memory_in(mode, tokenizer):
    model = small_model("titans-mag", gate_mode=mode)
    gate = model.model.layers[0].mixer.gate
    torch.nn.init.constant_(gate.offset, 3.0 - gate.initial_logit)
    seen = inspect(model, tokenizer, TEXT, 60)
    opened = torch.sigmoid(torch.tensor(3.0))
    route = seen.layers[0].values["route"]
    torch.testing.assert_close(route, torch.full_like(route, 1 - opened if mode == "convex" else opened))
    row = seen.routing()[0]
    assert row["to_attention"] == (1.0 if mode == "convex" else 0.0) and row["to_memory"] == 1.0 - row["to_attention"]
    assert 0 < row["share"] < 1


def test_a_memory_that_says_nothing_has_no_share(tokenizer):
    for preset in ("titans-mag", "titans-mal"):
        model = small_model(preset)
        torch.nn.init.zeros_(model.model.layers[1].mixer.memory.out.weight)
        seen = inspect(model, tokenizer, TEXT, 60)
        assert seen.layers[1].values["share"].max() == 0 < seen.layers[0].values["share"].min()


def test_frozen_and_switched_off_memories_change_the_loss_only_where_there_are_memories(tokenizer):
    seen = inspect(small_model("titans-mag"), tokenizer, TEXT, 80)
    assert set(seen.perplexities()) == {"learning", "frozen", "off"}
    assert not torch.equal(seen.frozen[1:], seen.loss[1:]) and not torch.equal(seen.off[1:], seen.loss[1:])
    assert set(inspect(small_model("titans-lmm"), tokenizer, TEXT, 80).perplexities()) == {"learning", "frozen"}
    assert set(inspect(small_model("swa"), tokenizer, TEXT, 80).perplexities()) == {"learning"}


def test_the_vitality_of_a_layer_is_that_of_its_state_after_the_text_and_death_is_a_warning(tokenizer):
    model = small_model("titans-mag")
    seen = inspect(model, tokenizer, TEXT, 100)
    state, row = model.state(torch.tensor([tokenizer.encode(TEXT)[:100]])).layers[0]["memory"], seen.routing()[0]
    assert row["effective_rank"] == pytest.approx(lowest_rank(state), rel=1e-3)
    assert row["distance"] == pytest.approx(
        distance_from_w0(model.model.layers[0].mixer.memory, state).mean().item(), rel=1e-3
    )
    assert row["relearning"] > 0.2
    dead = dataclasses.replace(seen.layers[0], vitality={"effective_rank": 1.0, "distance": 1.0, "relearning": 0.0})
    seen.layers[0] = dead
    assert [w.partition(":")[0] for w in seen.warnings()][:2] == [
        "The memory of layer 0 has collapsed",
        "The memory of layer 0 learns little",
    ]
    assert seen.warnings()[0] in data_of(inspect_page([seen]))["panels"][0]["notes"]


def test_looking_leaves_the_model_as_it_was(tokenizer):
    model = small_model("titans-mac").train()
    ids = torch.tensor([tokenizer.encode(TEXT)[:40]])
    before = model(ids).logits
    inspect(model, tokenizer, TEXT, 40)
    assert model.training and torch.equal(model(ids).logits, before)
    assert not any(m._forward_hooks for m in model.modules())


def test_tokens_spell_the_text_and_broken_characters_show_their_bytes():
    tokenizer = open_tokenizer("bytes")
    ids = tokenizer.encode("aé€𝄞\ufffd!" + "x" * 50)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(t for t in texts if not re.fullmatch(r"⟨\d+⟩", t)) == "aé€𝄞\ufffd!" + "x" * 50


def test_tokens_of_a_bpe_spell_the_text():
    bpe = train_bpe([TEXT] * 3, vocab_size=320)
    ids = bpe.encode(TEXT)
    texts = token_texts(bpe, ids)
    assert len(texts) == len(ids) < len(TEXT.encode())
    assert "".join(t for t in texts if not re.fullmatch(r"⟨\d+⟩", t)) == TEXT


def test_a_tokenizer_that_strips_leading_blanks_still_shows_them():
    class Words:
        def decode(self, ids):
            return "".join(f" w{i}" for i in ids).removeprefix(" ")

    assert token_texts(Words(), list(range(40))) == ["w0", *(f" w{i}" for i in range(1, 40))]


def test_only_the_first_tokens_are_read_and_the_page_says_so(tokenizer):
    model = small_model("titans-lmm")
    cut = inspect(model, tokenizer, TEXT, 50)
    assert cut.cut and len(cut.tokens) == 50
    assert "first 50 tokens" in data_of(inspect_page([cut]))["panels"][0]["notes"][0]
    assert not inspect(model, tokenizer, TEXT[:40], 50).cut


def test_a_large_file_is_not_read_whole(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("a" * 300_000)
    text, longer = read_text(path, 100)
    assert longer and 100 < len(text) < 100_000


def test_the_page_holds_the_numbers_and_no_markup_of_the_text(tokenizer):
    seen = inspect(small_model("titans-mag"), tokenizer, TEXT, 2000, name="<img src=x>")
    page = inspect_page([seen, seen])
    assert "<b>" not in page and "<img" not in page and page.count("</script>") == 2
    panel = data_of(page)["panels"][1]
    assert panel["name"] == "<img src=x>" and "".join(panel["tokens"][-12:]) == TEXT[-12:]
    values = unpack(panel["layers"][1]["values"]["surprise"])
    expected = seen.layers[1].values["surprise"].mT.numpy()
    np.testing.assert_allclose(values[0], expected.mean(0), rtol=1e-5)
    np.testing.assert_array_equal(values[1:], expected)
    token = unpack(panel["layers"][0]["reads"]["token"])
    np.testing.assert_array_equal(token, seen.layers[0].reads.token.numpy())
    assert token.min() >= -panel["persistent"] - 1 and (token < np.arange(token.shape[1])[:, None]).all()
    assert math.isnan(unpack(panel["values"]["loss"])[0, 0])


def test_the_page_asks_nothing_of_the_network(tokenizer):
    page = inspect_page([inspect(small_model("titans-lmm"), tokenizer, "no links here", 20)])
    assert "default-src 'none'" in page
    assert set(re.findall(r"https?://[^\s\"']+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)=", page)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"text": "a"}, "text has 1 tokens"),
        ({"max_tokens": 1}, "max_tokens=1"),
        ({"max_tokens": 10**6}, "20,000"),
        ({"tokenizer": None}, "tokenizer is None"),
        ({"model": torch.nn.Linear(2, 2)}, "only a MnemosForCausalLM"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(arguments, words, tokenizer):
    given = {"model": small_model("swa"), "tokenizer": tokenizer, "text": TEXT} | arguments
    with pytest.raises(ValueError, match=words):
        inspect(**given)
