"""Other implementations' snippets, as their documents print them but for the import (and smaller where they are large)."""

from __future__ import annotations

import pytest
import torch


def test_neural_memory_of_seed_000():
    from mnemos.compat import NeuralMemory

    mem = NeuralMemory(dim=384, chunk_size=64)

    seq = torch.randn(2, 1024, 384)
    retrieved, mem_state = mem(seq)
    assert seq.shape == retrieved.shape
    assert mem_state.position.tolist() == [1024, 1024]


def test_mac_transformer_of_seed_000():
    from mnemos.compat import MemoryAsContextTransformer

    transformer = MemoryAsContextTransformer(
        num_tokens=256,
        dim=256,
        depth=2,
        segment_len=128,
        num_persist_mem_tokens=4,
        num_longterm_mem_tokens=16,
    )

    ids = torch.randint(0, 256, (1, 1023))
    loss = transformer(ids, return_loss=True)
    loss.backward()
    assert not [n for n, p in transformer.named_parameters() if p.grad is None]

    # after much training
    sampled = transformer.sample(ids[:, :4], 20)
    assert sampled.shape == (1, 16)


OMEGA = dict(
    omega_window=2,  # context window for Omega rule
    use_omega_gate=False,  # learned U gate
    poly_degree=2,  # polynomial features
    poly_mode="elementwise",
    use_muon_optimizer=False,  # Muon for memory updates
)


@pytest.mark.parametrize("name", ["MemoryAsGateTransformer", "MemoryAsLayerTransformer", "AtlasLMM"])
def test_mag_mal_and_lmm_of_seed_000(name):
    import mnemos.compat

    options = dict(num_tokens=256, dim=256, depth=4, num_persist_mem_tokens=4, **OMEGA)
    if name != "AtlasLMM":
        options |= dict(window_size=64, neural_memory_layers=(1, 2, 3, 4))
    transformer = getattr(mnemos.compat, name)(**options)
    assert transformer.config.memory == dict(
        window=2, gate="none", features="elementwise", degree=2, rule="gd", retention="start"
    )
    assert transformer.config.memory_layers == (None if name == "AtlasLMM" else [0, 1, 2, 3])

    ids = torch.randint(0, 256, (1, 512))
    loss = transformer(ids, return_loss=True)
    loss.backward()

    # sampling with cache
    sampled = transformer.sample(ids[:, :4], 12, use_cache=True)
    assert sampled.shape == (1, 8)
    greedy = [transformer.eval().sample(ids[:, :4], 12, use_cache=cached, temperature=0) for cached in (True, False)]
    assert torch.equal(*greedy)
    with pytest.raises(ValueError, match="counts the prompt too"):
        transformer.sample(ids[:, :4], 4)


@pytest.mark.parametrize("variant", ["MAC", "MAG", "MAL"])
def test_titans_language_model_of_seed_001(variant):
    from mnemos.compat import TitansConfig, TitansLM

    config = TitansConfig(d_model=64, num_layers=2, variant=variant, vocab_size=300, num_heads=2)
    model = TitansLM(config, variant=variant)
    tokens = labels = prompt_tokens = torch.randint(0, 300, (1, 12))

    outputs = model(input_ids=tokens, labels=labels)
    loss = outputs["loss"]
    loss.backward()

    generated = model.generate(prompt_tokens, max_new_tokens=5)
    assert generated.shape == (1, 17)
    states = model.eval()(input_ids=tokens)["memory_states"]
    assert model(input_ids=tokens, memory_states=states)["memory_states"].get_seq_length() == 24


def test_atlas_of_seed_001_and_its_relatives():
    from mnemos.compat import Atlas, AtlasConfig, DeepTransformer, OmegaNet

    config = AtlasConfig(d_model=64, num_layers=2, context_window=64, polynomial_degree=2, vocab_size=300)
    tokens = labels = torch.randint(0, 300, (1, 40))
    model = Atlas(config)
    outputs = model(input_ids=tokens, labels=labels)
    outputs["loss"].backward()
    assert model.config.memory_config.rule == "muon" and model.config.memory_config.window == 64
    assert OmegaNet(config).config.memory_config.rule == "gd"
    deep = DeepTransformer(config)
    deep(tokens, labels=labels).loss.backward()
    assert deep.config.memory_config.features == "exp"


def test_memory_and_features_of_seed_001():
    from mnemos.compat import NeuralMemory, PolynomialFeatures

    memory = NeuralMemory(
        d_model=512,
        d_key=64,
        d_value=64,
        num_memory_layers=2,
        use_momentum=True,
        use_forget_gate=True,
    )
    x, prev_state = torch.randn(1, 30, 512), None
    output, new_state = memory(x, memory_state=prev_state)
    output, new_state = memory(x, memory_state=new_state)
    assert output.shape == x.shape and new_state.position.item() == 60

    phi = PolynomialFeatures(input_dim=64, degree=2)
    keys = torch.nn.functional.normalize(torch.randn(2, 5, 64), dim=-1)
    features = phi(keys)
    assert features.shape == (2, 5, 2145)
    kernel, cosine = features @ features.mT, keys @ keys.mT
    assert torch.allclose(kernel, (1 + cosine + cosine**2 / 2) / 2.5, atol=1e-5)


def test_presets_of_seed_001():
    from mnemos.compat import atlas_small, titans_large, titans_medium, titans_small
    from mnemos.models import presets

    millions = {
        name: presets.count(config().translated()) / 1e6
        for name, config in dict(s=titans_small, m=titans_medium, l=titans_large, a=atlas_small).items()
    }
    assert {name: round(count, 1) for name, count in millions.items()} == {
        "s": 150.2,
        "m": 475.1,
        "l": 1043.0,
        "a": 115.0,
    }


def test_configs_and_ablations_of_seed_002():
    from mnemos.compat import Atlas, AtlasConfig

    config = AtlasConfig(
        hidden_size=768,
        num_layers=12,
        memory_depth=2,  # Deep memory layers
        polynomial_degree=3,  # Polynomial feature degree
        context_window_size=512,  # Omega rule window size
        use_muon_optimizer=True,  # Enable Muon optimizer
    )
    assert config.translated().memory_config.spec.lifted_dim == 165
    AtlasConfig(
        hidden_size=512, num_layers=8, memory_depth=2, polynomial_degree=3, context_window_size=256
    ).translated()
    large = AtlasConfig(hidden_size=1024, num_layers=24, memory_depth=3, polynomial_degree=4, context_window_size=1024)
    assert large.translated().memory_config.depth == 3

    config.hidden_size, config.num_layers, config.vocab_size = 64, 1, 300
    config.context_window_size = 4
    tokens = torch.randint(0, 300, (1, 80))  # muon commits after 64
    expected = dict(features="monomials", rule="muon", structure="mlp", window=4)
    for change, effect in (
        (dict(polynomial_degree=1), dict(features="identity")),  # Disable polynomial features
        (dict(use_muon_optimizer=False), dict(rule="gd")),  # Use standard gradient descent
        (dict(memory_depth=1), dict(structure="linear")),  # Reduce memory depth
        (dict(context_window_size=1), dict(window=1)),  # Disable context memorization
    ):
        for name, value in change.items():
            setattr(config, name, value)
        expected |= effect
        model = Atlas(config)
        for name, value in expected.items():
            assert getattr(model.config.memory_config, name) == value
        model(tokens, labels=tokens).loss.backward()
        assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()], change


def test_custom_memory_and_features_of_seed_002():
    from mnemos.compat import DeepMemoryModule, PolynomialFeatureMap

    memory = DeepMemoryModule(input_dim=768, hidden_dim=512, num_layers=3)
    assert len(memory.spec.shapes) == 3
    assert memory(torch.randn(1, 5, 768))[0].shape == (1, 5, 768)
    poly_map = PolynomialFeatureMap(input_dim=64, degree=5)
    assert poly_map(torch.randn(2, 64)).shape == (2, 320)


@pytest.mark.parametrize("name", ["MemoryAsContextTransformer", "AtlasLMM", "TitansLM"])
def test_a_saved_model_opens_by_the_name_it_was_made_with(name, tmp_path):
    import mnemos.compat

    kind = getattr(mnemos.compat, name)
    if name == "TitansLM":
        model = kind(mnemos.compat.TitansConfig(d_model=32, num_layers=1, vocab_size=50, num_heads=2))
    else:
        segment = dict(segment_len=8) if name == "MemoryAsContextTransformer" else {}
        model = kind(num_tokens=50, dim=32, depth=1, heads=2, dim_head=16, **segment)
    model.save_pretrained(tmp_path)
    loaded, ids = kind.from_pretrained(tmp_path), torch.randint(0, 50, (1, 20))
    assert type(loaded) is kind
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def test_what_does_not_fit_is_refused():
    from mnemos.compat import AtlasConfig, MemoryAsGateTransformer, NeuralMemory, TitansConfig, TitansLM

    with pytest.raises(ValueError, match="give the width as dim or as d_model"):
        NeuralMemory()
    with pytest.raises(ValueError, match="choose one of MAC, MAG, MAL"):
        TitansConfig(variant="MAX").translated()
    with pytest.raises(ValueError, match="but the config has 'MAC'"):
        TitansLM(TitansConfig(variant="MAC"), variant="MAL")
    with pytest.raises(ValueError, match="d_model and hidden_size are the same"):
        AtlasConfig(d_model=64, hidden_size=64)
    with pytest.raises(ValueError, match="choose one of off, elementwise, tensor"):
        MemoryAsGateTransformer(num_tokens=10, dim=32, depth=1, poly_mode="cubic")
    with pytest.raises(ValueError, match="MemoryAsGateTransformer needs num_tokens, dim and depth"):
        MemoryAsGateTransformer(num_tokens=10, dim=32)
