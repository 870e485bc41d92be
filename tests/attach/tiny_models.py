"""Tiny random models of transformers' own classes, one for each architecture that `attach` knows."""

from __future__ import annotations

import functools

import torch
import transformers
from torch import Tensor

from mnemos.attach import AttachConfig, AttachedForCausalLM, attach

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OWN = {  # architecture -> fields beside SIZES; sliding windows shorter than the sequences of the tests
    "Llama": {},
    "Mistral": {"sliding_window": 9},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    "Qwen3": {"head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "Gemma3": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "Phi3": {},
    "Olmo2": {},
    "SmolLM3": {"no_rope_layer_interval": 2},
    "GPTNeoX": {},
}
ARCHITECTURES = list(OWN)
MEMORY = {"heads": 2, "chunk_size": 8}


def base_model(name: str = "Llama", seed: int = 0, **fields) -> transformers.PreTrainedModel:
    """A model of an architecture, in evaluation mode, with weights far from their initial ones.

    Frozen, as `attach` leaves it: torch folds products in another order if a weight requires a gradient, even without recording one.
    """
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config(**SIZES | OWN[name] | fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def attached(
    name: str = "Llama", seed: int = 0, trained: bool = True, base: dict | None = None, **fields
) -> AttachedForCausalLM:
    """A model with memories, whose gates are drawn at random as if they were trained."""
    torch.manual_seed(seed + 1)
    config = AttachConfig(**{"layers": "every:2", "memory": MEMORY} | fields)
    model = attach(base_model(name, seed, **(base or {})), config)
    return draw_gates(model) if trained else model


def draw_gates(model: AttachedForCausalLM) -> AttachedForCausalLM:
    torch.manual_seed(7)
    with torch.no_grad():
        for memory in model.memories.values():
            memory.gate.normal_()
    return model


def tokens(rows: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(ids: Tensor, padding: list[int]) -> tuple[Tensor, Tensor]:
    """Ids whose first tokens of each row are padding, and their mask."""
    mask = torch.stack([torch.arange(ids.shape[1]) >= n for n in padding])
    return ids.masked_fill(~mask, 0), mask.long()


@functools.cache
def shared(name: str = "Llama", **fields) -> AttachedForCausalLM:
    """An attached model that tests share and do not change."""
    return attached(name, **fields)
