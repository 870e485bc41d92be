"""Initial gate values hold whatever initialises the modules around and inside a memory."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from mnemos.memory import NeuralMemory
from mnemos.memory.features import FeatureMap
from mnemos.memory.gating import Gating
from mnemos.models import MnemosForCausalLM, presets
from mnemos.models.gate import TokenGate
from mnemos.nn import QKProjection
from mnemos.nn.conv import CausalConv1d
from mnemos.train.hooks import set_chunk_size

LAYERS = {
    "defaults": {},
    "no momentum": dict(momentum=False),
    "fixed retain": dict(structure="linear", retain="fixed"),
    "all gates": dict(window=3, gate="token*decay*per-lag", gate_hidden=8),
    "own values": dict(lr_init=0.01, max_lr=0.02, momentum_init=0.3, retain_init=0.7, gate="token", gate_init=0.2),
    "monomials": dict(features="monomials", key_dim=4, structure="linear"),
    "sketch": dict(features="sketch", key_dim=4, degree=3, structure="linear"),
    "elementwise": dict(features="elementwise", degree=3),
    "exp": dict(features="exp", structure="linear"),
    "muon": dict(rule="muon", chunk_size=32),
}


class Host(PreTrainedModel):
    """Somebody else's model, whose post_init zeroes the biases of linear maps."""

    config_class = PretrainedConfig

    def __init__(self, config, fields=None):
        super().__init__(config)
        self.memory = NeuralMemory(dim=16, heads=2, **(fields or config.fields))
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        return self.memory(x)[0]


def gpt2_init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if getattr(module, "bias", None) is not None:
        nn.init.zeros_(module.bias)
    if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
        nn.init.ones_(module.weight)


def zero_vectors(module: nn.Module) -> None:
    """Zoology's and others' way: every parameter that is no matrix and no scale of a norm."""
    for name, parameter in module.named_parameters(recurse=False):
        vector = parameter.dim() < 2 and "Norm" not in type(module).__name__
        if vector or "offset" in name or "bias" in name:
            nn.init.zeros_(parameter)


def reset_each(module: nn.Module) -> None:
    if callable(getattr(module, "reset_parameters", None)):
        module.reset_parameters()


def reset_parents_first(model: nn.Module) -> None:
    for module in model.modules():
        reset_each(module)


WALKS = {
    "gpt2": lambda model: model.apply(gpt2_init),
    "zero": lambda model: model.apply(zero_vectors),
    "reset": lambda model: model.apply(reset_each),
    "reset, parents first": reset_parents_first,
}


def expected_gates(gating: Gating) -> dict[str, Tensor]:
    config, H = gating.config, gating.heads
    momentum = config.initial_momentum
    spread = 1 - momentum if config.momentum and config.rule == "gd" else 1.0
    found = {"lr": torch.full((H,), config.initial_lr * spread)}
    if config.momentum:
        found["momentum"] = torch.full((H,), momentum)
    if config.retain == "fixed":
        slowest = math.log(1 - config.retain_init)
        found["retain"] = 1 - torch.linspace(max(slowest, math.log(1 / 32)), slowest, H).exp()
    elif config.retain:
        found["retain"] = torch.full((H,), config.retain_init)
    if "token" in config.gate_parts:
        found["gate"] = torch.full((H,), config.gate_init)
    if "per-lag" in config.gate_parts:
        found["lag"] = torch.full((H, config.window), config.gate_init)
    if "decay" in config.gate_parts:
        found["decay"] = torch.full((H,), config.decay_init)
    return found


def assert_initial(model: nn.Module) -> int:
    """Every gate of every part at x = 0, and every coefficient of feature maps; returns how many parts were looked at."""
    seen = 0
    for module in model.modules():
        if isinstance(module, Gating):
            with torch.no_grad():
                gates = module(torch.zeros(1, 1, module.config.dim, dtype=module.linear.weight.dtype))
            for name, value in expected_gates(module).items():
                found = getattr(gates, name).float()
                torch.testing.assert_close(found.flatten(), value.flatten(), rtol=1e-4, atol=1e-6, msg=name)
        elif isinstance(module, TokenGate):
            opened = module.opening(torch.zeros(1, 1, module.heads)).detach()
            init = torch.full_like(opened, 1 / (1 + math.exp(-module.initial_logit)))
            torch.testing.assert_close(opened, init)
        elif isinstance(module, QKProjection) and module.decay is not None:
            kept = module._log_decay(module.qk.weight).exp().detach()
            torch.testing.assert_close(kept, torch.full_like(kept, module.decay), rtol=1e-5, atol=0)
        elif isinstance(module, CausalConv1d):
            weight, bound = module.weight.detach().float(), module.width**-0.5
            assert weight.abs().max() <= bound and weight.square().mean().sqrt() == pytest.approx(
                bound / 3**0.5, rel=0.15
            )
        elif isinstance(module, FeatureMap):
            x = torch.linspace(-1, 1, module.heads * module.dim_in).view(module.heads, module.dim_in)
            settings = {"key_norm": module.key_norm} if hasattr(module, "key_norm") else {}
            fresh = type(module)(
                module.dim_in, module.heads, module.degree, module.feature_dim, seed=module.seed, **settings
            )
            torch.testing.assert_close(module(x).detach(), fresh(x).detach())
        else:
            continue
        seen += 1
    return seen


@pytest.mark.parametrize("name", LAYERS)
def test_a_memory_in_a_foreign_pretrained_model_has_its_gates(name, tmp_path):
    torch.manual_seed(0)
    model = Host(PretrainedConfig(fields=LAYERS[name]))
    assert model.memory.qkv.weight.std() < 0.03  # the foreign initialisation has been here
    assert assert_initial(model)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    loaded, x = Host.from_pretrained(tmp_path), torch.randn(2, 9, 16)
    torch.testing.assert_close(loaded(x), model(x))
    assert not [name for name, _ in model.memory.named_buffers() if not name.endswith("projection")]


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_walk_over_a_layer_changes_its_gates(name, walk):
    torch.manual_seed(0)
    mem = NeuralMemory(dim=16, heads=2, **LAYERS[name])
    WALKS[walk](mem)
    assert assert_initial(mem)
    assert mem(torch.randn(1, 40, 16))[0].isfinite().all()


def small(name: str) -> MnemosForCausalLM:
    preset = presets.PRESETS[name]
    fields = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=31)
    if preset.memory is not None:
        memory = {"key_dim": 4, "window": 3}
        fields["memory"] = {"heads": 2, "chunk_size": 8} | {k: v for k, v in memory.items() if k in preset.memory}
    torch.manual_seed(0)
    return MnemosForCausalLM(presets.config(name, "nano", attention_window=8, segment_length=8, **fields))


@pytest.mark.parametrize("name", presets.names())
def test_no_walk_over_a_preset_changes_its_gates(name):
    model = small(name)
    parts = assert_initial(model)
    assert parts
    for walk in WALKS.values():
        walk(model)
        assert assert_initial(model) == parts
    assert not [n for n, _ in model.named_parameters() if n.endswith("bias") and ".memory.gate." not in n]


@pytest.mark.parametrize("name", ["titans-mag", "atlas-mac", "retnet", "qk-mag", "dot", "swa"])
def test_a_model_from_the_meta_device_is_whole_after_each_reset(name):
    """As FSDP materialises a model: empty memory, then `reset_parameters` of each module."""
    with torch.device("meta"):
        model = MnemosForCausalLM(small(name).config)
    model = model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(math.nan)
    model.apply(reset_each)
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))
    assert assert_initial(model)
    assert assert_initial(copy.deepcopy(model).to(torch.bfloat16).float())


@torch.no_grad()
@pytest.mark.parametrize("name", ["titans-mag", "titans-mal", "titans-lmm", "retnet"])
def test_the_kernel_for_one_token_reads_the_same_gates_as_torch(name):
    model, ids = small(name).double().eval(), torch.arange(12).view(1, 12)
    for module in model.modules():
        for part, parameter in module.named_parameters(recurse=False):
            if "offset" in part:
                nn.init.normal_(parameter, std=0.5)
    whole = model(ids).logits
    cache, steps = None, []
    for i in range(12):
        output = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-9, atol=1e-9)


def test_weights_of_the_old_layout_are_reported_and_not_added_twice():
    model = small("titans-mag")
    old = {name.replace("gating.offset", "gating.linear.bias"): x for name, x in model.state_dict().items()}
    old = {name.replace("gate.offset", "gate.linear.bias"): x for name, x in old.items()}
    with pytest.raises(RuntimeError, match=r"gating\.offset"):
        model.load_state_dict(old)


def test_another_chunk_size_leaves_the_initial_momentum_as_it_was():
    model = small("atlas-mag")
    before = model.model.layers[0].mixer.memory.gating(torch.zeros(1, 1, 32)).momentum
    set_chunk_size(model, 64)
    again = MnemosForCausalLM(model.config).model.layers[0].mixer.memory.gating(torch.zeros(1, 1, 32)).momentum
    torch.testing.assert_close(again, before)
