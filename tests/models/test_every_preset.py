"""The promises, for every preset, through the public API: exact, causal, independent, alive, constant."""

from __future__ import annotations

import pytest
import torch
from zoo import HAS_MEMORY, NAMES, OTHER_RETENTION, VOCAB, WINDOW, WITH_CONVOLUTION, logits, make, model_of, tokens

from helpers import assert_close
from mnemos.models import MnemosCache, MnemosForCausalLM

EXACT = 1e-9  # relative RMS in float64
every_preset = pytest.mark.parametrize("name", [*NAMES, *OTHER_RETENTION, *WITH_CONVOLUTION])


def feed(model: MnemosForCausalLM, ids: torch.Tensor, ends: list[int], cache: MnemosCache | None = None):
    """Logits of ids read in pieces that end where told, and the last cache."""
    parts, start = [], 0
    for end in [*ends, ids.shape[1]]:
        with torch.no_grad():
            out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
        parts.append(out.logits)
        cache, start = out.past_key_values, end
    return torch.cat(parts, 1), cache


def states_equal(a: MnemosCache, b: MnemosCache, tolerance: float = EXACT) -> None:
    from mnemos.models.cache_io import to_tensors

    for i, (one, two) in enumerate(zip(a.layers, b.layers)):
        for name in one:
            left, right = to_tensors(one[name])[0], to_tensors(two[name])[0]
            assert left.keys() == right.keys()
            for key in left:
                assert_close(left[key].double(), right[key].double(), tolerance, f"layer {i} {name}.{key}")


@every_preset
def test_any_split_into_calls_gives_the_same_logits_and_the_same_cache(name):
    model, ids = model_of(name), tokens(2, 37)
    expected, whole = feed(model, ids, [])
    assert_close(expected, logits(model, ids), EXACT, "with a cache")
    assert expected.dtype == torch.float64
    for ends in ([1, 2, 9], [7], [8, 16, 24], [5, 13, 14, 33], [31]):
        found, cache = feed(model, ids, ends)
        assert_close(found, expected, EXACT, f"split at {ends}")
        assert cache.get_seq_length() == 37
        states_equal(cache, whole)


@every_preset
@pytest.mark.parametrize("prompt", [0, 13])
def test_decoding_in_place_gives_the_logits_of_one_forward_and_leaves_other_caches_alone(name, prompt):
    """As `generate` does it: each call may write into the cache it was given, but not into copies taken on the way."""
    model, ids = model_of(name), tokens(2, 37)
    expected, cache, copies = logits(model, ids), None, {}
    for i in range(prompt, 37):
        with torch.no_grad():
            if i == prompt and prompt:
                cache = model(ids[:, :prompt], use_cache=True).past_key_values
            if i in (14, 16, 31):
                assert cache is not None
                copies[i] = cache.clone()
            if cache is not None:
                cache.inplace = True
            output = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        assert_close(output.logits[:, 0], expected[:, i], EXACT, f"token {i}")
    for i, copied in copies.items():
        found, _ = feed(model, ids[:, i:], [], copied)
        assert_close(found, expected[:, i:], EXACT, f"from the copy at {i}")


@every_preset
def test_generating_a_ragged_left_padded_batch_gives_the_logits_of_one_forward(name):
    model, new = model_of(name), 11
    lengths = [21, 8, 13, 1]
    prompts = [tokens(1, n, seed=n) for n in lengths]
    ids, mask = torch.zeros(4, 21, dtype=torch.long), torch.zeros(4, 21, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 21 - prompt.shape[1] :], mask[row, 21 - prompt.shape[1] :] = prompt[0], 1
    steps = []  # generate itself rounds logits to float32
    hook = model.lm_head.register_forward_hook(lambda module, args, output: steps.append(output[:, -1]))
    sequences = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    hook.remove()
    stepwise = torch.stack(steps, 1)  # 4 new V
    for row, n in enumerate(lengths):
        alone = sequences[row : row + 1, 21 - n :]
        assert_close(stepwise[row], logits(model, alone)[0, n - 1 : -1], EXACT, f"row {row}, prompt of {n}")


@every_preset
def test_padding_on_either_side_and_between_changes_nothing(name):
    model, ids = model_of(name), tokens(1, 18)
    expected = logits(model, ids)[0]
    places = {
        "left": list(range(5, 23)),
        "right": list(range(18)),
        "between": [*range(2, 9), *range(12, 23)],
    }
    full, mask = tokens(3, 23, seed=9), torch.zeros(3, 23, dtype=torch.long)
    for row, where in enumerate(places.values()):
        full[row, where], mask[row, where] = ids[0], 1
    for cached in (False, True):
        with torch.no_grad():
            out = model(full, attention_mask=mask, use_cache=cached)
        for row, (side, where) in enumerate(places.items()):
            assert_close(out.logits[row, where], expected, EXACT, f"{side}, cache {cached}")
    more = tokens(3, 5, seed=1)[:1].expand(3, -1)
    with torch.no_grad():
        found = model(more, past_key_values=out.past_key_values).logits
    for row in range(3):
        assert_close(found[row], logits(model, torch.cat([ids, more[:1]], 1))[0, 18:], EXACT, f"row {row} goes on")


@every_preset
def test_no_output_depends_on_a_later_token(name):
    model, ids = model_of(name), tokens(2, 29)
    expected = logits(model, ids)
    for t in (1, 7, 8, 9, 12, 16, 27, 28):
        changed = ids.clone()
        changed[:, t:] = (changed[:, t:] + 1 + torch.arange(29 - t)) % VOCAB
        found = logits(model, changed)
        assert torch.equal(found[:, :t], expected[:, :t]), f"tokens from {t} on reach back"
        assert not torch.equal(found[:, t], expected[:, t])
        assert_close(logits(model, ids[:, :t]), expected[:, :t], EXACT, f"cut at {t}")


@every_preset
def test_rows_of_a_batch_are_independent(name):
    model, ids = model_of(name), tokens(3, 20)
    expected = logits(model, ids)
    other = ids.clone()
    other[1:] = tokens(2, 20, seed=5)
    assert torch.equal(logits(model, other)[0], expected[0])
    assert_close(logits(model, ids[:1])[0], expected[0], EXACT)


@every_preset
def test_packed_documents_are_as_if_each_were_alone(name):
    model, lengths = model_of(name), [9, 1, 17, 8]
    documents = [tokens(1, n, seed=n) for n in lengths]
    packed, ends = torch.cat(documents, 1), torch.tensor([0, 9, 10, 27, 35])
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    alone = [logits(model, document) for document in documents]
    for how in (dict(cu_seqlens=ends), dict(cu_seqlens=ends.tolist()), dict(position_ids=positions)):
        assert_close(logits(model, packed, **how), torch.cat(alone, 1), EXACT, str(list(how)))
    with torch.no_grad():
        loss = model(packed, labels=packed, cu_seqlens=ends).loss
        sums = [model(d, labels=d).loss * (d.shape[1] - 1) for d in documents if d.shape[1] > 1]
        cache = model(packed, cu_seqlens=ends, use_cache=True).past_key_values
    assert loss.item() == pytest.approx((sum(sums) / 31).item(), rel=1e-12)
    more = tokens(4, 3)
    with torch.no_grad():
        found = model(more, past_key_values=cache).logits
    for row, document in enumerate(documents):
        assert_close(found[row], logits(model, torch.cat([document, more[row : row + 1]], 1))[0, -3:], EXACT)


@every_preset
def test_a_packed_document_begins_where_it_does_even_if_its_first_token_is_masked(name):
    model, packed = model_of(name), tokens(1, 35)
    ends, mask = torch.tensor([0, 9, 14, 27, 35]), torch.ones(1, 35, dtype=torch.long)
    mask[0, [0, 1, 9, 10, 11, 12, 13, 14, 20]] = 0  # nothing is left of the second document
    kept = [[*range(2, 9)], [], [*range(15, 20), *range(21, 27)], [*range(27, 35)]]
    positions = torch.cat([torch.arange(n) for n in ends.diff()]).unsqueeze(0)
    for how in (dict(cu_seqlens=ends), dict(position_ids=positions), dict(position_ids=positions * mask)):
        found = logits(model, packed, attention_mask=mask, **how)
        for where in filter(None, kept):
            assert_close(found[:, where], logits(model, packed[:, where]), EXACT, f"{list(how)}, from {where[0]} on")
    more = tokens(4, 3)
    with torch.no_grad():
        cache = model(packed, cu_seqlens=ends, attention_mask=mask, use_cache=True).past_key_values
        found = model(more, past_key_values=cache).logits
    for row, where in enumerate(kept):
        everything = torch.cat([packed[:, where], more[row : row + 1]], 1)
        assert_close(found[row], logits(model, everything)[0, -3:], EXACT, f"document {row} goes on")


@every_preset
def test_training_mode_computes_what_evaluation_mode_does(name):
    model, ids = make(name), tokens(2, 20)
    with torch.no_grad():
        evaluated = model(ids, labels=ids)
        model.train()
        trained = model(ids, labels=ids, return_logits=True)
    assert torch.equal(trained.logits, evaluated.logits) and torch.equal(trained.loss, evaluated.loss)


@every_preset
def test_every_parameter_gets_a_gradient_from_the_first_step_on(name):
    model, ids = make(name).train(), tokens(2, 30)
    model(ids, labels=ids).loss.backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
    assert not dead


@every_preset
def test_a_fact_ten_windows_back_reaches_the_output_through_memory_alone(name):
    model, ids = model_of(name), tokens(1, 10 * WINDOW + 20)
    changed = ids.clone()
    changed[:, :3] = (changed[:, :3] + 7) % VOCAB
    far = slice(10 * WINDOW + 3, None)
    for read in (logits, lambda model, ids: feed(model, ids, [50, *range(90, ids.shape[1])])[0]):
        difference = (read(model, ids) - read(model, changed))[:, far].abs().max().item()
        if name == "swa":
            assert difference == 0.0
        else:
            assert difference > 1e-12, "in training" if read is logits else "in decoding"


@every_preset
def test_the_cache_has_a_fixed_size_or_says_that_it_grows(name):
    model = model_of(name)
    _, short = feed(model, tokens(2, 3), [])
    _, long = feed(model, tokens(2, 70), [40])
    assert (long.nbytes != short.nbytes) == long.is_kv_cache
    assert long.is_kv_cache == (name.split()[0] in {"transformer", "deeptransformer", "swdt", "dot"})


@every_preset
def test_a_saved_cache_goes_on_identically_and_as_often_as_one_likes(name, tmp_path):
    model, ids, more = model_of(name), tokens(2, 21), tokens(2, 9, seed=3)
    _, cache = feed(model, ids, [])
    expected, _ = feed(model, more, [4], cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = MnemosCache.load(tmp_path / "cache.safetensors", model.config)
    assert loaded.get_seq_length() == 21 and loaded.nbytes == cache.nbytes
    for _ in range(2):  # going on from a cache does not change it
        found, _ = feed(model, more, [4], loaded)
        assert_close(found, expected, 1e-13, "loaded")
    forked = loaded.select([1]).fork(3)
    found, _ = feed(model, more[1:].expand(3, -1), [], forked)
    for row in range(3):
        assert_close(found[row], expected[1], EXACT, "fork")
    both = MnemosCache.stack([loaded.select([1]), model.state(ids[:1, :5])])
    found, _ = feed(model, more, [4], both)
    assert_close(found[0], logits(model, torch.cat([ids[1:], more[:1]], 1))[0, 21:], EXACT, "stacked, row 0")
    assert_close(found[1], logits(model, torch.cat([ids[:1, :5], more[1:]], 1))[0, 5:], EXACT, "stacked, row 1")


@every_preset
def test_a_saved_model_is_the_same_model(name, tmp_path):
    model, ids = model_of(name), tokens(1, 20)
    model.save_pretrained(tmp_path)
    loaded = MnemosForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values()))
    assert_close(logits(loaded.eval(), ids), logits(model, ids), 1e-13)


def test_no_memory_is_left_where_memory_is_switched_off():
    for name in HAS_MEMORY:
        model = make(name, memory_layers=[])
        assert not [key for key, _ in model.named_parameters() if "memory" in key or "gate." in key]
        model = make(name, memory_layers=[1])
        layers = {key.split(".")[2] for key, _ in model.named_parameters() if ".memory." in key}
        assert layers <= {"1"}
