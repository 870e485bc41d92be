"""`generate` of attached models: greedy, sampling, beams, streaming, padded prompts; states that are kept, copied and saved."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tiny_models import attached, left_padded, shared, tokens
from transformers import DynamicCache, TextStreamer

from helpers import assert_close

WINDOWED = {"window": 6, "sinks": 2}
BOTH = pytest.mark.parametrize("fields", [{}, WINDOWED], ids=["full", "window"])
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@BOTH
def test_decoding_equals_one_forward_through_generate(fields):
    model = shared(**fields)
    padded, mask = left_padded(tokens(2, 12), [0, 5])
    options = GREEDY | {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
    found = model.generate(padded, attention_mask=mask, **options)
    whole = torch.cat([mask, torch.ones(2, 12, dtype=torch.long)], 1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(found.sequences, attention_mask=whole, position_ids=positions, use_cache=False).logits
    assert_close(torch.stack(found.logits, 1), expected[:, 11:-1], 5e-6)
    for row, skip in ((0, 0), (1, 5)):
        alone = model.generate(padded[row : row + 1, skip:], **GREEDY, max_new_tokens=12)
        assert torch.equal(alone[0], found.sequences[row, skip:])


@BOTH
def test_beam_search_with_a_cache_equals_that_without(fields):
    model, ids = shared(**fields), tokens(2, 9)
    options = GREEDY | {"num_beams": 3, "max_new_tokens": 8, "num_return_sequences": 2}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


@BOTH
def test_sampling_with_a_cache_equals_that_without(fields):
    model, ids = shared(**fields), tokens(2, 9)
    found = []
    for cached in (True, False):
        torch.manual_seed(0)
        options = {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 3, "pad_token_id": 0}
        found.append(model.generate(ids, **options, use_cache=cached))
    assert torch.equal(*found)


def test_streaming_hands_out_every_token():
    class Words(TextStreamer):
        def __init__(self):
            self.found = []

        def put(self, value):
            self.found += value.flatten().tolist()

        def end(self):
            pass

    words, ids = Words(), tokens(1, 7)
    found = shared(**WINDOWED).generate(ids, **GREEDY, max_new_tokens=5, streamer=words)
    assert words.found == found[0].tolist()


@BOTH
def test_generation_from_a_state_equals_generation_from_all_tokens(fields):
    model, ids = shared(**fields), tokens(2, 20)
    padded, mask = left_padded(ids[:, :12], [0, 5])
    cache = model.state(padded, attention_mask=mask)
    before = {name: x.clone() for name, x in cache.tensors().items()}
    found = model.generate(ids[:, 12:], past_key_values=cache, **GREEDY, max_new_tokens=6)
    assert all(torch.equal(x, before[name]) for name, x in cache.tensors().items()), "the given cache stays as it is"
    whole = torch.cat([mask, torch.ones(2, 8, dtype=torch.long)], 1)
    expected = model.generate(torch.cat([padded, ids[:, 12:]], 1), attention_mask=whole, **GREEDY, max_new_tokens=6)
    assert torch.equal(found[:, 8:], expected[:, 20:])


@BOTH
def test_the_state_after_a_generation_continues_it(fields):
    model, ids = shared(**fields), tokens(2, 9)
    options = GREEDY | {"return_dict_in_generate": True, "max_new_tokens": 5, "pad_token_id": 1000}
    first = model.generate(ids, **options)
    cache = model.state_after(first)
    assert cache.get_seq_length() == 14 and cache.position.tolist() == [14, 14]
    second = model.generate(tokens(2, 3, seed=9), past_key_values=cache, **options).sequences
    whole = model.generate(torch.cat([first.sequences, tokens(2, 3, seed=9)], 1), **options).sequences
    assert torch.equal(second, whole[:, 14:])
    beams = model.generate(ids, **options, num_beams=2, num_return_sequences=2)
    expected = model.state(beams.sequences)
    for name, x in model.state_after(beams).tensors().items():
        assert_close(x.float(), expected.tensors()[name].float(), 1e-5, name)


@BOTH
@torch.no_grad()
def test_forks_and_selected_rows_share_no_memory(fields):
    model, ids = shared(**fields), tokens(2, 10)
    cache = model.state(ids)
    forks, chosen = cache.fork(2), cache.select([1])
    for copied in (forks, chosen, cache.clone()):
        mine = {x.data_ptr() for x in copied.tensors().values() if x.numel()}
        assert not mine & {x.data_ptr() for x in cache.tensors().values() if x.numel()}
    new = tokens(4, 3, seed=5)
    found = model(new, past_key_values=forks).logits
    for row in range(4):
        alone = model(torch.cat([ids[row // 2], new[row]]).unsqueeze(0)).logits[0, -3:]
        assert_close(found[row], alone, 5e-6)


def test_a_cache_cannot_be_cropped_and_a_foreign_one_is_refused():
    model = shared(**WINDOWED)
    cache = model.state(tokens(1, 4))
    with pytest.raises(ValueError, match="cannot be cropped, because a memory keeps no tokens"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="is a DynamicCache, but must be an AttachedCache"):
        model(tokens(1, 4), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="belongs to another model"):
        shared()(tokens(1, 4), past_key_values=cache)
    with pytest.raises(ValueError, match="has 2 rows"):
        model(tokens(3, 4), past_key_values=model.state(tokens(2, 4)).select([0]).fork(2))


@BOTH
@torch.no_grad()
def test_a_saved_state_continues_as_the_kept_one(fields, tmp_path):
    model = shared(**fields)
    padded, mask = left_padded(tokens(2, 15), [0, 4])
    cache = model.state(padded, attention_mask=mask)
    model.save_state(cache, tmp_path / "state.safetensors")
    loaded = model.load_state(tmp_path / "state.safetensors")
    assert loaded.nbytes == cache.nbytes
    new = tokens(2, 4, seed=8)
    assert torch.equal(model(new, past_key_values=loaded).logits, model(new, past_key_values=cache).logits)


def test_a_state_of_other_memories_or_another_base_is_refused(tmp_path):
    model, path = attached(**WINDOWED), tmp_path / "state.safetensors"
    model.save_state(model.state(tokens(1, 9)), path)
    with torch.no_grad():
        model.memories["1"].gate.add_(1)
    with pytest.raises(ValueError, match="memories other than those of this one"):
        model.load_state(path)
    with pytest.raises(ValueError, match="base weights other than those of this one"):
        attached(seed=5, **WINDOWED).load_state(path)
    with pytest.raises(ValueError, match="an AttachConfig other than"):
        attached(window=7).load_state(path)


@pytest.mark.parametrize("wrong", ["nan", "shape", "missing", "foreign", "position", "mask", "type"])
def test_a_damaged_state_is_refused_in_a_sentence(wrong, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    model, path = shared(**WINDOWED), tmp_path / "state.safetensors"
    model.save_state(model.state(tokens(2, 9)), path)
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    if wrong == "nan":
        tensors["attention.0.key"][0, 0, 0, 0] = torch.nan
    elif wrong == "shape":
        tensors["attention.0.key"] = tensors["attention.0.key"][:, :, 1:].contiguous()
    elif wrong == "missing":
        del tensors["memory.1.weights.0"]
    elif wrong == "foreign":
        tensors["other"] = torch.zeros(1)
    elif wrong == "position":
        tensors["position"] = torch.tensor([9, 2**60])
    elif wrong == "mask":
        tensors["mask"] = torch.ones(2, 9, dtype=torch.bool)
    else:
        tensors["attention.1.value"] = tensors["attention.1.value"].long()
    save_file(tensors, path, header)
    with pytest.raises(ValueError) as raised:
        model.load_state(path)
    assert "\n" not in str(raised.value)


def test_a_saved_model_opens_in_a_new_process_with_the_same_logits(tmp_path):
    model, ids = attached(**WINDOWED), tokens(2, 20)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        torch.save(model(ids).logits, tmp_path / "logits.pt")
    code = (
        "import torch, mnemos\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'model')!r}).eval()\n"
        f"logits = model(torch.tensor({ids.tolist()})).logits\n"
        f"assert torch.equal(logits, torch.load({str(tmp_path / 'logits.pt')!r})), 'other logits'\n"
        "assert model.base.config._attn_implementation == 'mnemos_window_sdpa'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
