"""Runs small enough to try everything on: a model of two layers of 32, text of words in random order."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from helpers import random_words
from mnemos.data import DataConfig
from mnemos.train import CheckpointConfig, ModelConfig, OptimConfig, TrainConfig, WatchConfig
from mnemos.train.telemetry import read_metrics

SET = (
    "hidden_size=32",
    "num_hidden_layers=2",
    "num_attention_heads=2",
    "attention_window=8",
    "segment_length=8",
    "memory={heads: 2, chunk_size: 8, window: 2, key_dim: 4}",
)


def text_file(folder: Path, words: int = 6000) -> str:
    """Text of a fixed seed, in documents of some lines."""
    path = folder / "words.txt"
    if not path.exists():
        path.write_text(random_words(words))
    return str(path)


def small(folder: Path, preset: str = "titans-mag", **changes) -> TrainConfig:
    """A config in `folder`; changes of nested parts are dictionaries."""
    memory = "memory={heads: 2, chunk_size: 8}" if preset.startswith("titans") else SET[-1]
    config = TrainConfig(
        model=ModelConfig(preset=preset, set=(*SET[:-1], memory)),
        data=DataConfig(
            sources=(text_file(folder),),
            seq_len=32,
            batch_size=4,
            val_fraction=0.1,
            val_batches=2,
            cache_dir=str(folder / "cache"),
        ),
        optim=OptimConfig(lr=3e-3),
        checkpoint=CheckpointConfig(every=5, asynchronous=False),
        watch=WatchConfig(log_every=1, validate_every=0, sample_tokens=0, prompt="the"),
        folder=str(folder / "runs"),
        name="a",
        steps=10,
        device="cpu",
    )
    return changed(config, changes)


def changed(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """The config with these fields; changes of nested parts are dictionaries."""
    for name, value in changes.items():
        part = getattr(config, name)
        setattr(config, name, dataclasses.replace(part, **value) if isinstance(value, dict) else value)
    return config


def losses(run: Path | str) -> dict[int, float]:
    """Every step's training loss, exactly as it was written; a step that was done again counts as it was last."""
    return {r["step"]: r["loss"] for r in read_metrics(run, "train")}


def events(run: Path | str) -> str:
    return "\n".join(r["message"] for r in read_metrics(run, "event"))


def state_of(run: Path | str, step: int) -> dict:
    return json.loads((Path(run) / "checkpoints" / f"step-{step:06d}" / "state.json").read_text())
