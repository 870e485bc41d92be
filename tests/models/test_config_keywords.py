"""Keywords of `MnemosConfig`: ours and transformers' are accepted, everything else is refused by name."""

from __future__ import annotations

import json

import pytest

from mnemos.memory import NeuralMemoryConfig
from mnemos.models import MnemosConfig


@pytest.mark.parametrize(
    "keywords, message",
    [
        (dict(junk=1), r"MnemosConfig has no keyword 'junk'"),
        (dict(hiden_size=64), r"no keyword 'hiden_size' \(did you mean 'hidden_size'\?\)"),
        (dict(atention_window=4, num_atention_heads=2), r"'attention_window'\?\), .*'num_attention_heads'"),
        (dict(memory_windw=4), r"memory has no choice windw; .* Did you mean memory_window\?"),
        (dict(memory_layer=[0]), r"memory has no choice layer; .* Did you mean memory_layers\?"),
        (dict(memory={"windw": 4}), r"memory has no choice windw"),
        (dict(rope_scaling={"factor": 2.0}), r"no keyword 'rope_scaling'"),
        (dict(per_layer_config={0: {"hidden_size": 8}}), r"no keyword 'per_layer_config'"),
        (dict(validate_choices=1), r"no keyword 'validate_choices'"),
        (dict(_junk=1), r"no keyword '_junk'"),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest_name(keywords, message):
    with pytest.raises(ValueError, match=message):
        MnemosConfig(**keywords)


def test_keywords_that_transformers_passes_and_stores_are_accepted():
    MnemosConfig(
        architectures=["MnemosForCausalLM"],
        torch_dtype="float32",
        transformers_version="4.51.0",
        _name_or_path="runs/x",
        model_type="mnemos",
        bos_token_id=1,
        eos_token_id=[2],
        pad_token_id=0,
        return_dict=True,
        output_attentions=False,
        output_hidden_states=False,
        id2label={"0": "a"},
        label2id={"a": 0},
        num_labels=1,
        auto_map={"AutoConfig": "mnemos_auto.MnemosConfig"},
        attn_implementation="sdpa",
        _attn_implementation_autoset=True,
        problem_type=None,
        task_specific_params=None,
        tokenizer_class="PreTrainedTokenizerFast",
        is_decoder=True,
        add_cross_attention=False,
        tie_encoder_decoder=False,
        torchscript=False,
        temperature=0.7,
        max_length=20,
        num_beams=1,
        quantization_config={"quant_method": "x"},
    )


def test_config_files_of_ours_open_and_a_strangers_unknown_key_is_refused(tmp_path):
    MnemosConfig(memory_window=3, layers=["lmm", "swa"], architectures=["MnemosForCausalLM"]).save_pretrained(tmp_path)
    assert MnemosConfig.from_pretrained(tmp_path).memory == {"window": 3, "retention": "start"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_sise": 64}))
    with pytest.raises(ValueError, match=r"no keyword 'hidden_sise' \(did you mean 'hidden_size'\?\)"):
        MnemosConfig.from_pretrained(tmp_path)


def test_a_config_file_written_in_full_and_one_of_transformers_4_open(tmp_path):
    full = MnemosConfig(memory_window=3).to_dict()
    assert MnemosConfig.from_dict(dict(full)).memory == {"window": 3, "retention": "start"}
    older = full | dict(torch_dtype="float32", _commit_hash=None, use_bfloat16=False, pruned_heads={}, prefix=None)
    older |= dict(top_k=50, do_sample=False, bad_words_ids=None, finetuning_task=None, sep_token_id=None)
    assert MnemosConfig.from_dict(older).memory == {"window": 3, "retention": "start"}


def test_a_file_from_before_retention_could_be_chosen_forgets_towards_zero():
    full = MnemosConfig(memory_window=3).to_dict()
    for memory in ({"window": 3}, {}, None):
        assert MnemosConfig.from_dict(full | {"memory": memory}).memory_config.retention == "zero"
    assert MnemosConfig.from_dict(full | {"memory": {}}, memory_retention="start").memory["retention"] == "start"
    without = MnemosConfig(layers="swa").to_dict()
    assert MnemosConfig.from_dict(without).memory == {}
    assert NeuralMemoryConfig.from_json('{"dim": 32}').retention == "zero"
    assert NeuralMemoryConfig(dim=32).retention == "start"
    assert NeuralMemoryConfig(dim=32, structure="linear").retention == "zero"


def test_memory_keywords_override_a_saved_config_and_are_no_attributes(tmp_path):
    MnemosConfig(memory_window=3, memory_depth=2).save_pretrained(tmp_path)
    config = MnemosConfig.from_pretrained(tmp_path, memory_window=5, attention_window=7)
    assert config.memory == {"window": 5, "depth": 2, "retention": "start"} and config.attention_window == 7
    with pytest.raises(ValueError, match=r"set config.memory\['window'\]"):
        config.memory_window = 4


def test_an_attribute_that_a_tool_sets_does_not_keep_a_saved_config_from_opening(tmp_path):
    config = MnemosConfig(hidden_size=32, memory_window=4)
    config.note = "set by somebody's training loop"
    config.save_pretrained(tmp_path)
    opened = MnemosConfig.from_pretrained(tmp_path)
    assert opened.memory["window"] == 4 and not hasattr(opened, "note")


@pytest.mark.parametrize(
    "value",
    [
        "my_parts",
        None,
        {"my_parts": 1},
        ["my-parts"],
        ["../parts"],
        ["parts.py; import os"],
        ["a..b"],
        [""],
        [1],
        [["a"]],
        ["a\nb"],
        ["a" * 101],
        ["a"] * 17,
    ],
)
def test_required_modules_of_a_file_are_names_of_modules(tmp_path, value):
    MnemosConfig().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"requires_modules": value}))
    with pytest.raises(ValueError, match=r"requires_modules=.* must be a list of at most 16 names of Python modules"):
        MnemosConfig.from_pretrained(tmp_path)


def test_required_modules_of_a_file_are_not_kept_if_the_memory_needs_none(tmp_path):
    names = ["a" * 100, "b.c", *(f"m{i}" for i in range(14))]
    config = MnemosConfig.from_dict(MnemosConfig().to_dict() | {"requires_modules": names})
    assert "requires_modules" not in config.to_dict() and not hasattr(config, "requires_modules")
    with pytest.raises(ValueError, match=r"no keyword 'requires_module' \(did you mean 'requires_modules'\?\)"):
        MnemosConfig(requires_module=["a"])


def test_a_part_that_is_not_registered_is_refused_with_its_module():
    fields = MnemosConfig().to_dict() | {"memory": {"rule": "theirs"}, "requires_modules": ["b.parts"]}
    with pytest.raises(ValueError, match=r"rule='theirs' is not registered; .* use --import b\.parts, or in Python"):
        MnemosConfig.from_dict(fields)
    fields.pop("requires_modules")
    with pytest.raises(ValueError, match=r"rule='theirs' is unknown; choose one of 'gd', 'muon'"):
        MnemosConfig.from_dict(fields)
