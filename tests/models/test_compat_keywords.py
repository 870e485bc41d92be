"""Keywords of mnemos.compat: an unknown one is refused with the nearest name, one without counterpart with a reason, and every accepted
one changes what is built."""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings

import pytest
import torch

import mnemos.compat as compat
from mnemos.models.compat import unsupported
from mnemos.models.compat.memory import KEYWORDS, translate_memory
from mnemos.models.config import MEMORY_FIELDS

TRANSFORMERS = ("MemoryAsContextTransformer", "MemoryAsGateTransformer", "MemoryAsLayerTransformer", "AtlasLMM")
SMALL = dict(num_tokens=20, dim=16, depth=2)
CONFIGS = (compat.TitansConfig, compat.AtlasConfig)


def built(name, **keywords) -> str:
    """The config of a model, or of a memory, as text."""
    kind = getattr(compat, name)
    with torch.device("meta"):
        if name in TRANSFORMERS:
            return kind(**SMALL | keywords).config.to_json_string()
        if name in ("NeuralMemory", "DeepMemoryModule"):
            width = {"input_dim": 64} if name == "DeepMemoryModule" else {"dim": 64}
            return kind(**width | keywords).config.to_json()
        return kind(**keywords).translated().to_json_string()


# Unknown keywords


@pytest.mark.parametrize(
    "make, near",
    [
        (lambda: compat.NeuralMemory(dim=64, omega_windw=8, poly_moed="tensor"), "omega_window'.*poly_mode"),
        (lambda: compat.NeuralMemory(dim=64, chunksize=8), "chunk_size"),
        (lambda: compat.DeepMemoryModule(input_dim=64, hiden_dim=8), "hidden_dim"),
        (lambda: compat.TitansConfig(num_layer=3), "num_layers"),
        (lambda: compat.AtlasConfig(context_windw=3), "context_window"),
        (lambda: compat.titans_small(vocabsize=3), "vocab_size"),
        (lambda: compat.atlas_large(memory_dept=3), "memory_depth"),
        (lambda: compat.AtlasConfig.small(memory_dept=3), "memory_depth"),
        (lambda: compat.TitansLM(compat.TitansConfig(), varient="MAG"), "variant"),
        (lambda: compat.Atlas(cnfig=compat.AtlasConfig()), "config"),
        (lambda: compat.PolynomialFeatures(input_dim=4, degre=2), "degree"),
        (lambda: compat.PolynomialFeatureMap(input_dim=4, degre=2), "degree"),
        (lambda: compat.LearnableTaylorKernel(ordr=2), "order"),
        (lambda: compat.AtlasAttention(cnfig=compat.AtlasConfig()), "config"),
        (lambda: compat.AtlasMemoryUpdate(cnfig=compat.AtlasConfig()), "config"),
        *(
            (lambda name=name: getattr(compat, name)(**SMALL, num_persist_mem_token=4), "num_persist_mem_tokens")
            for name in TRANSFORMERS
        ),
        (lambda: compat.AtlasLMM(**SMALL, neural_memory_kwargs=dict(chunk_sze=8)), "chunk_size"),
    ],
)
def test_a_misspelt_keyword_is_refused_with_the_nearest_name(make, near):
    with pytest.raises(ValueError, match=f"did you mean '{near}"):
        make()


def test_a_misspelt_attribute_of_a_config_is_refused():
    config = compat.AtlasConfig(hidden_size=64)
    config.polynomial_degree = 1
    with pytest.raises(ValueError, match="did you mean 'polynomial_degree'"):
        config.polynomial_degre = 1


def test_a_misspelt_keyword_of_a_call_is_refused():
    ids, x = torch.randint(0, 20, (1, 5)), torch.randn(1, 5, 64)
    memory = compat.NeuralMemory(dim=64)
    model = compat.AtlasLMM(**SMALL)
    for call, near in (
        (lambda: memory(x, memory_stat=None), "memory_state"),
        (lambda: model(ids, lables=ids), "labels"),
        (lambda: model(ids, return_los=True), "return_dict|return_logits"),
    ):
        with pytest.raises(ValueError, match=near):
            call()
    with pytest.raises(ValueError, match="junk"):
        model(ids, junk=1)
    with pytest.raises(ValueError, match="top_kk"):
        model.generate(ids, max_new_tokens=2, top_kk=3)


# Keywords without a counterpart


@pytest.mark.parametrize("name, entry", unsupported.MEMORY.items())
def test_a_memory_keyword_without_counterpart_is_refused_with_a_reason(name, entry):
    with pytest.raises(ValueError, match=f"NeuralMemory does not support {name}=.*: "):
        compat.NeuralMemory(dim=64, **{name: object()})
    for off in entry.off:
        compat.NeuralMemory(dim=64, **{name: off})


@pytest.mark.parametrize("name, entry", unsupported.TRANSFORMER.items())
def test_a_transformer_keyword_without_counterpart_is_refused_with_a_reason(name, entry):
    with pytest.raises(ValueError, match=f"MemoryAsContextTransformer does not support {name}=.*: "):
        compat.MemoryAsContextTransformer(**SMALL, **{name: object()})
    for off in entry.off:
        assert built("MemoryAsContextTransformer", **{name: off}) == built("MemoryAsContextTransformer")


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name, entry", unsupported.CONFIG.items())
def test_a_config_keyword_without_counterpart_is_refused_with_a_reason(kind, name, entry):
    with pytest.raises(ValueError, match=f"{kind.__name__} does not support {name}=.*: "):
        kind(**{name: object()})
    for off in entry.off:
        assert kind(**{name: off}) == kind()


def test_the_issues_own_examples_are_refused_with_a_reason():
    for keyword, reason in (
        (dict(sliding_window_attn=True), "MAC attends within segments"),
        (dict(neural_mem_weight_residual=True), "does not read the weights of another layer"),
        (dict(num_residual_streams=4), "hyper-connections are not implemented"),
    ):
        with pytest.raises(ValueError, match=reason):
            compat.MemoryAsContextTransformer(**SMALL, **keyword)


def test_calls_refuse_what_they_lack_with_a_reason():
    x, ids = torch.randn(1, 5, 64), torch.randint(0, 20, (1, 5))
    memory, model = compat.NeuralMemory(dim=64), compat.AtlasLMM(**SMALL)
    with pytest.raises(ValueError, match=r"does not support prev_weights=.*: a memory does not read the weights"):
        memory(x, prev_weights=torch.ones(1, 5))
    with pytest.raises(ValueError, match="write_mask and store_mask are the same: give one"):
        memory(x, write_mask=torch.ones(1, 5) > 0, store_mask=torch.ones(1, 5) > 0)
    with pytest.raises(ValueError, match="does not support return_cache=True: give use_cache=True"):
        model(ids, return_cache=True)
    with pytest.raises(ValueError, match="does not support show_progress=True: there is no progress bar"):
        model.sample(ids, 8, show_progress=True)


def test_names_of_titans_pytorch_for_what_a_token_writes():
    torch.manual_seed(0)
    memory = compat.NeuralMemory(dim=64, num_kv_per_token=2, max_grad_norm=0.5)
    assert (memory.spec.pairs_per_token, memory.spec.max_grad_norm) == (2, 0.5)
    x, other, writes = torch.randn(1, 9, 64), torch.randn(1, 9, 64), torch.rand(1, 9) < 0.5
    y, _ = memory(x, store_seq=other, store_mask=writes)
    assert torch.equal(y, memory(x, kv=other, write_mask=writes)[0])
    assert not torch.equal(y, memory(x)[0])


def test_our_own_names_are_refused_where_another_name_says_the_same():
    for keyword, name in (
        (dict(hidden_size=64), "dim"),
        (dict(segment_length=8), "segment_len"),
        (dict(memory_window=8), "neural_memory_kwargs"),
        (dict(memory={"window": 8}), "neural_memory_kwargs"),
        (dict(layers="swa"), "the class chooses"),
    ):
        with pytest.raises(ValueError, match=name):
            compat.MemoryAsContextTransformer(**SMALL, **keyword)


# Every accepted keyword has an effect

MEMORY_VALUES = dict(
    d_key=8, d_value=8, num_memory_layers=3, use_momentum=False, use_forget_gate=False, omega_window=3, conv_kernel_size=2,
    muon_momentum=0.5, muon_nesterov=True, use_omega_gate=True, use_muon_optimizer=True, spectral_norm_surprises=True,
    qk_rmsnorm=True, use_l2_norm_keys=False, use_conv=False, use_qkv_convs=False, poly_mode="elementwise", dim_head=8,
    num_kv_per_token=2,
)  # fmt: skip


@pytest.mark.parametrize("name", KEYWORDS)
def test_every_keyword_of_a_memory_has_an_effect(name):
    if name == "poly_degree":
        base, value = dict(poly_mode="elementwise"), 3
    elif name == "poly_sketch_size":
        base, value = dict(poly_mode="polysketch"), 200
    elif name == "memory_hidden_dim":
        base, value = dict(d_value=16), 100
    else:
        base, value = {}, MEMORY_VALUES[name]
    assert translate_memory("x", 64, base).fields != translate_memory("x", 64, base | {name: value}).fields
    if name != "muon_nesterov":
        assert built("NeuralMemory", **base) != built("NeuralMemory", **base, **{name: value})


def test_nesterov_reaches_the_memory():
    assert built("NeuralMemory", use_muon_optimizer=True) != built(
        "NeuralMemory", use_muon_optimizer=True, muon_nesterov=True
    )


TRANSFORMER_VALUES = dict(
    num_tokens=30, dim=32, depth=3, segment_len=8, window_size=8, num_persist_mem_tokens=2, num_longterm_mem_tokens=2,
    neural_memory_layers=(1,), omega_window=3, use_omega_gate=True, poly_mode="elementwise", poly_degree=3,
    use_muon_optimizer=True, heads=2, dim_head=8, ff_mult=2, neural_memory_kwargs=dict(depth=3),
)  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("keyword", TRANSFORMER_VALUES)
def test_every_keyword_of_a_transformer_has_an_effect_or_is_refused(name, keyword):
    signature = inspect.signature(getattr(compat, name)).parameters
    assert set(TRANSFORMER_VALUES) == {n for n in signature if n not in ("config", "fields")}
    base = dict(poly_mode="elementwise") if keyword == "poly_degree" else {}
    try:
        changed = built(name, **base, **{keyword: TRANSFORMER_VALUES[keyword]})
    except ValueError as error:
        assert keyword in getattr(compat, name).without_effect and keyword in str(error)
    else:
        assert changed != built(name, **base)


CONFIG_VALUES = dict(
    d_model=128, num_layers=3, vocab_size=30, num_heads=4, d_head=16, d_key=8, d_value=8, chunk_size=8, window_size=8,
    num_persistent_tokens=3, num_memory_layers=3, memory_hidden_dim=24, use_momentum=False, use_forget_gate=False,
    use_l2_norm_keys=False, use_qkv_conv=False, conv_kernel_size=2, ffn_hidden_dim=100, dropout=0.1, init_std=0.1,
    context_window=3, polynomial_degree=3, hidden_size=128, context_window_size=3, memory_depth=3, memory_hidden_size=24,
    use_muon_optimizer=False, use_polynomial_features=False, learnable_decay_weights=False, learning_rate_inner=0.02,
    momentum_beta=0.6, muon_momentum=0.6,
)  # fmt: skip
BLOCKS_OF = {"chunk_size": ("MAC",), "window_size": ("MAG", "MAL"), "d_head": ("MAC", "MAG", "MAL")}


@pytest.mark.parametrize("variant", ["MAC", "MAG", "MAL", "LMM"])
@pytest.mark.parametrize(
    "kind, field",
    [(kind, f.name) for kind in CONFIGS for f in dataclasses.fields(kind) if f.name in CONFIG_VALUES],
)
def test_every_field_of_a_config_has_an_effect_or_is_refused(kind, field, variant):
    try:
        changed = kind(variant=variant, **{field: CONFIG_VALUES[field]}).translated()
    except ValueError as error:
        assert variant not in BLOCKS_OF.get(field, (variant,)) and field in str(error)
    else:
        assert changed.to_json_string() != kind(variant=variant).translated().to_json_string()


def test_the_fields_tested_are_all_but_those_with_tests_of_their_own():
    fields = {f.name for kind in CONFIGS for f in dataclasses.fields(kind)}
    assert fields - set(CONFIG_VALUES) == {"variant", "muon_nesterov", "taylor_expansion_order"}


def test_nesterov_of_a_config_reaches_the_memory():
    assert compat.AtlasConfig(muon_nesterov=True).translated().memory_config.nesterov is True


RELATIVES = ("OmegaNet", "DeepTransformer")


@pytest.mark.parametrize("name", RELATIVES)
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(compat.AtlasConfig) if f.name in CONFIG_VALUES])
def test_every_field_of_a_config_has_an_effect_on_the_relatives_of_atlas_or_a_warning_says_not(name, field):
    def config(**fields):
        kind = getattr(compat, name)
        return kind.translate(compat.AtlasConfig(variant="MAG", **fields)).to_json_string()

    value = True if field in ("use_muon_optimizer", "use_momentum") else CONFIG_VALUES[field]
    value = {"learning_rate_inner": 1e-5, "use_forget_gate": name == "DeepTransformer" or value}.get(field, value)
    base = dict(use_momentum=True) if (name, field) == ("OmegaNet", "momentum_beta") else {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            changed = config(**base, **{field: value})
        except ValueError as error:
            assert field in str(error)
            return
    assert any(f"{field}=" in str(w.message) for w in said) or changed != config(**base)


# What conflicts


@pytest.mark.parametrize(
    "keywords, message",
    [
        (dict(use_muon_optimizer=False, spectral_norm_surprises=True), "both set rule"),
        (dict(omega_window=2, window=3), "omega_window and window both set window"),
        (dict(use_conv=False, conv_kernel_size=3), "both set conv_width"),
        (dict(d_key=8, dim_head=16), "both set key_dim"),
        (dict(poly_degree=3), "poly_degree=3 needs poly_mode"),
        (dict(poly_mode="elementwise", poly_degree=0), "poly_degree=0 must be a whole number >= 1"),
        (dict(poly_sketch_size=8), "poly_sketch_size=8 needs poly_mode='polysketch'"),
        (dict(omega_window=0), "omega_window=0 must be a whole number >= 1"),
        (dict(num_memory_layers=0), "num_memory_layers=0 must be a whole number >= 1"),
        (dict(use_momentum="no"), "use_momentum='no' must be True or False"),
        (dict(use_omega_gate="no"), "use_omega_gate='no' must be True or False"),
        (dict(memory_hidden_dim=8), "memory_hidden_dim=8 needs d_value"),
    ],
)
def test_keywords_of_a_memory_that_conflict_are_refused_by_their_own_names(keywords, message):
    with pytest.raises(ValueError, match=message):
        compat.NeuralMemory(dim=64, **keywords)


@pytest.mark.parametrize(
    "kind, keywords, message",
    [
        (compat.AtlasConfig, dict(context_window=0), "context_window=0 must be a whole number >= 1"),
        (compat.AtlasConfig, dict(context_window_size=0), "context_window_size=0 must be a whole number >= 1"),
        (compat.AtlasConfig, dict(d_model=0), "d_model=0 must be a whole number >= 1"),
        (compat.AtlasConfig, dict(hidden_size=0), "hidden_size=0 must be a whole number >= 1"),
        (compat.AtlasConfig, dict(num_heads=0), "num_heads=0 must be"),
        (compat.AtlasConfig, dict(polynomial_degree=0), "polynomial_degree=0 must be a whole number >= 1"),
        (compat.AtlasConfig, dict(memory_depth=0), "memory_depth=0 must be a whole number >= 1"),
        (compat.AtlasConfig, dict(memory_hidden_size=0), "memory_hidden_size=0 must be a whole number >= 1"),
        (compat.AtlasConfig, dict(momentum_beta=0), "momentum_beta=0 must lie between 0 and 1"),
        (compat.AtlasConfig, dict(learning_rate_inner=2.0), "learning_rate_inner=2.0 must lie between 0 and 1"),
        (compat.AtlasConfig, dict(momentum_beta=0.9, muon_momentum=0.9), "are the same: give one"),
        (compat.AtlasConfig, dict(use_momentum=False, momentum_beta=0.9), "momentum_beta=0.9 has no effect"),
        (compat.AtlasConfig, dict(use_muon_optimizer=False, muon_momentum=0.9), "muon_momentum=0.9 has no effect"),
        (compat.AtlasConfig, dict(use_polynomial_features=False, polynomial_degree=3), "has no effect"),
        (compat.AtlasConfig, dict(variant="MAX"), "choose one of MAC, MAG, MAL, LMM"),
        (compat.AtlasConfig, dict(use_muon_optimizer="yes"), "use_muon_optimizer='yes' must be True or False"),
        (compat.TitansConfig, dict(d_model=0), "d_model=0 must be a whole number >= 1"),
        (compat.TitansConfig, dict(chunk_size=0), "chunk_size=0 must be a whole number >= 1"),
        (compat.TitansConfig, dict(window_size=0), "window_size=0 must be a whole number >= 1"),
        (compat.TitansConfig, dict(d_head=0), "d_head=0 must be a whole number >= 1"),
        (compat.TitansConfig, dict(d_model=100), "num_heads=8 must divide d_model=100"),
        (compat.TitansConfig, dict(use_qkv_conv=False, conv_kernel_size=4), "conv_kernel_size=4 has no effect"),
    ],
)
def test_a_bad_value_of_a_config_is_refused_at_once_by_its_own_name(kind, keywords, message):
    with pytest.raises(ValueError, match=message):
        kind(**keywords)


def test_a_transformer_names_its_own_keywords_in_errors():
    for keywords, message in (
        (dict(segment_len=0), "segment_len=0 must be a whole number >= 1"),
        (dict(neural_memory_layers=(0,)), r"neural_memory_layers=\(0,\) must lie in 1..2"),
        (dict(omega_window=0), "omega_window=0"),
        (dict(omega_window=2, neural_memory_kwargs=dict(window=3)), "both set window"),
        (dict(omega_window=2, neural_memory_kwargs=dict(omega_window=2)), "omega_window is given twice"),
        (dict(heads=0), "heads=0 must be a whole number >= 1"),
        (dict(ff_mult=0), "ff_mult=0 must be a number > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            compat.MemoryAsContextTransformer(**SMALL | keywords)
    with pytest.raises(ValueError, match="dim cannot be given beside a config"):
        compat.AtlasLMM(compat.AtlasLMM(**SMALL).config, dim=32)


# Variants and configs that do not go together


def test_a_variant_is_respected_or_a_mismatch_is_refused():
    small = dict(d_model=32, num_layers=1, vocab_size=20, num_heads=2)
    blocks = lambda model: model.config.blocks  # noqa: E731
    assert blocks(compat.TitansLM(compat.TitansConfig(**small))) == ["mag"]
    assert blocks(compat.TitansLM(compat.TitansConfig(**small), variant="MAC")) == ["mac"]
    assert blocks(compat.TitansLM(compat.TitansConfig(**small, variant="MAC"), variant="mac")) == ["mac"]
    assert blocks(compat.TitansLM(compat.TitansConfig(**small, chunk_size=8), variant="MAC")) == ["mac"]
    assert blocks(compat.TitansLM(compat.AtlasConfig(**small), variant="MAG")) == ["mag"]
    for config in (compat.TitansConfig(**small, variant="MAG"), compat.AtlasConfig(**small, variant="MAG")):
        with pytest.raises(ValueError, match="variant='MAC', but the config has 'MAG'"):
            compat.TitansLM(config, variant="MAC")
    with pytest.raises(ValueError, match="variant='MAC', but the config has 'mag'"):
        compat.TitansLM(compat.TitansConfig(**small).translated(), variant="MAC")
    with pytest.raises(ValueError, match="choose one of MAC, MAG, MAL, LMM"):
        compat.TitansLM(compat.TitansConfig(**small), variant="MAX")
    with pytest.raises(ValueError, match="chunk_size=8 has no effect: only MAC has segments, not MAG"):
        compat.TitansLM(compat.TitansConfig(**small, chunk_size=8))


@pytest.mark.parametrize("name", ["Atlas", "OmegaNet", "DeepTransformer"])
def test_a_titans_config_is_refused_where_an_atlas_config_is_needed(name):
    with pytest.raises(ValueError, match=f"config is a TitansConfig, but {name} needs an AtlasConfig"):
        getattr(compat, name)(compat.TitansConfig())
    with pytest.raises(ValueError, match="config is a dict, but TitansLM needs a TitansConfig"):
        compat.TitansLM({})


def test_configs_survive_a_round_trip_through_a_dict():
    for kind in CONFIGS:
        config = kind(num_layers=3)
        assert kind(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
        assert dataclasses.replace(config, num_layers=2).translated().num_hidden_layers == 2


def test_every_field_of_the_memory_is_a_keyword_of_ours_too():
    assert set(MEMORY_FIELDS).isdisjoint(KEYWORDS)
    assert compat.NeuralMemory(dim=64, window=3, conv_width=None).config.window == 3
