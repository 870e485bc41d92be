"""`mnemos attach`: a folder or an adapter file, also from an adapter with LoRA maps."""

from __future__ import annotations

import pytest
import torch
from tiny_models import attached, base_model, tokens
from transformers import AutoModelForCausalLM

from mnemos.attach import add_lora, save_adapter
from mnemos.cli import main


@torch.no_grad()
def test_an_adapter_with_lora_maps_becomes_a_folder_with_the_same_logits(tmp_path, capsys):
    pytest.importorskip("peft", reason="the extra lora is not installed")
    model, ids = attached(window=6, sinks=2), tokens(2, 20)
    add_lora(model, r=4, lora_alpha=8, target_modules=["q_proj"])
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_()
    save_adapter(model, tmp_path / "adapter.safetensors")
    base_model().save_pretrained(tmp_path / "base")
    words = ["attach", str(tmp_path / "base"), str(tmp_path / "out"), "--load", str(tmp_path / "adapter.safetensors")]
    assert main(words) == 0
    assert "LoRA maps are added" in capsys.readouterr().out
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (other(ids).logits - model(ids).logits).abs().max() < 1e-4
