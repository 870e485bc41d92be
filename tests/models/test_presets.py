"""The table of presets: its names, its counts, what can be changed, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from zoo import HAS_MEMORY, NAMES, make, small_config, tokens

from mnemos.models import MnemosConfig, MnemosForCausalLM, presets
from mnemos.models.gate import GATES, make_gate
from mnemos.models.mixer import BLOCKS

NAMED = [
    "titans-lmm",
    "titans-mac",
    "titans-mag",
    "titans-mal",
    "omeganet",
    "atlas",
    "atlas++",
    "atlas-mac",
    "atlas-mag",
    "atlas-mal",
    "dla",
    "swla",
    "deeptransformer",
    "swdt",
    "dot",
    "qk-mag",
    "linear-attention",
    "retnet",
    "deltanet",
    "gated-deltanet",
    "ttt-linear",
    "ttt-mlp",
    "yaad",
    "moneta",
    "memora",
    "transformer",
    "swa",
]
COUNTS = json.loads((Path(__file__).parent / "parameter_counts.json").read_text())


def test_every_model_of_the_papers_is_a_row_of_the_table():
    assert set(NAMED) <= set(presets.names())
    for preset in presets.PRESETS.values():
        assert preset.block in BLOCKS and preset.about


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_as_many_as_they_say(name):
    assert {size: presets.count(presets.config(name, size)) for size in presets.SIZES} == COUNTS[name]


@pytest.mark.parametrize("name", ["transformer", "swa", "titans-mag", "titans-mal", "titans-mac", "qk-mag"])
def test_a_convolution_of_attention_is_its_weights_alone(name):
    sizes = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    without, with_4 = (presets.count(presets.config(name, attention_conv_width=width, **sizes)) for width in (0, 4))
    assert with_4 - without == 3 * 4 * (64 + 2 * 32)  # layers, width, channels of q, k and v
    assert presets.config(name).attention_conv_width == (4 if name in ("transformer", "swa") else 0)


@pytest.mark.parametrize("name", NAMES)
def test_counting_without_allocating_counts_what_a_model_has(name):
    model = make(name, num_longterm_tokens=2, gate_mode="product")
    assert presets.count(model.config) == model.num_parameters() == sum(p.numel() for p in model.parameters())
    untied = small_config(name, tie_word_embeddings=False)
    assert presets.count(untied) == MnemosForCausalLM(untied).num_parameters()


@pytest.mark.parametrize("name", NAMES)
def test_a_config_goes_through_json_unchanged(name, tmp_path):
    config = presets.config(name, "340m", memory_layers=[0, 3], gate_mode="convex")
    config.save_pretrained(tmp_path)
    loaded = MnemosConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict() and loaded.blocks == config.blocks
    if config.has_memory:
        assert loaded.memory_config == config.memory_config


ABLATIONS = {
    "polynomial features": dict(memory_features="identity", memory_key_dim=None),
    "muon": dict(memory_rule="gd"),
    "depth": dict(memory_structure="linear"),
    "window": dict(memory_window=1, memory_gate="none"),
    "gates": dict(memory_gate="none"),
    "forgetting": dict(memory_retain=False),
    "memory": dict(memory_layers=[]),
}


@pytest.mark.parametrize("preset, what", [*(("atlas-mag", what) for what in ABLATIONS), ("titans-mag", "momentum")])
def test_an_ablation_leaves_no_dead_parameter(preset, what):
    changes = ABLATIONS.get(what, dict(memory_momentum=False))
    full, model = make(preset), make(preset, **changes).train()
    ids = tokens(2, 30)
    model(ids, labels=ids).loss.backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    if what not in ("polynomial features", "muon"):
        assert model.num_parameters() < full.num_parameters()


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_has_only_parameters_it_uses(gate):
    model, ids = make("titans-mag", gate_mode=gate).train(), tokens(2, 30)
    model(ids, labels=ids).loss.backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_the_sigmoid_gate_only_attenuates_attention():
    gate = make_gate(small_config("titans-mag", gate_mode="sigmoid"))
    y, m, x = torch.randn(3, 2, 5, 32)
    assert (gate(y, 10 * m, x).abs() <= y.abs()).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(name="titan"), r"preset 'titan' is unknown; choose one of titans-lmm, titans-mac"),
        (dict(name="atlas", size="7b"), r"size '7b' is unknown; choose one of nano, micro"),
        (dict(name="atlas", memory_windw=3), r"no field memory_windw; did you mean memory_window"),
        (dict(name="atlas", whatever=3), r"no field whatever; there are"),
        (dict(name="swa", attention_window=0), r"attention_window=0 must be a whole number >= 1"),
        (dict(name="swa", attention_conv_width=-1), r"attention_conv_width=-1 must be a whole number >= 0"),
        (dict(name="swa", attention_conv_width=None), r"attention_conv_width=None must be a whole number >= 0"),
        (dict(name="swa", attention_conv_width=2**40), r"attention_conv_width=1099511627776 must be at most"),
        (dict(name="swa", num_attention_heads=3), r"num_attention_heads=3 must divide hidden_size=128"),
        (dict(name="swa", num_key_value_heads=3), r"num_key_value_heads=3 must divide num_attention_heads=4"),
        (dict(name="swa", head_dim=7), r"head_dim=7 must be even"),
        (dict(name="titans-mag", memory_layers=[4]), r"memory_layers=\[4\] must lie in 0..3"),
        (dict(name="titans-mag", layers="mga"), r"layers='mga' is unknown; choose one of lmm, mag, mal, mac"),
        (dict(name="titans-mag", layers=["mag"] * 5), r"layers names 5 blocks, but the model has num_hidden_layers=4"),
        (dict(name="titans-mag", gate_mode="or"), r"gate_mode='or' is unknown; choose one of product, sigmoid"),
        (dict(name="titans-mag", gate_init=1.0), r"gate_init=1.0 must lie between 0 and 1"),
        (dict(name="titans-mag", memory_rule="adam"), r"rule='adam' is unknown; choose one of 'gd', 'muon'"),
        (dict(name="titans-mag", memory={"foo": 1}), r"memory has no choice foo; there are structure, depth"),
        (dict(name="titans-mag", memory_heads=3), r"heads=3 must divide dim=128"),
        (dict(name="titans-mac", segment_length=0), r"segment_length=0 must be a whole number >= 1"),
        (dict(name="titans-mag", num_persistent_tokens=-1), r"num_persistent_tokens=-1 must be a whole number >= 0"),
        (dict(name="qk-mag", qk_projection={"foo": 1}), r"qk_projection has no choice foo; there are persistent"),
        (dict(name="titans-mag", dropout=1.0), r"dropout=1.0 must be >= 0 and < 1"),
        (dict(name="dot", memory_rule="muon"), r"features='exp' goes with structure='linear' or 'mlp', rule='gd'"),
        (dict(name="dot", layers="mac"), r"layers='mac' keeps a copy of its memory's weights"),
        (dict(name="deltanet", memory_rule="muon"), r"anchor='token' goes with structure='linear' and rule='gd'"),
    ],
)
def test_a_bad_config_is_refused_with_what_is_possible(arguments, message):
    with pytest.raises(ValueError, match=message):
        presets.config(**arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(memory_windw=3), r"memory has no choice windw; there are structure, depth"),
        (dict(memory="mlp"), r"memory='mlp' must be a dict of choices, or None"),
        (dict(qk_projection=3), r"qk_projection=3 must be a dict of choices, or None"),
        (dict(memory_layers=1), r"memory_layers=1 must be a list of layers, or None for all"),
        (dict(layers=None), r"layers=None is unknown; choose one of lmm, mag, mal, mac"),
        (dict(layers=[["lmm"]]), r"layers=\[\['lmm'\]\] is unknown; choose one of lmm, mag, mal, mac"),
        (dict(gate_init=None), r"gate_init=None must lie between 0 and 1"),
        (dict(dropout="0.1"), r"dropout='0.1' must be >= 0 and < 1"),
        (dict(rope_theta="1e4"), r"rope_theta='1e4' must be a number > 0"),
        (dict(rms_norm_eps=float("inf")), r"rms_norm_eps=inf must be a number > 0"),
        (dict(memory_eps="1e-6"), r"eps='1e-6' must be > 0"),
        (dict(memory_max_lr="1"), r"max_lr='1' must be None or > 0"),
        (dict(memory_lr_init="1"), r"lr_init='1' must lie between 0 and max_lr"),
        (dict(memory_retain_init="1"), r"retain_init='1' must lie between 0 and 1"),
        (dict(memory_output_gate="false"), r"output_gate='false' must be True or False"),
    ],
)
def test_a_choice_of_the_wrong_kind_is_refused_in_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        MnemosConfig(**arguments)


def test_a_config_changed_for_the_worse_is_refused_when_a_model_is_made():
    config = small_config("titans-mag")
    config.attention_window = 0
    with pytest.raises(ValueError, match="attention_window=0"):
        MnemosForCausalLM(config)


def test_dropout_acts_in_training_only():
    model, ids = make("titans-mag", dropout=0.5), tokens(1, 10)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


def test_memory_presets_differ_where_the_table_says_so():
    rows = {name: (presets.PRESETS[name].block, *presets.PRESETS[name].choices.values()) for name in HAS_MEMORY}
    specs = {name: presets.config(name).memory_config for name in HAS_MEMORY if presets.config(name).has_memory}
    assert len({(rows[name][0], json.dumps(dataclasses.asdict(spec))) for name, spec in specs.items()}) == len(specs)
