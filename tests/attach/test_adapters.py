"""Adapters and merged folders: the same logits after loading, and nothing that is damaged or of another base is opened."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, attached, base_model, tokens
from transformers import AutoModelForCausalLM

from mnemos.attach import add_lora, load_adapter, merge_lora, save_adapter, save_merged, smollm_adapter

WINDOWED = {"window": 6, "sinks": 2}


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPTNeoX"])
@torch.no_grad()
def test_a_loaded_adapter_gives_the_same_logits(name, tmp_path):
    model, ids = attached(name, **WINDOWED), tokens(2, 20)
    save_adapter(model, tmp_path / "adapter.safetensors")
    other = load_adapter(base_model(name), tmp_path / "adapter.safetensors")
    assert torch.equal(other(ids).logits, model(ids).logits)


@pytest.mark.parametrize("folder", ["/home/ann/models/tiny-llama", "../models/tiny-llama", "tiny-llama"])
def test_an_adapter_names_the_folder_of_its_base_and_not_the_way_there(folder, tmp_path, monkeypatch):
    (tmp_path / "models" / "tiny-llama").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model = attached()
    for given, expected in ((folder, "tiny-llama"), ("owner/tiny-llama", "owner/tiny-llama")):
        model.base.config._name_or_path = model.base.name_or_path = given
        save_adapter(model, tmp_path / "adapter.safetensors")
        with safe_open(tmp_path / "adapter.safetensors", "pt") as file:
            assert file.metadata()["base_name"] == expected


def test_the_packaged_adapter_names_no_folder_of_a_machine():
    with safe_open(smollm_adapter(), "pt") as file:
        header = file.metadata()
    assert header["base_name"] == "smollm2-135m-instruct"


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_a_merged_folder_opens_by_auto_model(name, tmp_path):
    model, ids = attached(name), tokens(2, 12)
    save_merged(model, tmp_path / "model")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(other(ids).logits, model(ids).logits)
    assert all(p.requires_grad for p in other.memories.parameters())
    assert not any(p.requires_grad for p in other.base.parameters())


@torch.no_grad()
def test_tied_embeddings_stay_tied_and_memories_stay_float32(tmp_path):
    model, ids = attached(base={"tie_word_embeddings": True}), tokens(2, 12)
    save_merged(model, tmp_path / "model")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    assert other.base.lm_head.weight is other.base.model.embed_tokens.weight
    assert other.base.dtype == torch.bfloat16 and other.memories["1"].gate.dtype == torch.float32
    assert torch.isfinite(other(ids).logits).all()


def test_another_base_is_refused_in_a_sentence_and_another_precision_is_not(tmp_path):
    path = tmp_path / "adapter.safetensors"
    save_adapter(attached(), path)
    with pytest.raises(ValueError, match="whose weights differ from those of this one") as raised:
        load_adapter(base_model(seed=4), path)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="a base of type 'llama', but this one is 'qwen3'"):
        load_adapter(base_model("Qwen3"), path)
    load_adapter(base_model(seed=4), path, allow_other_base=True)
    load_adapter(base_model().to(torch.bfloat16), path)


@pytest.mark.parametrize("wrong", ["nan", "shape", "missing", "foreign", "type", "header", "lora", "text"])
def test_a_damaged_adapter_is_refused_in_a_sentence(wrong, tmp_path):
    path, name = tmp_path / "adapter.safetensors", "memories.1.gate"
    save_adapter(attached(), path)
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    if wrong == "nan":
        tensors[name][0] = torch.nan
    elif wrong == "shape":
        tensors[name] = tensors[name][1:].contiguous()
    elif wrong == "missing":
        del tensors[name]
    elif wrong == "foreign":
        tensors["base.model.embed_tokens.weight"] = torch.zeros(61, 32)
    elif wrong == "type":
        tensors[name] = tensors[name].long()
    elif wrong == "header":
        header["attach"] = "[" * 100_000
    elif wrong == "lora":
        header["lora"] = json.dumps({"r": 10**9, "lora_alpha": 1, "target_modules": ["q_proj"]})
    save_file(tensors, path, header)
    if wrong == "text":
        path.write_text("no adapter")
    with pytest.raises(ValueError) as raised:
        load_adapter(base_model(), path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


@pytest.mark.parametrize("wrong", ["nan", "missing", "foreign", "shape"])
def test_a_damaged_folder_is_refused(wrong, tmp_path):
    save_merged(attached(), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors, name = load_file(path), "memories.1.memory.qkv.weight"
    if wrong == "nan":
        tensors[name][0] = torch.nan
    elif wrong == "missing":
        del tensors[name]
    elif wrong == "foreign":
        tensors["memories.0.gate"] = torch.zeros(32)
    else:
        tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@torch.no_grad()
def test_lora_maps_train_with_the_memories_and_are_kept(tmp_path):
    pytest.importorskip("peft", reason="the extra lora is not installed")
    model, ids = attached(**WINDOWED), tokens(2, 20)
    add_lora(model, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name.startswith("memories.") or ".lora_" in name)
        if "lora_B" in name:
            parameter.normal_()
    expected = model(ids).logits
    save_adapter(model, tmp_path / "adapter.safetensors")
    assert torch.equal(load_adapter(base_model(), tmp_path / "adapter.safetensors")(ids).logits, expected)
    with pytest.raises(ValueError, match="merge_lora"):
        save_merged(model, tmp_path / "model")
    save_merged(merge_lora(model), tmp_path / "model")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert (other(ids).logits - expected).abs().max() < 1e-4
