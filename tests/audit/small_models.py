"""Tiny models of transformers, of presets, and with attached memories, with weights far from their initial ones."""

from __future__ import annotations

import torch
import transformers

from helpers import randomise
from mnemos.attach import attach
from mnemos.models import MnemosForCausalLM, presets

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OWN = {"Mistral": {"sliding_window": 9}, "Gemma2": {"head_dim": 8, "sliding_window": 8}, "Qwen3": {"head_dim": 8}}
OWN["Mixtral"] = {"num_local_experts": 4, "num_experts_per_tok": 2}


def llama(name: str = "Llama"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | OWN.get(name, {}))
    return randomise(getattr(transformers, f"{name}ForCausalLM")(config).eval(), scale=0.1)


def attached(trained: bool = True, **fields):
    """A Llama with memories, whose gates are drawn at random as if they were trained."""
    torch.manual_seed(1)
    model = attach(llama(), layers="every:2", memory={"heads": 2, "chunk_size": 8}, **fields)
    for memory in model.memories.values() if trained else ():
        torch.nn.init.normal_(memory.gate)
    return model


def preset(name: str) -> MnemosForCausalLM:
    torch.manual_seed(0)
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=61)
    small |= dict(attention_window=8, segment_length=8)
    known = presets.PRESETS[name].memory
    if known is not None:
        least = {key: value for key, value in (("window", 3), ("key_dim", 4)) if key in known}
        small["memory"] = {"heads": 2, "chunk_size": 8} | least
    return randomise(MnemosForCausalLM(presets.config(name, "nano", **small)).eval(), scale=0.1)
