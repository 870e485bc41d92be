"""What a step computes."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import assert_close_rms
from mnemos.models import MnemosForCausalLM, presets
from mnemos.models.cache import MnemosCache
from mnemos.train import Trainer, load_model
from mnemos.train.hooks import gates, memories, memory_off, set_chunk_size
from mnemos.train.losses import predicted_tokens
from mnemos.train.tbptt import CarriedState
from mnemos.train.telemetry import read_metrics
from small import events, losses, small


def run(folder, **changes) -> dict[int, float]:
    Trainer(small(folder, **changes)).train()
    return losses(folder / "runs" / changes.get("name", "a"))


def test_training_lowers_the_loss_on_text_never_seen(tmp_path):
    config = small(tmp_path, steps=60, watch={"validate_every": 20}, optim={"lr": 1e-2})
    result = Trainer(config).train()
    found = [r["val_loss"] for r in read_metrics(result.path, "validate")]
    assert len(found) == 3 and result.val_loss == found[-1]
    assert found[-1] < found[0] - 0.1 and found[-1] < 3.0 < math.log(256)


def test_accumulated_batches_are_one_large_batch(tmp_path):
    whole = run(tmp_path, name="whole", steps=4, data={"batch_size": 8})
    pieces = run(tmp_path, name="pieces", steps=4, data={"batch_size": 2}, accumulate=4)
    assert whole == pytest.approx(pieces, rel=2e-5)


@pytest.mark.parametrize("packing", ["stream", "documents", "windows"])
def test_the_tokens_counted_are_those_the_model_predicts(tmp_path, packing):
    folder = tmp_path / "docs"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text("a few words " * (1 + i % 5))
    trainer = Trainer(small(tmp_path, data={"sources": (str(folder),), "packing": packing}))
    for _ in range(3):
        batch = next(trainer.data.train)
        inputs = {key: batch[key] for key in ("input_ids", "labels", "position_ids") if key in batch}
        with torch.no_grad():
            mean = trainer.model(**inputs).loss
            total = trainer.model(**inputs, num_items_in_batch=1).loss
        assert predicted_tokens(batch) == round((total / mean).item())


def test_gradient_checkpointing_changes_no_loss(tmp_path):
    plain = run(tmp_path, name="plain", steps=3)
    assert run(tmp_path, name="less", steps=3, gradient_checkpointing=True) == pytest.approx(plain, rel=1e-6)


def test_bfloat16_stays_near_float32(tmp_path):
    wide, narrow = run(tmp_path, name="wide", steps=5), run(tmp_path, name="narrow", steps=5, dtype="bfloat16")
    assert narrow == pytest.approx(wide, rel=2e-2) and narrow != wide


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["swa", "titans-mag"])
def test_compiled_blocks_have_the_same_losses(tmp_path, preset):
    plain = run(tmp_path, preset=preset, name="plain", steps=2)
    torch._dynamo.utils.counters.clear()
    assert run(tmp_path, preset=preset, name="fast", steps=2, compile=True) == pytest.approx(plain, rel=1e-4)
    assert (
        torch._dynamo.utils.counters["stats"]["unique_graphs"] < 20
    )  # a memory that is traced has one for every chunk


@pytest.mark.parametrize("model", [{"preset": "titan"}, {"size": "nanoo"}, {"set": ("hidden_sizes=3",)}])
def test_a_model_that_cannot_be_is_refused_before_any_data_is_read(tmp_path, model):
    config = small(tmp_path, model=model, data={"sources": (str(tmp_path / "an-hour-of-reading.txt"),)})
    with pytest.raises(ValueError, match=r"preset 'titan'|size 'nanoo'|no field hidden_sizes"):
        Trainer(config)


def test_the_average_is_that_of_the_weights_and_can_be_exported(tmp_path):
    config = small(tmp_path, steps=3, optim={"ema": 0.5}, watch={"validate_every": 3})
    trainer = Trainer(config)
    name = "model.embed_tokens.weight"
    seen = [trainer.model.get_parameter(name).detach().clone()]
    one_step = trainer.loop.step

    def watched(step):
        outcome = one_step(step)
        seen.append(trainer.model.get_parameter(name).detach().clone())
        return outcome

    trainer.loop.step = watched
    result = trainer.train()
    expected = 0.125 * seen[0] + 0.125 * seen[1] + 0.25 * seen[2] + 0.5 * seen[3]
    assert torch.allclose(load_model(result.path, average=True).get_parameter(name), expected, atol=1e-6)
    assert torch.equal(load_model(result.path).get_parameter(name), seen[3])
    numbers = read_metrics(result.path, "validate")[-1]
    assert numbers["val_loss_average"] > numbers["val_loss"]  # it lags behind


# ---- carried memory


def carried_model(preset: str, **choices) -> MnemosForCausalLM:
    torch.manual_seed(0)
    small_memory = {"memory_heads": 2, "memory_chunk_size": 8} if preset != "qk-mag" else {}
    config = presets.config(
        preset,
        "nano",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_window=8,
        segment_length=8,
        **(small_memory | choices),
    )
    return MnemosForCausalLM(config).train()


@pytest.mark.parametrize("preset", ["titans-mag", "atlas-mal", "titans-mac", "omeganet", "qk-mag", "transformer"])
def test_rows_that_go_on_read_one_long_text_and_rows_that_do_not_start_afresh(preset):
    model, carried = carried_model(preset).double(), CarriedState()
    ids = torch.randint(0, 256, (3, 44), generator=torch.Generator().manual_seed(1))
    first, second = ids[:, :21], ids[:, 21:]
    carried.after(model(first, use_cache=True, return_logits=False).past_key_values)
    goes_on = torch.tensor([True, False, True])
    cache = carried.before(model, {"input_ids": second, "continues": goes_on})
    logits = model(second, past_key_values=cache, use_cache=True, return_logits=True).logits
    whole = model(ids, return_logits=True, use_cache=False).logits[:, 21:]
    alone = model(second, return_logits=True, use_cache=False).logits
    assert_close_rms(logits[goes_on], whole[goes_on], 1e-9, "going on")
    assert_close_rms(logits[1], alone[1], 1e-9, "afresh")


def test_what_rows_start_from_is_learned_although_others_go_on():
    model, carried = carried_model("titans-mag", memory_w0_branch=False), CarriedState()
    ids = torch.randint(0, 256, (2, 16))
    carried.after(model(ids, use_cache=True, return_logits=False).past_key_values)
    for goes_on, learned in ((torch.tensor([True, True]), False), (torch.tensor([True, False]), True)):
        model.zero_grad()
        cache = carried.before(model, {"input_ids": ids, "continues": goes_on})
        model(ids, labels=ids, past_key_values=cache, use_cache=True, return_logits=False).loss.backward()
        for p in (model.model.persistent, model.model.layers[1].mixer.memory.W0[0]):
            assert p.grad is not None and bool(p.grad.abs().sum() > 0) == learned


def test_rows_of_many_processes_are_dealt_out_anew(tmp_path):
    model, carried = carried_model("titans-mag"), CarriedState()
    ids = torch.randint(0, 256, (4, 11))
    carried.after(model(ids, use_cache=True, return_logits=False).past_key_values)
    whole = carried.cache
    for rank in range(2):  # process r of 2 holds rows r and r + 2
        whole.select([rank, rank + 2]).save(tmp_path / f"carried-{rank}.safetensors")
    for size in (1, 2, 4):
        for rank in range(size):
            again = CarriedState()
            again.load(tmp_path, rank, size, 2, model.config, torch.device("cpu"))
            expected = whole.select(list(range(rank, 4, size)))
            assert_same(again.cache, expected)


def assert_same(a: MnemosCache, b: MnemosCache) -> None:
    for old, new in zip(a.layers, b.layers):
        assert torch.equal(old["memory"].weights[0], new["memory"].weights[0])
        assert torch.equal(old["attention"].key, new["attention"].key)


# ---- what is added to the loss, what is left out


def test_polarisation_makes_gates_decide(tmp_path):
    undecided = {}
    for name, strength in (("off", 0.0), ("on", 3.0)):
        changes = {
            "loss": {"polarisation": strength},
            "steps": 30,
            "optim": {"lr": 1e-2},
            "watch": {"validate_every": 30},
        }
        Trainer(small(tmp_path, name=name, **changes)).train()
        layers = read_metrics(tmp_path / "runs" / name, "validate")[-1]["layers"]
        undecided[name] = sum(layer["gate"]["undecided"] for layer in layers.values())
    assert undecided["on"] < undecided["off"] - 0.2
    last = read_metrics(tmp_path / "runs" / "on", "train")
    assert last[-1]["polarisation"] < last[0]["polarisation"] and last[-1]["polarisation_lambda"] < 3.0
    assert "polarisation" not in read_metrics(tmp_path / "runs" / "off", "train")[-1]


def test_memory_dropout_silences_whole_rows_in_training_and_none_in_evaluation(tmp_path):
    trainer = Trainer(small(tmp_path, loss={"memory_dropout": 0.5}))
    silent, spoken = 0, 0

    def count(module, args, output):
        nonlocal silent, spoken
        quiet = output[0].flatten(1).abs().sum(1) == 0
        silent, spoken = silent + int(quiet.sum()), spoken + int((~quiet).sum())

    for memory in memories(trainer.model).values():
        memory.register_forward_hook(count)
    trainer.train()
    assert 0.3 < silent / (silent + spoken) < 0.7
    before = silent
    with trainer.validator.evaluating():
        trainer.stepper.evaluate(trainer.data.validation)
    assert silent == before


def test_a_model_with_memory_off_is_a_model_without_it(tmp_path):
    model = carried_model("titans-mag").eval()
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        spoken = model(ids).logits
        with memory_off(model):
            silent = model(ids).logits
        for gate in gates(model).values():
            torch.nn.init.constant_(gate.offset, 40.0)  # convex: attention alone
        attention = model(ids).logits
        with memory_off(model):
            assert torch.equal(model(ids).logits, attention)
    assert not torch.allclose(spoken, silent)


def test_nothing_passes_from_one_segment_of_mac_to_the_next_while_its_memory_is_silent():
    model = carried_model("titans-mac").eval()
    length = model.config.segment_length
    ids = torch.randint(0, 256, (1, 2 * length + 3))
    other = ids.clone()
    other[:, :length] = (other[:, :length] + 1) % 256
    with torch.no_grad():
        assert not torch.equal(model(ids).logits[:, length:], model(other).logits[:, length:])
        with memory_off(model):
            assert torch.equal(model(ids).logits[:, length:], model(other).logits[:, length:])


# ---- chunk warm-down


def test_the_chunk_of_a_live_model_changes_what_it_computes_and_what_is_saved(tmp_path):
    model = carried_model("titans-mag").eval()
    ids = torch.randint(0, 256, (1, 40))
    with torch.no_grad():
        before = model(ids).logits
        ceiling = model.config.memory_config.effective_max_lr
        set_chunk_size(model, 4)
        after = model(ids).logits
        assert not torch.allclose(before, after)
        assert model.config.memory_config.effective_max_lr == ceiling
        cache = model.state(ids[:, :13])
        tail = model(ids[:, 13:], past_key_values=cache).logits
        assert_close_rms(tail, after[:, 13:], 1e-5)
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(MnemosForCausalLM.from_pretrained(tmp_path / "saved").eval()(ids).logits, after)
        set_chunk_size(model, 8)
        assert torch.equal(model(ids).logits, before)


def test_another_chunk_leaves_what_a_memory_starts_from():
    model = carried_model("titans-mag")
    memory = model.model.layers[0].mixer.memory
    before = [w.clone() for w in memory.initial_state(1).weights]
    set_chunk_size(model, 4)
    assert all(torch.equal(w, old) for w, old in zip(memory.initial_state(1).weights, before))
    assert MnemosForCausalLM(model.config).model.layers[0].mixer.memory.config == memory.config


@pytest.mark.parametrize("preset", ["titans-mag", "atlas-mag"])
def test_a_run_finishes_with_the_small_chunk(tmp_path, preset):
    schedule = {"finish_chunk": 4, "finish_share": 0.5}
    result = Trainer(small(tmp_path, preset, steps=4, schedule=schedule, data={"carry_state": True})).train()
    assert "step 2: the memory's chunk is now 4" in events(result.path)
    assert load_model(result.path, "last").config.memory_config.chunk_size == 4
    assert len(losses(result.path)) == 4
