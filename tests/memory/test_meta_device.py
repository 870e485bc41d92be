"""Tensors on the meta device: a sentence from every function that checks values, shapes from those below it."""

from __future__ import annotations

import pytest
import torch

from mnemos.backends import torch as backend
from mnemos.backends.torch.trace import update_norms
from mnemos.memory import Gates, NeuralMemory, scan, step

KINDS = {
    "gd": dict(window=3),
    "muon": dict(rule="muon", retention="start", chunk_size=8),
    "every token": dict(rule="muon", commit_every=1, momentum=False, window=2, chunk_size=8),
    "solved": dict(structure="linear", anchor="token"),
    "growing": dict(features="exp"),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def memory(request) -> NeuralMemory:
    return NeuralMemory(dim=32, heads=2, **request.param).to("meta")


def token(memory: NeuralMemory, steps: int = 1):
    x = torch.zeros(2, steps, memory.heads, memory.spec.key_dim, device="meta")
    gates = Gates(*(torch.zeros(2, steps, memory.heads, device="meta") for _ in range(1 + memory.spec.momentum)))
    return x, gates, memory.initial_state(2), memory.spec, memory.features


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_layer_on_the_meta_device_says_how_to_move_it(memory, steps, grad):
    x = torch.zeros(2, steps, 32, device="meta")
    with torch.set_grad_enabled(grad):
        for call in (memory, memory.write, lambda x: memory(x, trace=True)):
            with pytest.raises(ValueError, match=r"meta device, which holds no numbers.*to_empty"):
                call(x)
        assert memory.read(x, memory.initial_state(2)).shape == x.shape


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("function", [scan, step])
def test_scan_and_step_refuse_the_meta_device_in_one_sentence(memory, function, grad):
    x, *given = token(memory)
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"^k is on the meta device.* move q, k, v"):
        function(x, x, x, *given)


def test_the_torch_step_gives_shapes_of_one_token(memory):
    x, *given = token(memory)
    if memory.spec.is_kv_cache:
        return  # which has no step of its own
    y, state = backend.step(x, x, x, *given, None)
    assert y.shape == x.shape and y.is_meta and state.position.is_meta
    assert [w.shape for w in state.weights] == [w.shape for w in memory.initial_state(2).weights]


def test_the_norms_of_updates_have_shapes_on_the_meta_device(memory):
    x, gates, state, *rest = token(
        memory, steps=3 if memory.spec.depends_on_chunking and memory.spec.anchor != "token" else 1
    )
    norms = update_norms(x, x, gates, state, *rest, None)
    assert [n.shape for n in norms] == [x.shape[:3]] * 2 and all(n.is_meta for n in norms)
