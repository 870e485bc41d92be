"""gating="sparse": a token gate that sees the last tokens, and is exactly 0 for most of them."""

from __future__ import annotations

import pytest
import torch

from mnemos.memory import MemoryState, NeuralMemory, NeuralMemoryConfig, SparseGating

FIELDS = {
    "gating": "sparse",
    "gate": "token",
    "structure": "linear",
    "anchor": "token",
    "momentum": False,
    "retain": False,
    "learn_w0": False,
    "chunk_size": 8,
    "conv_width": 5,
}


def layer(**fields) -> NeuralMemory:
    """A layer whose gates are 0 for some tokens, 1 for some, and between for others."""
    torch.manual_seed(0)
    memory = NeuralMemory(32, heads=2, gate_hidden=16, **FIELDS | {"gate_init": 0.5} | fields)
    with torch.no_grad():
        memory.gating.token.weight.normal_(std=2.0)
        memory.gating.read.weight.normal_(std=2.0)
        memory.gating.read_offset.fill_(-2.2)
    return memory


def gates(memory: NeuralMemory, x: torch.Tensor) -> torch.Tensor:
    return memory.gates(x, memory.initial_state(x.shape[0]), None, None).gate


def test_gates_are_exactly_0_or_1_for_some_tokens_and_between_for_others():
    found = gates(layer(), torch.randn(2, 50, 32))
    assert found.min() == 0 and found.max() == 1 and bool(((found > 0) & (found < 1)).any())


def test_a_gate_depends_on_the_tokens_of_the_convolution_and_on_no_other():
    memory, x = layer(), torch.randn(1, 12, 32)
    with torch.no_grad():
        memory.gating.token.weight.mul_(0.02)  # all gates between 0 and 1
    before = gates(memory, x)
    for distance in range(7):
        changed = x.clone()
        changed[:, 11 - distance] += 1
        same = torch.equal(gates(memory, changed)[:, 11], before[:, 11])
        assert same == (distance > 4), distance


@torch.no_grad()
def test_tokens_with_a_gate_of_0_leave_the_weights_as_they_were_to_the_bit():
    memory = layer(gate_init=0.01)
    memory.gating.token.weight.mul_(0.01)
    state = memory.write(torch.randn(1, 40, 32))
    assert state.position.item() == 40 and not any(bool(w.any()) for w in state.weights)


@torch.no_grad()
def test_tokens_with_a_read_gate_of_0_have_the_output_0_and_those_with_1_the_whole_read():
    memory, x = layer(), torch.randn(2, 40, 32)
    y, _ = memory(x)
    opened = memory.read_gate(x, memory.initial_state(2), None, None)
    shut, free = (opened == 0).all(-1), (opened == 1).all(-1)
    assert shut.any() and free.any()
    assert not y[shut].any()
    memory.gating.read.weight.zero_()
    memory.gating.read_offset.fill_(9.0)
    torch.testing.assert_close(memory(x)[0][free], y[free], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_reading_without_writing_has_the_read_gate_of_the_next_tokens():
    memory, x = layer(gate_init=0.01), torch.randn(1, 30, 32)
    state = memory.write(x[:, :20])
    memory.gating.token.weight.zero_()  # nothing more is written
    torch.testing.assert_close(memory.read(x[:, 20:], state), memory(x[:, 20:], state)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@torch.no_grad()
def test_any_split_of_a_sequence_gives_the_same_outputs(backend):
    memory, x = layer(backend=backend, features="monomials", key_dim=6), torch.randn(2, 30, 32)
    whole, last = memory(x)
    state, parts = None, []
    for begin, end in ((0, 7), (7, 8), (8, 9), (9, 30)):
        y, state = memory(x[:, begin:end], state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)
    for name, tensor in state.tensors().items():
        torch.testing.assert_close(tensor, last.tensors()[name], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_padding_and_packed_documents_give_the_outputs_of_each_row_by_itself():
    memory, x = layer(), torch.randn(1, 30, 32)
    first, second = memory(x[:, :13])[0], memory(x[:, 13:])[0]
    packed, _ = memory(x, cu_seqlens=torch.tensor([0, 13, 30]))
    torch.testing.assert_close(packed, torch.cat([first, second], 1), atol=1e-5, rtol=1e-4)
    padded = torch.cat([torch.randn(1, 4, 32), x[:, :13]], 1)
    mask = torch.arange(17).unsqueeze(0) >= 4
    torch.testing.assert_close(memory(padded, mask=mask)[0][:, 4:], first, atol=1e-5, rtol=1e-4)


def test_all_parameters_of_the_gate_have_a_gradient():
    memory = layer()
    memory(torch.randn(2, 20, 32))[0].square().sum().backward()
    width = memory.config.gate_hidden
    for part in (
        memory.conv.weight.grad[:, -width:],
        memory.gating.linear.weight.grad[-width:],
        memory.gating.token.weight.grad,
        memory.gating.read.weight.grad,
        memory.gating.read_offset.grad,
    ):
        assert bool(part.any())


def test_a_state_is_saved_and_loaded(tmp_path):
    memory, x = layer(), torch.randn(2, 20, 32)
    with torch.no_grad():
        _, state = memory(x[:, :11])
        state.save(tmp_path / "state.safetensors")
        loaded = MemoryState.load(tmp_path / "state.safetensors", memory.spec)
        assert torch.equal(memory(x[:, 11:], loaded)[0], memory(x[:, 11:], state)[0])


def test_it_needs_a_token_gate_and_a_convolution():
    for wrong in ({"gate": "none"}, {"conv_width": 0}):
        with pytest.raises(ValueError, match="needs gate='token' and a convolution"):
            NeuralMemory(32, **FIELDS | wrong)
    x = torch.randn(1, 4, 32)
    with pytest.raises(ValueError, match="leave out kv"):
        layer()(x, kv=x)
    with pytest.raises(ValueError, match="call the layer's gates"):
        SparseGating(NeuralMemoryConfig(32, **FIELDS))(torch.randn(1, 2, 32))
