"""Recipes: named changes to `TrainConfig`, nested as in its YAML."""

from __future__ import annotations

from typing import Any

from ..choices import unknown
from .config import TrainConfig, merge


def _paper(size: str, lr: float, tokens: str) -> dict[str, Any]:
    """Atlas, table 7: AdamW, cosine, weight decay 0.1, length 4,096, half a million tokens per step (in four batches,
    blocks recomputed in the backward pass), a 32k vocabulary."""
    return {
        "model": {"size": size},
        "data": {"seq_len": 4096, "batch_size": 32, "tokenizer": "bpe:32000"},
        "optim": {"lr": lr, "weight_decay": 0.1, "clip": 1.0},
        "schedule": {"name": "cosine", "warmup": 0.01},
        "tokens": tokens,
        "accumulate": 4,
        "gradient_checkpointing": True,
        "dtype": "bfloat16",
        "watch": {"validate_every": 1000, "probe_every": 5000, "probe_length": 8192},
        "checkpoint": {"every": 1000},
    }


RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "quick": (
        "a first run: 300 steps of 8 x 256 tokens, a few minutes on a laptop CPU",
        {
            "steps": 300,
            "data": {"seq_len": 256, "batch_size": 8},
            "watch": {"validate_every": 100},
            "checkpoint": {"every": 100},
        },
    ),
    "debug": (
        "a test of every part of a run, within seconds: 20 steps, with two validations and two probes",
        {
            "steps": 20,
            "data": {"seq_len": 128, "batch_size": 2},
            "watch": {
                "log_every": 1,
                "validate_every": 10,
                "probe_every": 10,
                "probe_length": 192,
                "sample_tokens": 20,
            },
            "checkpoint": {"every": 10},
        },
    ),
    "170m": ("Atlas and Titans at 170M: 15B tokens, lr 3e-3", _paper("170m", 3e-3, "15B")),
    "340m": ("Atlas and Titans at 340M: 15B tokens, lr 1.5e-3", _paper("340m", 1.5e-3, "15B")),
    "760m": ("Atlas and Titans at 760M: 30B tokens, lr 1.25e-3", _paper("760m", 1.25e-3, "30B")),
    "1.3b": ("Atlas at 1.3B: 100B tokens, lr 7e-4", _paper("1.3b", 7e-4, "100B")),
    "chinchilla": ("20 tokens per parameter, for any model", {"tokens": "chinchilla", "steps": None}),
    "chunk-warm-down": (
        "the last 5 % with a memory chunk of 8: a model trained with a large chunk degrades when run with a small one",
        {"schedule": {"finish_chunk": 8, "finish_share": 0.05}},
    ),
}


def recipe(config: TrainConfig, name: str) -> TrainConfig:
    """Apply a recipe to a config.

    >>> recipe(TrainConfig(), "340m").optim.lr
    0.0015
    """
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return merge(config, RECIPES[name][1])
