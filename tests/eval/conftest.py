"""A tokenizer of bytes as transformers has them, and a saved model with it."""

from __future__ import annotations

import pytest
import torch

from helpers import randomise
from mnemos.models import MnemosForCausalLM, presets


def byte_tokenizer():
    """257 ids: every byte, and <eos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


@pytest.fixture(scope="session")
def hf_bytes():
    return byte_tokenizer()


@pytest.fixture(scope="session")
def model():
    """A small memory model of 257 ids whose weights are not those of its start."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "memory_heads": 2, "num_attention_heads": 2}
    made = MnemosForCausalLM(presets.config("titans-mag", vocab_size=257, attention_window=16, **small))
    return randomise(made, 0.05).eval()


@pytest.fixture(scope="session")
def saved(model, hf_bytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    hf_bytes.save_pretrained(folder)
    return folder


TEXT = (
    "The senate met early. It spoke of roads and of the army! Was peace at hand? Letters came from the coast, and each told of ships. "
    "No one answered them. The winter was long, and the granaries stood half empty; yet the market opened every day. Then a rider came. "
)


@pytest.fixture(scope="session")
def text():
    return TEXT * 8
