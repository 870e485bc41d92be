"""A run of a minute's worth of nothing: two layers, a few steps, everything looked at."""

from __future__ import annotations

import pytest
from reporting import MEMORY, SMALL, TEXT

from mnemos.data import open_tokenizer
from mnemos.train import Trainer
from small import small
from small import text_file as words_file


@pytest.fixture(scope="session")
def tokenizer():
    return open_tokenizer("bytes")


def _train(folder, name: str, preset: str, steps: int):
    words_file(folder, words=4000)
    overrides = tuple(f"{key}={value}" for key, value in (SMALL | MEMORY).items())
    changes = {
        "model": {"set": overrides},
        "data": {"seq_len": 48},
        "optim": {"lr": 2e-3},
        "checkpoint": {"every": 4},
        "watch": {"validate_every": 4, "probe_every": 4, "probe_length": 96, "sample_tokens": 8},
    }
    return Trainer(small(folder, preset, name=name, steps=steps, **changes)).train().path


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
