"""What the seeds describe beside their snippets: surprises, Taylor kernels, sampling, sizes, initialisation."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import mnemos.compat as compat
from mnemos.memory.gating import Gating
from mnemos.models.gate import Gate

SMALL = dict(num_tokens=20, dim=32, depth=2, heads=2, dim_head=16)


def titans(**fields) -> compat.TitansLM:
    return compat.TitansLM(compat.TitansConfig(**dict(d_model=32, num_layers=2, vocab_size=20, num_heads=2) | fields))


# Surprises


def test_a_memory_returns_momentary_and_past_surprise():
    memory, x = compat.NeuralMemory(dim=32, heads=2, chunk_size=4), torch.randn(2, 9, 32)
    y, state, surprises = memory(x, return_surprises=True)
    plain, expected = memory(x)
    assert torch.allclose(y, plain, atol=1e-5) and state.position.tolist() == expected.position.tolist()
    assert isinstance(surprises, compat.Surprises)
    assert {tuple(part.shape) for part in surprises} == {(2, 9, 2)}
    trace = memory(x, trace=True)[2]
    assert torch.equal(surprises.momentary, trace.gradient_norm)
    assert torch.equal(surprises.past, trace.momentum_norm)
    assert torch.equal(surprises.loss, trace.surprise)
    assert bool((surprises.momentary > 0).all()) and bool((surprises.past > 0).all())


@pytest.mark.parametrize("name", ["MemoryAsContextTransformer", "MemoryAsGateTransformer", "AtlasLMM"])
def test_a_model_returns_the_surprises_of_every_layer_and_token(name):
    model = getattr(compat, name)(**SMALL, num_persist_mem_tokens=3, neural_memory_layers=(2,)).eval()
    ids = torch.randint(0, 20, (2, 9))
    out = model(ids, return_surprises=True)
    assert torch.allclose(out.logits, model(ids).logits, atol=1e-5)
    first, second = out.surprises
    assert first is None and {tuple(part.shape[:2]) for part in second} == {(2, 9)}
    later = model(ids[:, :1], past_key_values=out.past_key_values, return_surprises=True).surprises[1]
    assert later.momentary.shape[:2] == (2, 1)
    assert not [hook for module in model.modules() for hook in module._forward_hooks]
    with pytest.raises(ValueError, match="without padding"):
        model(ids, attention_mask=torch.tensor([[0] + [1] * 8] * 2), return_surprises=True)


def test_a_titans_model_returns_surprises_beside_its_loss():
    out = titans()(torch.randint(0, 20, (1, 5)), labels=torch.randint(0, 20, (1, 5)), return_surprises=True)
    assert len(out.surprises) == 2 and out["surprises"][0].past.shape[:2] == (1, 5)
    out.loss.backward()


def test_newton_schulz_steps_can_be_set_at_a_call():
    memory, x = compat.NeuralMemory(dim=32, use_muon_optimizer=True, chunk_size=4), torch.randn(1, 9, 32)
    assert torch.equal(memory(x, ns_steps=5)[0], memory(x)[0]) and not torch.equal(
        memory(x, ns_steps=1)[0], memory(x)[0]
    )


# Outputs and generation


@pytest.mark.parametrize("training", [True, False])
def test_titans_models_return_logits_and_memory_states_in_training_too(training):
    model, ids = titans().train(training), torch.randint(0, 20, (1, 7))
    out = model(input_ids=ids, labels=ids)
    assert sorted(out.keys()) == ["logits", "loss", "memory_states", "past_key_values"]
    assert out["logits"].shape == (1, 7, 20) and out["memory_states"].get_seq_length() == 7
    assert model(ids, memory_states=out["memory_states"].detach())["memory_states"].get_seq_length() == 14
    assert "memory_states" not in model(ids, use_cache=False)
    with pytest.raises(ValueError, match="are the same: give one"):
        model(ids, memory_states=out.memory_states, past_key_values=out.memory_states)


@pytest.mark.parametrize("make", [titans, lambda: compat.AtlasLMM(**SMALL)])
def test_the_trainer_of_transformers_trains_and_evaluates(make, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = torch.randint(0, 20, (4, 9))
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(model=make(), args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 6
    assert trainer.predict(data).predictions.shape == (4, 9, 20)


@pytest.mark.parametrize("make", [titans, lambda: compat.AtlasLMM(**SMALL)])
@pytest.mark.parametrize("option", [dict(temperature=1.0), dict(top_k=15), dict(top_p=0.99)])
def test_generate_samples_when_a_sampling_option_is_given(make, option):
    model, ids = make().eval(), torch.randint(0, 20, (1, 3))
    torch.manual_seed(0)
    drawn = {tuple(model.generate(ids, max_new_tokens=8, **option)[0].tolist()) for _ in range(3)}
    assert len(drawn) > 1


def test_generate_is_greedy_without_options_and_at_temperature_0():
    model, ids = titans().eval(), torch.randint(0, 20, (1, 3))
    greedy = model.generate(ids, max_new_tokens=5)
    assert torch.equal(greedy, model.generate(ids, max_new_tokens=5, temperature=0, top_k=5))
    assert torch.equal(greedy, model.generate(ids, max_new_tokens=5, temperature=None, top_k=None))
    assert torch.equal(greedy, model.generate(ids, max_new_tokens=5, do_sample=False))


def test_temperature_alone_draws_from_all_tokens(monkeypatch):
    from transformers import GenerationMixin

    seen = {}
    monkeypatch.setattr(GenerationMixin, "generate", lambda self, *args, **kwargs: seen.update(kwargs))
    model, ids = titans(), torch.randint(0, 20, (1, 3))
    model.generate(ids, temperature=0.8)
    assert seen == dict(do_sample=True, temperature=0.8, top_k=0, max_new_tokens=100)


def test_sample_takes_the_filters_of_seed_000():
    model, ids = compat.AtlasLMM(**SMALL), torch.randint(0, 20, (1, 3))
    assert model.sample(ids, 6, filter_kwargs=dict(min_p=0.2), show_progress=False).shape == (1, 3)
    assert model.sample(ids, 6, filter_kwargs=dict(top_k=2)).shape == (1, 3)
    with pytest.raises(ValueError, match="filter_kwargs has no keyword 'thres'"):
        model.sample(ids, 6, filter_kwargs=dict(thres=0.9))


# Features


def test_tensor_features_of_a_higher_degree_fall_back_to_2_with_a_warning():
    with pytest.warns(UserWarning, match="poly_degree=3 falls back to 2"):
        memory = compat.NeuralMemory(dim=32, poly_mode="tensor", poly_degree=3)
    assert (memory.config.features, memory.config.degree) == ("tensor", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.NeuralMemory(dim=32, poly_mode="tensor", poly_degree=2)


def test_elementwise_powers_side_by_side_are_a_poly_mode():
    memory = compat.NeuralMemory(dim=32, heads=2, poly_mode="elementwise_concat", poly_degree=3)
    assert memory.config.features == "elementwise_concat" and memory.spec.lifted_dim == 3 * 16
    assert memory(torch.randn(1, 5, 32))[0].shape == (1, 5, 32)


def test_the_taylor_kernel_approximates_the_exponential_and_is_learned():
    kernel, x = compat.LearnableTaylorKernel(order=6), torch.linspace(-1, 1, 9)
    assert torch.allclose(kernel(x), x.exp(), atol=1e-3)
    assert torch.allclose(kernel.coeffs, torch.tensor([1 / math.factorial(i) for i in range(7)]))
    kernel(x).sum().backward()
    assert bool(kernel.coeffs.grad.any())
    assert not list(compat.LearnableTaylorKernel(order=2, learnable=False).parameters())
    with pytest.raises(ValueError, match="order=0 must be a whole number >= 1"):
        compat.LearnableTaylorKernel(order=0)


def test_a_deep_transformer_with_a_taylor_kernel_has_that_kernel():
    config = compat.AtlasConfig(d_model=64, num_layers=1, vocab_size=20, taylor_expansion_order=3)
    model = compat.DeepTransformer(config)
    memory = model.config.memory_config
    assert (memory.features, memory.degree, memory.objective, memory.window) == ("monomials", 3, "dot", 1)
    phi = model.model.layers[0].mixer.memory.features
    q, k = torch.nn.functional.normalize(torch.randn(2, 5, 1, memory.key_dim), dim=-1)
    taylor = compat.LearnableTaylorKernel(order=3)
    expected = taylor((q * k).sum(-1)) / taylor(torch.tensor(1.0))
    assert torch.allclose((phi(q) * phi(k)).sum(-1), expected, atol=1e-5)
    ids = torch.randint(0, 20, (1, 9))
    model(ids, labels=ids).loss.backward()
    with pytest.raises(ValueError, match="taylor_expansion_order=3 has no effect: DeepTransformer alone"):
        compat.Atlas(config)


def test_polynomial_features_without_the_constant():
    keys = torch.nn.functional.normalize(torch.randn(3, 8), dim=-1)
    whole, rest = compat.PolynomialFeatures(8), compat.PolynomialFeatures(8, include_bias=False)
    assert rest.output_dim == whole.output_dim - 1 and torch.equal(rest(keys), whole(keys)[:, 1:])


# Layers by the names of seed 002


def test_atlas_attention_is_the_memory_of_its_config():
    config = compat.AtlasConfig(hidden_size=64, context_window_size=4, memory_depth=2, polynomial_degree=3)
    layer, x = compat.AtlasAttention(config), torch.randn(2, 7, 64)
    assert layer.config == config.translated().memory_config
    y, state = layer(x[:, :4], return_memory_state=True)
    rest = layer(x[:, 4:], memory_state=state)
    assert torch.allclose(torch.cat([y, rest], 1), layer(x), atol=1e-4)
    assert not layer(x, attention_mask=torch.tensor([[1] * 6 + [0]] * 2))[:, -1].any()


def test_atlas_memory_update_fits_its_window_and_leaves_the_network_alone():
    torch.manual_seed(0)
    memory, keys, values = torch.nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8)
    before = memory.weight.clone()
    for muon, rate, beta in ((True, 0.2, 0.5), (False, 1e-4, None)):
        config = compat.AtlasConfig(
            hidden_size=64, use_muon_optimizer=muon, learning_rate_inner=rate, momentum_beta=beta, context_window=4
        )
        update = compat.AtlasMemoryUpdate(config)
        loss = update.compute_attentional_bias(memory, keys, values).sum()
        weights, momentum = update.omega_rule_update(memory, keys, values, torch.ones(4))
        assert torch.equal(memory.weight, before) and weights.keys() == momentum.keys() == {"weight", "bias"}
        after = torch.nn.Linear(8, 8)
        after.load_state_dict(weights)
        assert update.compute_attentional_bias(after, keys, values).sum() < loss
        again = update.omega_rule_update(after, keys, values, torch.ones(4), momentum)[1]
        fresh = update.omega_rule_update(after, keys, values, torch.ones(4))[1]
        expected = fresh["weight"] + (update.momentum if update.has_momentum else 0) * momentum["weight"]
        assert torch.allclose(again["weight"], expected, atol=1e-5)
    unweighted = update.omega_rule_update(memory, keys, values, torch.tensor([1.0, 0, 0, 0]))[1]["weight"]
    alone = update.omega_rule_update(memory, keys[:1], values[:1], torch.ones(1))[1]["weight"]
    assert torch.allclose(unweighted, alone, atol=1e-5)


# Configs


def test_fields_of_seed_002_reach_the_memory():
    config = compat.AtlasConfig(
        hidden_size=128, memory_hidden_size=96, learning_rate_inner=0.01, momentum_beta=0.8, use_forget_gate=False
    ).translated()
    memory = config.memory_config
    assert memory.spec.hidden_dim == 96 and (memory.initial_lr, memory.initial_momentum) == (0.01, 0.8)
    assert memory.retain is False
    model = compat.Atlas(compat.AtlasConfig(hidden_size=64, num_layers=1, vocab_size=20, learning_rate_inner=0.01))
    gates = model.model.layers[0].mixer.memory.gating(torch.randn(1, 3, 64))
    assert torch.allclose(gates.lr, torch.tensor(0.01), atol=1e-4)


def test_fields_of_seed_001_reach_the_model():
    fields = dict(d_key=8, d_value=16, memory_hidden_dim=40, ffn_hidden_dim=50, conv_kernel_size=2)
    config = compat.TitansConfig(d_model=64, num_heads=2, **fields).translated()
    memory = config.memory_config
    assert (memory.key_dim, memory.value_dim, memory.spec.hidden_dim) == (8, 16, 40)
    assert memory.conv_width == 2 and config.feedforward_size == 50
    for kind in (compat.TitansConfig, compat.AtlasConfig):
        for name in ("max_seq_len", "max_seq_length"):
            with pytest.raises(
                ValueError, match=f"does not support {name}=8192: a model reads sequences of any length"
            ):
                kind(**{name: 8192})


def test_decay_weights_that_are_not_gates_of_the_token():
    memory = compat.AtlasConfig(context_window=8, learnable_decay_weights=False).translated().memory_config
    assert memory.gate == "decay" and memory.decay_init == pytest.approx(math.exp(-1 / 8))
    assert compat.AtlasConfig(context_window=1, learnable_decay_weights=False).translated().memory_config.gate == "none"


@pytest.mark.parametrize("size, expected", [
    ("small", (512, 8, 256, 3, 2)), ("medium", (768, 12, 512, 3, 2)), ("large", (1024, 24, 1024, 4, 3)),
])  # fmt: skip
def test_atlas_sizes_of_seed_002(size, expected):
    config = getattr(compat.AtlasConfig, size)().translated()
    memory = config.memory_config
    assert (config.hidden_size, config.num_hidden_layers, memory.window, memory.degree, memory.depth) == expected
    assert memory.rule == "muon" and memory.structure == "mlp"
    if size != "small":  # atlas_small is seed 001's
        assert getattr(compat, f"atlas_{size}")(vocab_size=99) == getattr(compat.AtlasConfig, size)(vocab_size=99)


@pytest.mark.parametrize("variant", ["MAC", "MAG"])
def test_init_std_draws_every_linear_map_and_leaves_the_gates(variant):
    model = titans(d_model=64, variant=variant, init_std=0.1)
    plain = titans(d_model=64, variant=variant)
    gates = [part for gate in model.modules() if isinstance(gate, Gating | Gate) for part in gate.modules()]
    maps = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and not any(m is g for g in gates)]
    assert len(maps) > 10
    for module in maps:
        assert module.weight.std().item() == pytest.approx(0.1, rel=0.2)
    for (name, gate), (_, other) in zip(model.named_modules(), plain.named_modules()):
        if isinstance(gate, Gating | Gate):
            for p, q in zip(gate.parameters(), other.parameters()):
                assert torch.allclose(p.mean(), q.mean(), atol=0.1), name


def test_a_model_opened_from_a_file_is_not_drawn_again(tmp_path):
    model = titans(init_std=0.1)
    model.save_pretrained(tmp_path)
    loaded = compat.TitansLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), loaded.parameters()))
