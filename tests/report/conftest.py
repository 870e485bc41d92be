"""A run of a minute's worth of nothing: two layers, a few steps, everything looked at."""

from __future__ import annotations

import pytest
from reporting import MEMORY, SMALL, TEXT

from helpers import random_words
from mnemos.data import DataConfig, open_tokenizer
from mnemos.train import CheckpointConfig, ModelConfig, TrainConfig, Trainer, WatchConfig


@pytest.fixture(scope="session")
def tokenizer():
    return open_tokenizer("bytes")


def _train(folder, name: str, preset: str, steps: int):
    file = folder / "words.txt"
    file.write_text(random_words(4000))
    overrides = tuple(f"{key}={value}" for key, value in (SMALL | MEMORY).items())
    config = TrainConfig(
        model=ModelConfig(preset=preset, set=overrides),
        data=DataConfig(
            sources=(str(file),),
            seq_len=48,
            batch_size=4,
            val_fraction=0.1,
            val_batches=2,
            cache_dir=str(folder / "cache"),
        ),
        checkpoint=CheckpointConfig(every=4, asynchronous=False),
        watch=WatchConfig(log_every=1, validate_every=4, probe_every=4, probe_length=96, sample_tokens=8, prompt="the"),
        folder=str(folder / "runs"),
        name=name,
        steps=steps,
        device="cpu",
    )
    return Trainer(config).train().path


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run's folder with three checkpoints."""
    return _train(tmp_path_factory.mktemp("a"), "first", "titans-mag", 12)


@pytest.fixture(scope="session")
def other_run(tmp_path_factory):
    return _train(tmp_path_factory.mktemp("b"), "second", "titans-mal", 8)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path
