"""A tiny pretrained base in a folder, documents, and runs that train memories attached to it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import random_words
from mnemos.data import DataConfig
from mnemos.train import BaseConfig, CheckpointConfig, DistillConfig, OptimConfig, TrainConfig, WatchConfig
from small import changed

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
ATTACH = {"layers": "every:2", "window": 8, "sinks": 2, "memory": {"preset": "titans", "heads": 2, "chunk_size": 8}}


def base_folder(folder: Path, seed: int = 0) -> Path:
    """A Llama without a tokenizer, whose 256 tokens are bytes, with weights far from their initial ones."""
    path = folder / f"base-{seed}"
    if not path.exists():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(path)
    return path


def documents(folder: Path) -> str:
    """Many short documents of a fixed seed."""
    path = folder / "documents.jsonl"
    if not path.exists():
        words = random_words(3000).split()
        parts = [" ".join(words[i : i + 5 + i % 7]) for i in range(0, 2900, 12)]
        path.write_text("\n".join(json.dumps({"text": part}) for part in parts))
    return str(path)


def attached_run(folder: Path, **changes) -> TrainConfig:
    """A config in `folder`; changes of nested parts are dictionaries."""
    config = TrainConfig(
        base=BaseConfig(str(base_folder(folder)), ATTACH, gate_lr_scale=2.0),
        data=DataConfig(
            sources=(documents(folder),),
            seq_len=64,
            batch_size=4,
            packing="documents",
            val_fraction=0.1,
            val_batches=2,
            cache_dir=str(folder / "cache"),
        ),
        optim=OptimConfig(lr=1e-2),
        checkpoint=CheckpointConfig(every=5, asynchronous=False),
        watch=WatchConfig(log_every=1, validate_every=0, sample_tokens=0, prompt="the"),
        distill=DistillConfig(),
        folder=str(folder / "runs"),
        name="a",
        steps=10,
        device="cpu",
    )
    return changed(config, changes)
