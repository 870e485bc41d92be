"""`mnemos train --match-size`: another model's number of parameters, by the width of the feed-forward layers."""

from __future__ import annotations

import pytest

from mnemos.cli import main
from mnemos.cli.train import read_arguments
from mnemos.models import MnemosForCausalLM, presets
from mnemos.train import ModelConfig, TrainConfig, Trainer
from mnemos.train.match_size import match_size, parameters_of
from small import small


def size_of(config: ModelConfig, vocab_size: int = 256) -> int:
    return presets.count(presets.config(config.preset, config.size, **{"vocab_size": vocab_size} | config.overrides()))


@pytest.mark.parametrize("preset", ["transformer", "swa", "titans-mac", "atlas"])
@pytest.mark.parametrize("target", ["titans-mag", "titans-mac", "1_200_000", "1.2M"])
def test_both_have_one_size_to_half_a_hidden_unit(preset, target):
    matched, wanted = match_size(ModelConfig(preset), target, vocab_size=256)
    assert wanted == parameters_of(target, "nano", {"vocab_size": 256})
    unit = 3 * 128 * 4  # three rows of weights in each of four layers
    assert abs(size_of(matched) - wanted) <= unit / 2


def test_a_preset_gets_the_shape_and_the_vocabulary_of_the_run():
    config = ModelConfig("transformer", "nano", ("hidden_size=64", "num_hidden_layers=2"))
    matched, wanted = match_size(config, "titans-mag", vocab_size=500)
    assert wanted == presets.count(
        presets.config("titans-mag", "nano", vocab_size=500, hidden_size=64, num_hidden_layers=2)
    )
    assert abs(size_of(matched, 500) - wanted) <= 3 * 64 * 2 / 2
    tiny = match_size(config, "titans-mag:tiny", vocab_size=500)[1]
    assert tiny == presets.count(presets.config("titans-mag", "tiny", vocab_size=500))


def test_a_run_and_a_folder_are_matched_by_what_they_hold(tmp_path):
    trainer = Trainer(small(tmp_path, steps=1))
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "saved")
    shape = ModelConfig("transformer", "nano", ("hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2"))
    for target in (trainer.path, tmp_path / "saved"):
        matched, wanted = match_size(shape, str(target), vocab_size=256)
        assert wanted == trainer.size
        model = MnemosForCausalLM(presets.config("transformer", "nano", vocab_size=256, **matched.overrides()))
        assert abs(sum(p.numel() for p in model.parameters()) - trainer.size) <= 3 * 32 * 2 / 2


def test_the_flag_is_recorded_as_a_width_so_that_the_run_can_be_repeated_and_resumed(capsys):
    config, _ = read_arguments(["--preset", "transformer", "--match-size", "titans-mag", "--recipe", "debug"])
    assert isinstance(config, TrainConfig) and config.model.overrides()["intermediate_size"] > 128 * 8 // 3
    assert "parameters, with --model.set intermediate_size=" in capsys.readouterr().err
    assert main(["train", "--preset", "transformer", "--match-size=titans-mag", "--dry-run"]) == 0
    shown = capsys.readouterr()
    wanted = shown.err.partition("titans-mag: ")[2].partition(" parameters")[0]
    assert abs(int(wanted.replace(",", "")) - size_of(config.model)) <= 3 * 128 * 4 / 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--match-size", "nothing"], "is no preset of `mnemos presets`"),
        (["--match-size", "1000"], "more than 1,000; choose fewer layers"),
        (["--match-size", "transformer", "--model.set", "intermediate_size=9"], "leave it out of --model.set"),
        (["--match-size"], "--match-size needs a value"),
        (["--resume", "runs/none", "--match-size", "swa"], "leave out --recipe, --config and --match-size"),
    ],
)
def test_impossible_sizes_are_one_sentence(flags, message, capsys):
    assert main(["train", *flags]) == 2
    assert message in capsys.readouterr().err


def test_foreign_folders_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    with pytest.raises(ValueError, match="holds no model of ours"):
        match_size(ModelConfig("transformer"), str(tmp_path), 256)
    (tmp_path / "config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"config\.json"):
        match_size(ModelConfig("transformer"), str(tmp_path), 256)
