"""`NeuralMemory`: its defaults, its settings, and clear about what it refuses."""

from __future__ import annotations

import dataclasses
import doctest
import importlib

import pytest
import torch
from layers import DIM, T, build, f64, some

from helpers import assert_close_rms
from mnemos.memory.config import NeuralMemoryConfig
from mnemos.memory.layer import NeuralMemory
from mnemos.nn.norm import RMSNorm, l2_normalize, rms_norm


def test_muon_without_momentum_sums_since_the_last_commit():
    mem = build("muon without momentum", commit_every=5)
    *_, trace = mem(some(1, T, DIM), mem.write(some(1, 3, DIM)), trace=True)
    expected = [float((3 + t) % 5 != 0) for t in range(T)]
    assert trace.momentum[0, :, 0].tolist() == expected


@pytest.mark.parametrize("momentum", [0.1, 0.5, 0.9, 0.99])
def test_the_default_ceiling_is_stable_for_identical_keys_whatever_the_momentum(momentum):
    torch.manual_seed(0)
    mem = NeuralMemory(32, heads=1, structure="linear", chunk_size=16, momentum_init=momentum, retain=False)
    with torch.no_grad():
        mem.gating.offset[0] += 20  # lr at its ceiling
        *_, trace = mem(torch.randn(1, 1, 32).expand(1, 1600, 32), trace=True)
    assert trace.surprise[0, -1, 0] < 0.05 * trace.surprise[0, 0, 0]


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("shape", [dict(depth=2), dict(depth=3), dict(depth=4), dict(structure="gated_mlp")], ids=str)
def test_the_default_ceiling_is_stable_for_identical_keys_in_deep_memories(shape, momentum):
    torch.manual_seed(0)
    mem = NeuralMemory(32, heads=1, chunk_size=16, momentum=momentum, **shape)
    with torch.no_grad():
        mem.gating.offset[0] += 20  # lr at its ceiling
        mem.qkv.weight[-32:] *= 8  # values at their bound
        *_, trace = mem(torch.randn(1, 1, 32).expand(1, 1600, 32), trace=True)
    assert trace.surprise[0, -1, 0] < 0.1 * trace.surprise[0, 0, 0]


@pytest.mark.parametrize(
    ("dim", "heads", "head_dim"),
    [(384, 6, 64), (64, 1, 64), (96, 2, 48), (1000, 20, 50), (97, 1, 97), (12, 1, 12), (768, 12, 64)],
)
def test_the_default_heads_divide_the_width(dim, heads, head_dim):
    config = NeuralMemoryConfig(dim)
    assert (config.head_count, config.spec.value_dim) == (heads, head_dim)


def test_a_config_and_keywords_build_the_same_layer():
    config = NeuralMemoryConfig(dim=DIM, heads=2, window=3, gate="token")
    assert NeuralMemory(dim=DIM, heads=2, window=3, gate="token").config == config
    assert NeuralMemory(config, window=2).config == dataclasses.replace(config, window=2)
    assert NeuralMemoryConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(heads=5), r"heads=5 must divide dim=12"),
        (dict(dim=0), r"dim=0 must be a whole number >= 1"),
        (dict(gate="tokens"), r"gate='tokens' is unknown; it is 'none' or a product of token, decay, per-lag"),
        (dict(gate="token*token"), r"gate='token\*token' is unknown"),
        (dict(gate="decay"), r"gate='decay' needs window > 1"),
        (dict(qk_norm="layer"), r"qk_norm='layer' is unknown; choose one of 'l2', 'rms', 'none'"),
        (dict(max_lr=0.0), r"max_lr=0.0 must be None or > 0"),
        (dict(max_lr=0.1, lr_init=0.2), r"lr_init=0.2 must lie between 0 and max_lr=0.1"),
        (dict(retain="slow"), r"retain='slow' is unknown; choose one of True, False, 'fixed'"),
        (dict(retain_init=1.0), r"retain_init=1.0 must lie between 0 and 1"),
        (dict(value_bound=0.0), r"value_bound=0.0 must be None or a number in 1e-18..1e\+18"),
        (dict(value_bound=1e-200), r"value_bound=1e-200 must be None or a number in 1e-18..1e\+18"),  # its square is 0
        (dict(conv_width=-1), r"conv_width=-1 must be None or a whole number >= 0"),
        (dict(learn_w0=False), r"learn_w0=False starts all weights at 0"),
        (dict(structure="tree"), r"structure='tree' is unknown"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(fields, message):
    with pytest.raises(ValueError, match=message):
        NeuralMemory(**{"dim": DIM, **fields})


def test_bad_inputs_are_refused_in_one_sentence():
    mem, x = build(), some(2, T, DIM)
    _, state = mem(x)
    for arguments, message in [
        ((x[0],), r"x has shape \(21, 12\), but \(batch, time, dim=12\)"),
        ((x[:, :0],), r"at least one token"),
        ((x[..., :5],), r"x has shape \(2, 21, 5\)"),
        ((x.float(),), r"x has type torch.float32, but the layer's parameters are torch.float64"),
        ((x.long(),), r"x has type torch.int64"),
        ((x, build("omega")(x)[1]), r"another spec"),
        ((x[:1], state), r"state has 2 batch rows, but 1 are expected"),
        ((x, "state"), r"state is a str"),
        ((x, state.to("meta")), r"state is on meta, but the layer is on cpu"),
        ((x, dataclasses.replace(state, conv=None)), r"convolution tails"),
        ((x, None, torch.ones(2, T)), r"mask has shape \(2, 21\) and type torch.float32, but bool"),
        ((x, None, None, torch.tensor([0, T])), r"cu_seqlens must be a vector"),
        ((x[:1], None, None, torch.tensor([0, T]), True), r"trace=True cannot be combined with cu_seqlens"),
    ]:
        with pytest.raises(ValueError, match=message):
            mem(*arguments)
    with pytest.raises(ValueError, match="read needs a state"):
        mem.read(x, None)


def test_norms_are_finite_at_zero_and_never_narrower_than_float32():
    for norm in (rms_norm, l2_normalize, RMSNorm(4)):
        x = torch.zeros(2, 4, requires_grad=True)
        norm(x).sum().backward()
        assert x.grad.isfinite().all()
    assert rms_norm(some(3, 4)).dtype == l2_normalize(some(3, 4)).dtype == f64
    assert_close_rms(l2_normalize(some(3, 4), eps=0.0).norm(dim=-1), torch.ones(3), 1e-14)
    large = torch.full((4,), 300.0, dtype=torch.float16)  # its square overflows float16
    assert rms_norm(large).dtype == torch.float16
    assert_close_rms(rms_norm(large), torch.ones(4), 1e-3)
    assert_close_rms(rms_norm(some(3, 4), torch.full((4,), 2.0, dtype=f64)), 2 * rms_norm(some(3, 4)), 1e-14)


@pytest.mark.parametrize(
    "module", ["nn.conv", "nn.norm", "memory.config", "memory.gating", "memory.scan", "memory.layer"]
)
def test_examples_in_docstrings_run(module):
    found = doctest.testmod(importlib.import_module(f"mnemos.{module}"))
    assert found.failed == 0
