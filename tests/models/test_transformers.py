"""The models as transformers' models: saving, training, checkpointing, compiling, low precision."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
)
from zoo import VOCAB, each_block, logits, make, model_of, small_config, tokens

from helpers import assert_close, randomise
from mnemos.memory.files import write_tensors
from mnemos.models import MnemosCache, MnemosConfig, MnemosForCausalLM, MnemosModel, presets
from mnemos.models.cache_io import to_tensors
from mnemos.models.loss import cross_entropy


def test_import_mnemos_registers_the_auto_classes_whichever_is_imported_first():
    for code in (
        "import transformers, mnemos",
        "import mnemos\nfrom transformers.modeling_layers import GradientCheckpointingLayer\nimport transformers",
    ):
        code += "\nprint(type(transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model('mnemos'))).__name__)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "MnemosForCausalLM", done.stderr


def test_import_mnemos_alone_imports_neither_torch_nor_transformers():
    code = "import sys, mnemos; print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@each_block
def test_a_sharded_checkpoint_opens_by_the_auto_classes(name, tmp_path):
    model, ids = make(name).float(), tokens(1, 12)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert isinstance(AutoConfig.from_pretrained(tmp_path), MnemosConfig)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_close(logits(loaded, ids), logits(model, ids), 1e-6)
    body = AutoModel.from_pretrained(tmp_path)
    assert isinstance(body, MnemosModel)
    with torch.no_grad():
        assert_close(body(ids).last_hidden_state, model.model(ids).last_hidden_state, 1e-6)


def test_a_device_map_places_a_model_but_does_not_offload_it(tmp_path):
    pytest.importorskip("accelerate")
    model, ids = make("atlas-mac").float(), tokens(1, 12)
    model.save_pretrained(tmp_path)
    for place in ("auto", "cpu", {"": "cpu"}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=place)
        assert_close(logits(loaded, ids), logits(model, ids), 1e-6)
    disk = dict.fromkeys(["model.embed_tokens", "model.norm", "model.layers.0", "lm_head"], "cpu")
    with pytest.raises(ValueError, match="device_map places weights on cpu, disk, which offloads some"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, device_map=disk | {"model.layers.1": "disk"}, offload_folder=tmp_path
        )


def test_what_is_missing_in_a_checkpoint_is_initialised_as_in_a_new_model(tmp_path):
    small, large = make("titans-lmm", num_hidden_layers=1).float(), small_config("titans-lmm")
    small.save_pretrained(tmp_path)
    loaded = MnemosForCausalLM.from_pretrained(tmp_path, config=large, allow_missing=True)
    fresh = make("titans-lmm").float()
    one, two = (model.model.layers[1].mixer.memory for model in (loaded, fresh))
    assert torch.equal(one.gating.offset, two.gating.offset)
    assert one.W0[0].std().item() == pytest.approx(two.W0[0].std().item(), rel=0.3)
    assert torch.equal(loaded.model.layers[0].mixer.memory.qkv.weight, small.model.layers[0].mixer.memory.qkv.weight)


@each_block
def test_gradient_checkpointing_changes_no_gradient(name):
    ids = tokens(2, 20)

    def gradients(checkpointing: bool):
        model = make(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        return {n: p.grad for n, p in model.named_parameters()}

    plain, recomputed = gradients(False), gradients(True)
    for key in plain:
        assert_close(recomputed[key], plain[key], 1e-12, key)


@each_block
def test_gradients_flow_through_a_cache(name):
    model, ids = make(name).train(), tokens(1, 20)
    first = model(ids[:, :11], use_cache=True, return_logits=True)
    second = model(ids[:, 11:], past_key_values=first.past_key_values, use_cache=True, return_logits=True)
    torch.cat([first.logits, second.logits], 1).square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(ids, return_logits=True).logits.square().sum().backward()
    for key, parameter in model.named_parameters():
        assert_close(found[key], parameter.grad, 1e-8, key)


@each_block
def test_bfloat16_and_autocast_are_close_to_float32(name):
    model, ids = make(name).float(), tokens(2, 30)
    expected = logits(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = logits(model, ids)
        loss = model.train()(ids, labels=ids).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert_close(found.float(), expected, 0.1, "autocast")
    low = model.eval().to(torch.bfloat16)
    assert logits(low, ids).dtype == torch.bfloat16
    assert_close(logits(low, ids).float(), expected, 0.1, "bfloat16")
    assert low.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 33)


@each_block
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cache_serves_a_model_of_another_precision(name, dtype):
    model, ids = make(name).float(), tokens(2, 30)
    expected, cache = logits(model, ids), model.state(ids[:, :19])
    model = model.to(dtype)
    with torch.no_grad():
        first = model(ids[:, 19:20], past_key_values=cache, use_cache=True)
        rest = model(ids[:, 20:], past_key_values=first.past_key_values, use_cache=True)
    found = torch.cat([first.logits, rest.logits], 1)
    assert found.dtype == dtype
    assert_close(found.float(), expected[:, 19:], 0.1 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.slow
def test_compiled_training_computes_the_same():
    model, ids = make("titans-mag", num_hidden_layers=1).float().train(), tokens(2, 16)
    expected = model(ids, labels=ids).loss
    compiled = torch.compile(model)
    loss = compiled(ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert all(p.grad is not None for p in model.parameters())


def test_packed_documents_stay_apart_where_the_model_is_compiled():
    model, ids = model_of("swa"), tokens(1, 20)
    compiled = torch.compile(model, backend="eager")
    positions = torch.cat([torch.arange(9), torch.arange(11)]).unsqueeze(0)
    alone = torch.cat([logits(model, ids[:, :9]), logits(model, ids[:, 9:])], 1)
    for how in (dict(position_ids=positions), dict(cu_seqlens=torch.tensor([0, 9, 20]))):
        assert_close(logits(compiled, ids, **how), alone, 1e-9, str(list(how)))
    assert_close(logits(compiled, ids, position_ids=torch.arange(20).unsqueeze(0)), logits(model, ids), 1e-9)


def test_trainer_trains_and_its_checkpoint_keeps_the_cache_on(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = MnemosForCausalLM(small_config("titans-mag"))
    data = [{"input_ids": row, "labels": row} for row in tokens(8, 16)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    before = model.model.embed_tokens.weight.clone()
    assert trainer.train().training_loss < 6
    assert not torch.equal(before, model.model.embed_tokens.weight)
    assert trainer.evaluate()["eval_loss"] < 6
    trainer.save_model(str(tmp_path / "out"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.use_cache


def test_labels_of_minus_100_do_not_count_and_logits_are_made_only_where_asked_for():
    model, ids = make("titans-mag"), tokens(2, 12)
    labels = ids.clone()
    labels[:, :5] = -100
    out = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert model.train()(ids, labels=labels).logits is None
    model.eval()
    assert_close(model(ids, logits_to_keep=3).logits, model(ids).logits[:, -3:], 1e-12)
    assert_close(model(ids, logits_to_keep=torch.tensor([0, 7])).logits, model(ids).logits[:, [0, 7]], 1e-12)
    assert model(ids, labels=labels, num_items_in_batch=100).loss.item() == pytest.approx(expected.item() * 14 / 100)
    nothing = model(ids, labels=torch.full_like(ids, -100)).loss
    assert nothing.item() == 0.0
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 3 and torch.equal(states[-1], model.model(ids).last_hidden_state)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert torch.equal(embedded, model(ids).logits)
    assert isinstance(model(ids, return_dict=False), tuple)


@pytest.mark.parametrize("compiling", [False, True])  # compiled, it does not skip what it need not know, but masks it
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_fused_loss_has_the_loss_and_gradients_of_the_plain_one(dtype, tolerance, compiling, monkeypatch):
    monkeypatch.setattr("mnemos.models.loss.MAX_LOGITS_NUMEL", 7 * 50)
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: compiling)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator, dtype=dtype, requires_grad=True) for n in (23, 50))
    targets = torch.randint(0, 50, (23,), generator=generator)
    targets[::4] = -100
    total, count = cross_entropy(hidden, weight, targets)
    (total * 0.3).backward()
    found = [x.grad.clone() for x in (hidden, weight)]
    hidden.grad = weight.grad = None
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    (expected * 0.3).backward()
    assert count == 17 and total.item() == pytest.approx(expected.item(), rel=tolerance)
    for a, b in zip(found, (hidden.grad, weight.grad)):
        assert_close(a, b, tolerance)


@pytest.mark.parametrize("target", [-1, -99, 50])
def test_a_target_that_is_no_token_is_refused(target):
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        cross_entropy(torch.randn(3, 8), torch.randn(50, 8), torch.tensor([1, target, -100]))


def test_a_large_vocabulary_never_has_all_its_logits_in_memory():
    import resource

    V, N = 32000, 4096  # all logits would be 524 MB
    hidden, weight = torch.randn(N, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cross_entropy(hidden, weight, torch.randint(0, V, (N,)))[0].backward()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 200


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(), "give exactly one of input_ids and inputs_embeds"),
        (dict(input_ids=tokens(2, 3), attention_mask=torch.ones(2, 2)), "attention_mask has shape"),
        (dict(input_ids=tokens(2, 3), past_key_values="x"), "past_key_values is a str, but must be a MnemosCache"),
        (dict(input_ids=tokens(1, 3), cu_seqlens=torch.tensor([0, 2])), "cu_seqlens must rise from 0 to T=3"),
        (dict(input_ids=tokens(2, 3), cu_seqlens=torch.tensor([0, 3])), "for a batch of one sequence"),
        (dict(input_ids=torch.arange(3)), r"input_ids has 1 dimensions, but \(B, T\) is expected"),
        (dict(inputs_embeds=torch.zeros(3, 32)), r"inputs_embeds has 2 dimensions, but \(B, T, D\) is expected"),
        (dict(input_ids=tokens(2, 3), labels=tokens(2, 2)), r"labels have shape \(2, 2\), but \(2, 3\) is expected"),
        (
            dict(input_ids=tokens(2, 3), labels=tokens(1, 3), attention_mask=torch.eye(2, 3)),
            r"labels have shape \(1, 3\)",
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        model_of("titans-lmm")(**arguments)


def test_a_cache_of_another_model_or_another_batch_is_refused(tmp_path):
    model, ids = model_of("titans-mag"), tokens(2, 5)
    cache = model.state(ids)
    other = make("titans-mag", attention_window=4)
    with pytest.raises(ValueError, match=r"another model: attention_window=8 \(here 4\)"):
        other(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="the cache has 2 batch rows, but the input has 3"):
        model(tokens(3, 2), past_key_values=cache)
    with pytest.raises(ValueError, match="rows"):
        cache.select([5])
    with pytest.raises(ValueError, match="copies"):
        cache.fork(0)
    (tmp_path / "no.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not a readable cache"):
        MnemosCache.load(tmp_path / "no.safetensors")
    cache.save(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match="another model"):
        MnemosCache.load(tmp_path / "cache.safetensors", other.config)
    with pytest.raises(ValueError, match="is not a cache of this version"):
        cache.layers[0]["memory"].save(tmp_path / "memory.safetensors")
        MnemosCache.load(tmp_path / "memory.safetensors")
    for config, length in (("{", "5"), ("{}", "five"), ("[]", "5")):
        header = {"format": "mnemos.cache/1", "config": config, "length": length, "states": "{}"}
        write_tensors(tmp_path / "broken.safetensors", {"x": torch.zeros(1)}, header)
        with pytest.raises(ValueError, match="has a broken header"):
            MnemosCache.load(tmp_path / "broken.safetensors")


def test_a_cache_fits_a_config_that_spells_out_the_same_choices():
    model, ids = model_of("titans-mag"), tokens(2, 5)
    spelt = dict(head_dim=16, num_key_value_heads=2, memory_structure="mlp", memory_backend="torch")
    other = make("titans-mag", **spelt)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        found = other(ids, past_key_values=model.state(ids)).logits
    assert_close(found, logits(model, torch.cat([ids, ids], 1))[:, 5:], 1e-9)


def test_layer_patterns_long_term_tokens_and_gates_work_together():
    for mode in ("product", "sigmoid", "convex", "additive"):
        model = make(
            "titans-mac",
            layers=["mac", "mag", "swa", "lmm", "attention", "qk"],
            num_hidden_layers=6,
            num_longterm_tokens=3,
            num_persistent_tokens=2,
            gate_mode=mode,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        )
        ids = tokens(2, 19)
        with torch.no_grad():
            first = model(ids[:, :6], use_cache=True)
            second = model(ids[:, 6:], past_key_values=first.past_key_values)
        assert_close(torch.cat([first.logits, second.logits], 1), logits(model, ids), 1e-9, mode)
        model.train()(ids, labels=ids).loss.backward()
        assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()], mode
        assert presets.count(model.config) == model.num_parameters()


def test_vocab_is_large_enough_for_the_zoo():
    assert tokens(4, 100).max() < VOCAB


@pytest.mark.slow
@pytest.mark.parametrize("name", ["titans-lmm", "titans-mag", "atlas-mal", "omeganet"])
def test_compiled_decoding_computes_the_same(name):
    """Across the end of a chunk, and from a cache that others go on from too."""
    torch.manual_seed(0)
    model = randomise(MnemosForCausalLM(presets.config(name, "nano", num_hidden_layers=2, hidden_size=32))).eval()
    ids = torch.randint(0, 256, (2, 90))
    start = model.state(ids[:, :58])
    kept = start.clone()
    expected, cache = [], start
    with torch.no_grad():
        for t in range(58, 90):
            output = model(ids[:, t : t + 1], past_key_values=cache)
            expected.append(output.logits)
            cache = output.past_key_values
        model.compile_decoding()
        cache = start
        for t in range(58, 90):
            output = model(ids[:, t : t + 1], past_key_values=cache)
            assert_close(output.logits, expected[t - 58], 1e-4)
            cache = output.past_key_values
    for mine, before in zip(start.layers, kept.layers):
        for name, state in mine.items():
            (found, _), (right, _) = to_tensors(state), to_tensors(before[name])
            assert all(torch.equal(found[key], right[key]) for key in right)


@pytest.mark.parametrize(
    "name",
    [
        "titans-mal",
        "atlas",
        "deeptransformer",
        "swdt",
        "dot",
        "titans-mag towards zero",
        "atlas-mag towards zero",
    ],
)
def test_decoding_with_stand_ins_for_places_computes_the_same(name):
    """What `compile_decoding` does around the compiler, with rows at one place and at several."""
    model, ids = randomise(make(name, num_hidden_layers=1), scale=0.15), tokens(2, 34)
    expected = logits(model, ids)
    model.compile_decoding(backend="eager")
    for starts in ((14, 14), (14, 5)):
        cache = MnemosCache.stack([model.state(ids[row : row + 1, :start]) for row, start in enumerate(starts)])
        for i in range(12):
            piece = torch.stack([ids[row, start + i : start + i + 1] for row, start in enumerate(starts)])
            with torch.no_grad():
                output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            right = torch.stack([expected[row, start + i] for row, start in enumerate(starts)])
            assert_close(output.logits[:, 0], right, 1e-9, f"rows from {starts}, token {i}")
