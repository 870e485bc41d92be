"""The config: from YAML, from flags, from recipes, and what each refuses."""

from __future__ import annotations

import gc
import math

import pytest
import torch
import yaml

from mnemos.cli.train import read_arguments, uncollected
from mnemos.models import MnemosForCausalLM, presets
from mnemos.train import RECIPES, LossConfig, ModelConfig, OptimConfig, ScheduleConfig, TrainConfig, recipe
from mnemos.train.divergence import DivergenceGuard
from mnemos.train.optimisers import Optimisers, parameter_groups, split_parameters
from mnemos.train.schedules import chunk_size, lr_factor, polarisation
from small import small


def test_a_config_written_is_the_config_read(tmp_path):
    config = small(
        tmp_path, optim={"lr": 1.25e-5, "betas": (0.8, 0.9)}, watch={"trackers": ("wandb",)}, steps=None, tokens="15B"
    )
    config.save(tmp_path / "c.yaml")
    assert TrainConfig.load(tmp_path / "c.yaml") == config
    fields = yaml.safe_load((tmp_path / "c.yaml").read_text())
    assert fields["optim"]["lr"] == 1.25e-5 and fields["data"]["seq_len"] == 32


def test_what_a_file_does_not_say_has_its_default(tmp_path):
    (tmp_path / "c.yaml").write_text("optim:\n  lr: 1e-3\nsteps: 7\n")
    config = TrainConfig.load(tmp_path / "c.yaml")
    assert config.optim.lr == 1e-3 and config.steps == 7 and config.schedule == ScheduleConfig()


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("optim: {weigt_decay: 1}", r"no field optim.weigt_decay; did you mean weight_decay\?"),
        ("stps: 3", r"no field stps; did you mean steps\?"),
        ("steps: many", r"steps='many' must be int or nothing"),
        ("steps: 0", "steps=0 must be a whole number >= 1"),
        ("optim: {name: sgd}", "optim.name='sgd' is unknown; choose one of adamw, muon"),
        ("dtype: float16", "dtype='float16' is unknown; choose one of float32, bfloat16"),
        ("optim: {lr: -1}", "optim.lr=-1.0 must be > 0"),
        ("optim: 3", "optim must hold names and values"),
        ("[1, 2]", "is not a config"),
        ("a: [", "is not a readable config"),
        ("compile: 1", "compile=1 must be of type bool"),
        ("optim: {clip: -1}", "optim.clip=-1.0 must be >= 0"),
        ("optim: {w0_lr_scale: -1}", "optim.w0_lr_scale=-1.0 must be >= 0"),
        ("optim: {muon_lr: 0}", "optim.muon_lr=0.0 must be > 0"),
        ("optim: {betas: [0.9, 1.0]}", r"optim.betas=\(0.9, 1.0\) must be >= 0 and < 1"),
        ("schedule: {warmup: -3}", "schedule.warmup=-3.0 must be >= 0"),
        ("schedule: {finish_chunk: 0}", "schedule.finish_chunk=0 must be a whole number >= 1"),
        ("watch: {validate_every: -1}", "watch.validate_every=-1 must be a whole number >= 0"),
        ("loss: {polarisation: 1, polarisation_end: -1}", "loss.polarisation_end=-1.0 must be >= 0"),
        ("steps: 5\ntokens: 5M", "steps=5 and tokens='5M' both set the length of the run: give one of them"),
        ("data: {carry_state: true}\ngradient_checkpointing: true", "cannot be combined"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_sentence(tmp_path, text, sentence):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=sentence) as caught:
        TrainConfig.load(tmp_path / "c.yaml")
    assert "\n" not in str(caught.value)


def test_flags_override_a_file_which_overrides_a_recipe(tmp_path):
    (tmp_path / "c.yaml").write_text("optim: {lr: 0.5}\nsteps: 11\nname: old\n")
    (tmp_path / "old").mkdir()
    arguments = ["--recipe", "debug", "--config", str(tmp_path / "c.yaml"), "--preset", "titans-mal", "--size=micro"]
    arguments += ["--folder", str(tmp_path)]
    arguments += [
        "--data",
        "a.txt:0.3",
        "b.txt:0.7",
        "--optim.lr",
        "1e-3",
        "--carry-state",
        "--model.set",
        "memory_depth=3",
    ]
    config, resume = read_arguments(arguments)
    assert not resume and config.name == "old-2"  # another run of the name in the file, not into its folder
    assert (config.model.preset, config.model.size, config.model.set) == ("titans-mal", "micro", ("memory_depth=3",))
    assert config.data.sources == ("a.txt:0.3", "b.txt:0.7") and config.data.carry_state
    assert (config.optim.lr, config.steps, config.data.seq_len) == (1e-3, 11, 128)


@pytest.mark.parametrize(
    "arguments, length",
    [
        (["--recipe", "quick", "--tokens", "5M"], (None, "5M")),
        (["--recipe", "quick", "--tokens=5M"], (None, "5M")),
        (["--recipe", "340m", "--max-steps", "7"], (7, None)),
        (["--recipe", "quick", "--recipe", "340m"], (None, "15B")),
        (["--recipe", "340m", "--recipe", "quick"], (300, None)),
        (["--config", "tokens.yaml", "--recipe", "quick"], (None, "9M")),
        (["--config", "tokens.yaml", "--steps", "3"], (3, None)),
        (["--resume", ".", "--tokens", "1B"], (None, "1B")),
    ],
)
def test_the_last_word_about_the_length_of_a_run_counts(tmp_path, monkeypatch, arguments, length):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens.yaml").write_text("tokens: 9M")
    TrainConfig(steps=44).save(tmp_path / "config.yaml")
    config, _ = read_arguments(arguments)
    assert (config.steps, config.tokens) == length


def test_the_garbage_collector_rests_during_imports_alone():
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_two_lengths_at_once_are_refused():
    with pytest.raises(ValueError, match="steps=3 and tokens='5M' both set the length of the run"):
        read_arguments(["--steps", "3", "--tokens", "5M"])
    config = recipe(TrainConfig(), "340m")
    config.steps = 10
    with pytest.raises(ValueError, match="both set the length of the run"):
        config.total_steps(1)


def test_the_flags_of_the_seeds_scripts_are_understood():
    arguments = (
        "--batch-size 16 --gradient-accumulation-steps 4 --max-steps 61000 --output-dir out --lr 3e-4 --seq-len 256"
    )
    config, _ = read_arguments([*arguments.split(), "--optimizer", "muon", "--model.set", "memory_layers=[]"])
    assert (config.data.batch_size, config.accumulate, config.steps) == (16, 4, 61000)
    assert (config.folder, config.name) == (".", "out")
    assert (config.optim.lr, config.optim.name, config.data.seq_len) == (3e-4, "muon", 256)
    model = presets.config("titans-mag", "nano", **config.model.overrides())
    assert not model.has_memory


def test_resume_takes_the_config_of_the_run(tmp_path):
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    small(tmp_path, steps=33).save(run / "config.yaml")
    config, resume = read_arguments(["--resume", str(run), "--steps", "44"])
    assert resume and (config.name, config.folder, config.steps) == ("x", str(tmp_path / "runs"), 44)
    config, _ = read_arguments(["--resume", "--folder", str(tmp_path / "runs")])
    assert config.name == "x"
    with pytest.raises(ValueError, match="there is no"):
        read_arguments(["--resume", str(tmp_path / "none")])
    with pytest.raises(ValueError, match="leave out --recipe, --config and --match-size"):
        read_arguments(["--resume", str(run), "--recipe", "quick"])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_config(name):
    config = recipe(TrainConfig(), name)
    assert TrainConfig.from_dict(config.to_dict()) == config
    presets.config(config.model.preset, config.model.size)


@pytest.mark.parametrize(
    "name, lr, tokens", [("170m", 3e-3, 15e9), ("340m", 1.5e-3, 15e9), ("760m", 1.25e-3, 30e9), ("1.3b", 7e-4, 100e9)]
)
def test_the_papers_recipes_have_the_papers_numbers(name, lr, tokens):
    config = recipe(TrainConfig(), name)
    assert config.optim.lr == lr and config.token_budget(0) == tokens and config.optim.weight_decay == 0.1
    assert config.tokens_per_step == 2**19 and config.data.seq_len == 4096 and config.schedule.name == "cosine"
    assert config.total_steps(0) == math.ceil(tokens / 2**19)


def test_chinchilla_reads_twenty_tokens_per_parameter():
    config = recipe(TrainConfig(), "chinchilla")
    count = presets.count(presets.config("atlas-mag", "340m"))
    assert config.token_budget(count) == 20 * count
    assert config.total_steps(count) == math.ceil(20 * count / config.tokens_per_step)
    with pytest.raises(ValueError, match="recipe 'quik' is unknown; did you mean quick"):
        recipe(TrainConfig(), "quik")
    with pytest.raises(ValueError, match="tokens='lots' must be a number"):
        TrainConfig(tokens="lots").total_steps(1)


def test_cosine_warms_up_and_falls_to_its_end():
    config = ScheduleConfig("cosine", warmup=10, final=0.1)
    factors = [lr_factor(config, t, 100) for t in range(100)]
    assert factors[0] == 0.1 and factors[9] == 1.0 == max(factors)
    assert factors[55] == pytest.approx(0.55, abs=0.01) and factors[99] == pytest.approx(0.1, abs=0.002)
    assert all(a >= b for a, b in zip(factors[10:], factors[11:]))


def test_warmup_stable_decay_stays_at_its_peak_until_the_last_part():
    config = ScheduleConfig("wsd", warmup=0.1, decay=0.2, final=0.0)
    factors = [lr_factor(config, t, 100) for t in range(100)]
    assert factors[9:80] == [1.0] * 71 and factors[90] == pytest.approx(0.5) and factors[99] == pytest.approx(0.05)
    assert [lr_factor(ScheduleConfig("constant", warmup=0), t, 9) for t in (0, 8)] == [1.0, 1.0]


def test_the_strength_of_polarisation_has_the_seeds_numbers():
    config = LossConfig(polarisation=10.0, polarisation_end=0.1, polarisation_hold=0.1)
    found = [polarisation(config, t, 10000) for t in (0, 999, 1000, 5500, 10000)]
    assert found == pytest.approx([10, 10, 10, 1.0, 0.1])
    later = LossConfig(polarisation=1.0, polarisation_hold=0.25, polarisation_warmup=2000)
    assert [polarisation(later, t, 10000) for t in (0, 1999, 2000, 2499)] == [0, 0, 1.0, 1.0]
    assert polarisation(later, 10000, 10000) == pytest.approx(0.01)
    assert polarisation(LossConfig(), 5, 10) == 0.0


def test_the_chunk_changes_for_the_last_share_of_the_steps():
    assert [chunk_size(ScheduleConfig(finish_chunk=8, finish_share=0.05), t, 200) for t in (189, 190)] == [None, 8]
    assert chunk_size(ScheduleConfig(), 199, 200) is None


@pytest.mark.parametrize("preset", ["atlas-mag", "titans-mac", "qk-mag", "omeganet", "deltanet", "transformer"])
def test_every_parameter_has_one_optimiser_and_the_decay_it_should(preset):
    model = MnemosForCausalLM(presets.config(preset, "nano", num_hidden_layers=1))
    named = dict(model.named_parameters())
    name_of = {id(p): name for name, p in named.items()}
    matrices, decayed, plain = ([name_of[id(p)] for p in part] for part in split_parameters(named.items(), muon=True))
    assert sorted([*matrices, *decayed, *plain]) == sorted(named)
    for name in matrices:
        assert named[name].dim() == 2 and min(named[name].shape) > 1 and ".layers." in name
    for word in ("norm", "bias", "gating", "W0", "persistent", "embed_tokens", "mixer.gate"):
        assert not any(word in name for name in [*matrices, *decayed])
    assert any("feedforward.down" in name for name in matrices)
    assert split_parameters(named.items(), muon=False)[0] == []


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_hidden_maps_of_a_start_learn_at_a_share_of_the_rate(name):
    model = MnemosForCausalLM(presets.config("titans-lmm", "nano", num_hidden_layers=2, memory_depth=3))
    config = OptimConfig(name=name, lr=1e-2, w0_lr_scale=0.25)
    optimisers = Optimisers(model, config)
    optimisers.set_factor(0.5)
    name_of = {id(p): name for name, p in model.named_parameters()}
    rates = {name_of[id(p)]: g["lr"] for o in optimisers.all for g in o.param_groups for p in g["params"]}
    assert rates.keys() == dict(model.named_parameters()).keys()
    slow = {name for name, rate in rates.items() if rate == 0.5 * 0.25 * 1e-2}
    assert slow == {name for name in rates if name.endswith(("W0.0", "W0.1"))} and len(slow) == 4
    assert all(rates[name] == 0.5e-2 for name in rates.keys() - slow)
    shares = {name_of[id(p)]: g["lr"] / 1e-2 for g in parameter_groups(model, config) for p in g["params"]}
    assert shares == {name: 0.25 if name in slow else 1.0 for name in rates}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimisers_lower_a_loss_and_can_be_allocated_without_moving_a_weight(name):
    torch.manual_seed(0)
    model = MnemosForCausalLM(presets.config("titans-lmm", "nano", num_hidden_layers=1, hidden_size=32, memory_heads=2))
    optimisers = Optimisers(model, OptimConfig(name=name, lr=3e-3))
    before = [p.detach().clone() for p in model.parameters()]
    optimisers.allocate()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    keys = {key.rsplit(".", 1)[1] for key in optimisers.tensors()}
    assert keys == ({"step", "exp_avg", "exp_avg_sq"} | ({"momentum_buffer"} if name == "muon" else set()))
    ids = torch.randint(0, 20, (2, 24))
    found = []
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimisers.step()
        optimisers.zero_grad()
        found.append(loss.item())
    assert found[-1] < found[0] - 0.5
    optimisers.set_factor(0.5)
    assert optimisers.lr == 1.5e-3 and len(optimisers.all) == (2 if name == "muon" else 1)


def test_the_guard_forgets_single_bad_steps_and_remembers_their_number():
    guard, config = DivergenceGuard(), TrainConfig().checkpoint
    assert [guard.see(x, config) for x in (3.0, math.inf, 3.0, math.nan, 2.9)] == [
        "good",
        "skip",
        "good",
        "skip",
        "good",
    ]
    assert guard.bad_steps == 2 and guard.healthy


def test_model_settings_are_read_as_yaml():
    found = ModelConfig(set=("memory={depth: 3}", "memory_layers=[0, 1]", "dropout=0.1")).overrides()
    assert found == {"memory": {"depth": 3}, "memory_layers": [0, 1], "dropout": 0.1}
    with pytest.raises(ValueError, match="must have the form name=value"):
        ModelConfig(set=("depth",)).overrides()
