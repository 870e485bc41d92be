"""A block decodes one token as one call of a kernel: what its parts give, whoever listens to them or changes them on the way."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from decoding import Adapted, tensors
from torch import nn

from helpers import assert_close, needs_kernel
from mnemos.backends.cpu import token
from mnemos.memory import Gates, NeuralMemory
from mnemos.models import MnemosForCausalLM, presets
from mnemos.models.gate import GATES, ConvexGate, Gate, TokenGate, register_gate
from mnemos.models.memory_mixers import MAGMixer
from mnemos.models.mixer import BLOCKS, Mixer, register_block
from mnemos.nn import SwiGLU
from mnemos.nn.linear import Linear
from mnemos.nn.norm import RMSNorm

pytestmark = needs_kernel


def small(name: str, **choices) -> MnemosForCausalLM:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=2, attention_window=6)
    model = MnemosForCausalLM(presets.config(name, "nano", **sizes, **choices)).eval().double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    return model


def decode(model, ids, change=None, kernels=True, inplace=True, at=5) -> torch.Tensor:
    """Logits of ids (B, T) token by token from a first one, and `change(model)` on the way. Gradients keep the kernels away."""
    logits, cache = [], None
    for t in range(ids.shape[1]):
        if change is not None and t == at:
            change(model)
            cache = None if cache is None else cache.to(model.dtype)
        with torch.set_grad_enabled(not kernels):
            output = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values.detach()
        cache.inplace = inplace
        logits.append(output.logits.detach().double())
    return torch.cat(logits, 1)


EVERY_TOKEN = {"memory_rule": "muon", "memory_commit_every": 1, "memory_momentum": False, "memory_retention": "start"}
EVERY_TOKEN |= {"memory_window": 4, "memory_chunk_size": 8}
FAMILY = {
    "lmm": ("titans-lmm", {}),
    "lmm, residual": ("titans-lmm", {"memory_residual": True}),
    "lmm, start not read": ("titans-lmm", {"memory_residual": True, "memory_w0_branch": False}),
    "mag": ("titans-mag", {}),
    "mag, additive": ("titans-mag", {"gate_mode": "additive"}),
    "mag, product": ("titans-mag", {"gate_mode": "product"}),
    "mag, convolution": ("titans-mag", {"attention_conv_width": 4}),
    "mal": ("titans-mal", {}),
    "mal, convolution": ("titans-mal", {"attention_conv_width": 3}),
    "mag, Muon after every token": ("atlas-mag", EVERY_TOKEN),
    "lmm, Muon after every token, gated": ("atlas++", EVERY_TOKEN),
    "lmm, window": ("omeganet", {}),
    "swa": ("swa", {}),
    "swa, convolution of one token": ("swa", {"attention_conv_width": 1}),
    "swa, no convolution": ("swa", {"attention_conv_width": 0}),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 17])
@pytest.mark.parametrize("name", FAMILY)
def test_a_block_is_one_call_and_gives_what_its_parts_give(name, batch, inplace, monkeypatch):
    preset, choices = FAMILY[name]
    model, ids = small(preset, **choices), torch.randint(0, 64, (batch, 11))
    right = decode(model, ids, kernels=False)
    calls, block = [], token.block
    monkeypatch.setattr(token, "block", lambda *a, **k: (calls.append(1), block(*a, **k))[1])
    assert_close(decode(model, ids, inplace=inplace), right, 1e-9)
    assert len(calls) == (0 if name == "mag, product" else 2 * 10)  # two layers; the first token has no cache


def scaled(module, given, output):
    if isinstance(output, Gates):
        return dataclasses.replace(output, lr=output.lr / 2)
    return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5


@pytest.mark.parametrize("name", ["titans-lmm", "titans-mag", "titans-mal", "swa"])
def test_a_hook_on_any_part_of_a_block_is_heard_in_decoding(name):
    ids, heard = torch.randint(0, 64, (2, 8)), 0
    plain = decode(small(name), ids)
    for place in [place for place, _ in small(name).model.layers[1].named_modules()]:
        model = small(name)
        model.model.layers[1].get_submodule(place).register_forward_hook(scaled)
        right = decode(model, ids, kernels=False)
        assert_close(decode(model, ids), right, 1e-9)
        heard += not torch.allclose(right, plain)
    assert heard > 6


class OtherGate(ConvexGate):
    """A mode that no kernel knows, with a linear map as the known ones have."""

    def forward(self, y, m, x):
        return y * self.opening(self.linear(x)).mean(-1, keepdim=True) - m


class OtherNorm(RMSNorm):
    def forward(self, x):
        return x / (1 + x.abs().amax(-1, keepdim=True))


class OtherMixer(MAGMixer):
    def forward(self, x, *rest):
        y, state = super().forward(x, *rest)
        return y + x.flip(-1), state


class OtherFeed(SwiGLU):
    def forward(self, x):
        return super().forward(x).tanh()


@pytest.mark.parametrize(
    "place, other",
    [
        ("mixer.gate", OtherGate),
        ("mixer_norm", OtherNorm),
        ("feedforward_norm", OtherNorm),
        ("mixer", OtherMixer),
        ("feedforward", OtherFeed),
    ],
)
@pytest.mark.parametrize("module", [__name__, "mnemos.models.others"])
def test_a_part_that_kernels_do_not_know_is_computed_by_torch(place, other, module):
    """Also if its class is defined inside the package."""
    ids, model = torch.randint(0, 64, (2, 8)), small("titans-mag")
    known = decode(model, ids)
    other = type(other.__name__, (other,), {"__module__": module})
    for block in model.model.layers:
        block.get_submodule(place).__class__ = other
    right = model(ids).logits
    assert_close(decode(model, ids), right, 1e-9)
    assert not torch.allclose(right, known)


@pytest.fixture
def registries():
    before = [(registry, dict(registry)) for registry in (BLOCKS, GATES)]
    yield
    for registry, content in before:
        registry.clear()
        registry.update(content)


def doubled_mag(norm: type[RMSNorm]) -> type[Mixer]:
    """A block with the parts of `mag`, which it adds with factors of their own, behind a norm of its own."""

    class Doubled(MAGMixer):
        name, description = "other_mag", "2 attention + memory"

        def __init__(self, config):
            super().__init__(config)
            self.norm = norm(config.hidden_size)

        def forward(self, x, state, mask, persistent, use_cache):
            y, attention = self.attention(x, state and state["attention"], mask, persistent, use_cache)
            m, memory = self.memory(x, state and state["memory"], mask)
            return self.norm(2 * y + m), {"attention": attention, "memory": memory} if use_cache else None

    return Doubled


class LinearGate(Gate):
    """Nothing but a linear map of the name that kernels read."""

    name = "other_linear"

    def __init__(self, config):
        super().__init__(config)
        self.linear = Linear(config.hidden_size, config.num_attention_heads, bias=False)
        self.offset = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(self, y, m, x):
        return y - m * self.linear(x).mean(-1, keepdim=True).tanh()


class SquaredGate(TokenGate):
    name = "other_squared"

    def opening(self, mapped):
        return super().opening(mapped).square()


class SteepGate(ConvexGate):
    name = "other_steep"

    def weights(self, g):
        return g.square(), 1 - g.square()


@pytest.mark.parametrize("module", [__name__, "mnemos.models.others"])
@pytest.mark.parametrize(
    "choices",
    [
        {"gate_mode": "other_linear"},
        {"gate_mode": "other_squared"},
        {"gate_mode": "other_steep"},
        {"layers": "other_mag"},
        {"layers": ["other_mag", "mag"], "gate_mode": "other_linear"},
    ],
    ids=str,
)
def test_a_newly_registered_gate_block_or_norm_decodes_as_one_forward_reads(choices, module, registries):
    for gate in (LinearGate, SquaredGate, SteepGate):
        register_gate(type(gate.__name__, (gate,), {"__module__": module}))
    other = doubled_mag(type("Norm", (OtherNorm,), {"__module__": module}))
    register_block(type("Mixer", (other,), {"__module__": module}))
    ids, model = torch.randint(0, 64, (2, 8)), small("titans-mag", **choices)
    right = model(ids).logits
    assert_close(decode(model, ids), right, 1e-9)
    assert not torch.allclose(right, small("titans-mag")(ids).logits)


class Halved(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def of_map(model: MnemosForCausalLM, place: str) -> torch.nn.Linear:
    found = model.model.layers[0].get_submodule(place)
    assert isinstance(found, torch.nn.Linear)
    return found


@torch.no_grad()
def replace_map(model, place):
    parent, name = place.rsplit(".", 1)
    setattr(model.model.layers[0].get_submodule(parent), name, Adapted(of_map(model, place)))


@torch.no_grad()
def replace_forward(model, place):
    layer = of_map(model, place)
    layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)


def parametrise(model, place):
    torch.nn.utils.parametrize.register_parametrization(of_map(model, place), "weight", Halved())


@torch.no_grad()
def change_in_place(model, place):
    of_map(model, place).weight.mul_(1.5)


def assign_parameter(model, place):
    layer = of_map(model, place)
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.5)


@torch.no_grad()
def assign_strided(model, place):
    layer = of_map(model, place)
    layer.weight = torch.nn.Parameter(layer.weight.mT.contiguous().mT * 1.5)


def assign_data(model, place):
    layer = of_map(model, place)
    layer.weight.data = layer.weight.detach() * 1.5


def load_another(model, place, assign=False):
    model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}, assign=assign)


def load_and_assign(model, place):
    load_another(model, place, assign=True)


def swap_modules(model, place):
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


CHANGES = [
    replace_map,
    replace_forward,
    parametrise,
    change_in_place,
    assign_parameter,
    assign_strided,
    assign_data,
    load_another,
    load_and_assign,
    swap_modules,
]


@pytest.mark.parametrize("place", ["mixer.memory.qkv", "mixer.attention.out", "mixer.gate.linear", "feedforward.down"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_between_two_tokens_decodes_as_it_then_is(change, place):
    found, ids = [], torch.randint(0, 64, (2, 10))
    for kernels in (True, False):
        model = small("titans-mag")
        torch.manual_seed(1)  # adapters draw
        found.append(decode(model, ids, lambda model: change(model, place), kernels))
    assert_close(*found, 1e-9)
    assert not torch.allclose(found[0], decode(small("titans-mag"), ids))


@pytest.mark.parametrize("at, dtype, tolerance", [(5, torch.float32, 1e-5), (0, torch.bfloat16, 1e-2)])
def test_a_model_may_change_its_precision(at, dtype, tolerance):
    ids = torch.randint(0, 64, (2, 10))
    found = [decode(small("titans-mag"), ids, lambda m: m.to(dtype), kernels, at=at) for kernels in (True, False)]
    assert_close(*found, tolerance)


def test_a_listener_to_all_modules_hears_every_part_in_decoding():
    heard, model, ids = [], small("titans-mag"), torch.randint(0, 64, (1, 4))
    listener = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: heard.append(type(module)))
    try:
        decode(model, ids)
    finally:
        listener.remove()
    assert heard.count(NeuralMemory) == heard.count(SwiGLU) == 2 * 4


@torch.no_grad()
def test_a_gate_that_is_not_finite_is_refused_and_leaves_the_cache_as_it_was():
    model, ids = small("titans-mag"), torch.randint(0, 64, (2, 9))
    cache = model.state(ids)
    model.model.layers[0].mixer.memory.gating.offset.fill_(float("nan"))
    held = [x for layer in cache.layers for x in (layer["attention"].key, *tensors(layer["memory"]))]
    before = [x.clone() for x in held]
    with pytest.raises(ValueError, match="lr"):
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    assert all(torch.equal(x, y) for x, y in zip(held, before))


MAPS = (
    "mixer.memory.qkv",
    "mixer.memory.gating.linear",
    "mixer.memory.out",
    "mixer.attention.qkv",
    "mixer.attention.conv",
    "mixer.attention.out",
)
MAPS += (
    "mixer.gate.linear",
    "feedforward.gate_up",
    "feedforward.down",
    "mixer_norm",
    "mixer.memory.norm",
    "mixer.memory.conv",
)


@torch.no_grad()
@pytest.mark.parametrize("place", MAPS)
def test_weights_of_another_shape_are_never_read_by_a_kernel(place, monkeypatch):
    """The torch path is asked, which says what is wrong; a kernel would read beyond their end."""
    model, ids = small("titans-mag", attention_conv_width=4), torch.randint(0, 64, (1, 8))
    cache = model(ids, use_cache=True).past_key_values
    part = model.model.layers[0].get_submodule(place)
    part.weight = nn.Parameter(part.weight[: len(part.weight) // 2].clone())
    calls, block = [], token.block
    monkeypatch.setattr(token, "block", lambda *a, **k: (calls.append(1), block(*a, **k))[1])
    with pytest.raises((RuntimeError, ValueError)):
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    assert not calls


@torch.no_grad()
def test_a_row_that_only_counts_as_many_numbers_is_no_row_of_the_map():
    with pytest.raises(RuntimeError):
        Linear(8, 3)(torch.randn(2, 4))


@pytest.mark.parametrize("place", ["conv", "norm", "gating", "gating.linear", "qkv", "out"])
def test_a_hook_on_any_part_of_a_layer_is_heard_in_training(place):
    torch.manual_seed(0)
    layer, x = NeuralMemory(dim=16, heads=2, chunk_size=4).double(), torch.randn(2, 11, 16, dtype=torch.float64)
    nn.init.normal_(layer.gating.linear.weight)  # 0 at first, which a hook may scale as it likes
    before = layer(x)[0]
    layer.get_submodule(place).register_forward_hook(scaled)
    assert not torch.allclose(layer(x)[0], before)


@pytest.mark.parametrize("name", ["titans-lmm", "titans-mag", "atlas-mag"])
def test_a_model_of_bfloat16_decodes_a_single_row(name):
    """Its gates are computed in float32, by a map of one row without a bias."""
    ids = torch.randint(0, 64, (1, 8))
    low = small(name).bfloat16()
    wide = small(name)
    wide.load_state_dict(low.state_dict())
    assert_close(decode(low, ids), decode(wide, ids), 0.1)
