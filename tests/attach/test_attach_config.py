"""`AttachConfig`, and everything that `attach` and the command refuse, each in one sentence."""

from __future__ import annotations

import pytest
import torch
from tiny_models import MEMORY, attached, base_model, tokens
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from mnemos import cli
from mnemos.attach import AttachConfig, AttachedModelConfig, attach, load_adapter, memory_names


def test_json_keeps_every_field():
    config = AttachConfig(layers=[3, 1], window=8, sinks=0, memory={"preset": "atlas", "heads": 2}, target="attn")
    assert AttachConfig.from_json(config.to_json()) == config
    assert config.layer_indices(4) == (1, 3)


@pytest.mark.parametrize("name", memory_names())
def test_every_memory_has_a_name(name):
    assert not AttachConfig(memory=name).memory_config(64).spec.is_kv_cache


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"layers": "each:5"}, "layers='each:5' must be 'every:N' or a list of layer indices"),
        ({"layers": "every:0"}, "must be 'every:N'"),
        ({"layers": []}, "a list of different layer indices"),
        ({"layers": [1, 1]}, "a list of different layer indices"),
        ({"layers": [-1]}, "a list of different layer indices"),
        ({"layers": [True]}, "a list of different layer indices"),
        ({"layers": [9]}, r"must lie in 0\.\.3, the layers of the base model"),
        ({"layers": "every:64"}, "names none of the 4 layers"),
        ({"window": 0}, "window=0 must be None or a whole number"),
        ({"window": 2.5}, "window=2.5 must be None or a whole number"),
        ({"sinks": -1}, "sinks=-1 must be a whole number"),
        ({"memory": "titan"}, "memory='titan' is unknown; did you mean titans"),
        ({"memory": {"depht": 2}}, "no field depht; did you mean depth"),
        ({"memory": {"dim": 32}}, "always the width of the base model"),
        ({"memory": {"features": "exp", "momentum": False, "retain": False}}, "grow with every token"),
        ({"memory": 3}, "must be the name of a preset or a dict"),
        ({"target": "self.attn"}, "must be the name of a module"),
        ({"target": "attn"}, "no list of 4 layers that each have a module 'attn'"),
        ({"windows": 3}, "no field 'windows'; did you mean window"),
    ],
)
def test_a_wrong_field_is_one_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence) as raised:
        attach(base_model(), **fields)
    assert "\n" not in str(raised.value)


def test_an_unknown_architecture_is_refused_with_the_list():
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=61))
    with pytest.raises(ValueError, match=r"is of type 'gpt2', but attach knows llama, mistral, .*target='self_attn'"):
        attach(model)


def test_an_architecture_can_be_named_by_its_attention_module():
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = CohereForCausalLM(CohereConfig(**sizes, vocab_size=61)).eval().requires_grad_(False)
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = base(ids).logits
        model = attach(base, layers=[1], memory=MEMORY, target="self_attn")
        assert torch.equal(model(ids).logits, expected)


def test_a_model_is_attached_to_once():
    with pytest.raises(ValueError, match="has memories already"):
        attach(attached())
    with pytest.raises(ValueError, match="is a Linear, but a causal language model"):
        attach(torch.nn.Linear(2, 2))  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"base_config": {"model_type": "mnemos_attached"}}, "the type of a pretrained model is expected"),
        ({"base_config": {"model_type": "llama", "auto_map": {"AutoModel": "x.y"}}}, "names code to run"),
        ({"base_config": {"model_type": "llama"}, "attach": {"window": -1}}, "window=-1"),
        ({"base_config": {"model_type": "gpt2"}}, "attach knows"),
    ],
)
def test_a_strangers_config_is_checked(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        AttachedModelConfig(**fields)


def test_the_command_writes_a_folder_and_an_adapter(tmp_path, capsys):
    base_model().save_pretrained(tmp_path / "base")
    options = ["--layers", "1,3", "--window", "8", "--memory", "deltanet"]
    assert cli.main(["attach", str(tmp_path / "base"), str(tmp_path / "whole"), *options]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert list(model.memories) == ["1", "3"] and model.attach_config.window == 8
    file = str(tmp_path / "memories.safetensors")
    assert cli.main(["attach", str(tmp_path / "base"), file, "--adapter", *options]) == 0
    assert list(load_adapter(base_model(), file).memories) == ["1", "3"]
    capsys.readouterr()
    for words in (
        ["attach", str(tmp_path / "base"), str(tmp_path / "whole")],
        ["attach", str(tmp_path / "nothing"), str(tmp_path / "other")],
        ["attach", str(tmp_path / "base"), str(tmp_path / "other"), "--layers", "7"],
        ["attach", str(tmp_path / "base"), str(tmp_path / "other"), "--load", str(tmp_path / "base" / "config.json")],
    ):
        assert cli.main(words) != 0
        printed = capsys.readouterr().err
        assert "Traceback" not in printed and printed.strip().splitlines()[-1].startswith("mnemos: "), printed
    assert not (tmp_path / "other").exists()
