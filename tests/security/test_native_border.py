"""The kernels check sizes and bounds themselves, whatever the Python around them believed: a refusal, never a crash."""

import dataclasses

import pytest
import torch

from mnemos.backends.cpu import decode, scan_kernels, token
from mnemos.backends.cpu.build import Unavailable, library
from mnemos.memory import Gates, MemorySpec, NeuralMemory, scan, step
from mnemos.nn import Attention

try:
    library("token")
except Unavailable as reason:
    pytest.skip(f"no kernels here: {reason}", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("error")
EVERY_TOKEN = {"rule": "muon", "commit_every": 1, "momentum": False, "window": 3}


def test_a_state_of_a_layer_with_other_heads_is_refused_at_one_token():
    """The same spec and no convolution: nothing but the heads tells these layers apart."""
    small = NeuralMemory(dim=64, heads=2, conv_width=0)
    large = NeuralMemory(dim=256, heads=8, conv_width=0)
    state = small.write(torch.randn(1, 5, 64))
    with torch.no_grad():
        for tokens in (1, 5):
            with pytest.raises(ValueError, match="state has 2 heads, but the layer has 8"):
                large(torch.randn(1, tokens, 256), state)


@torch.no_grad()
@pytest.mark.parametrize("name", ["weights", "momentum", "anchor", "start"])
@pytest.mark.parametrize(
    "cut", [lambda x: x[:, :1], lambda x: x[:, :, :3], lambda x: x[:0]], ids=["heads", "in", "rows"]
)
def test_a_state_with_a_matrix_too_small_is_refused_by_the_kernel(name, cut):
    memory = NeuralMemory(dim=32, heads=4, chunk_size=8, retention="start")
    state = memory.write(torch.randn(2, 5, 32))
    matrices = getattr(state, name)
    broken = dataclasses.replace(state, **{name: [cut(matrices[0]).contiguous(), *matrices[1:]]})
    with pytest.raises(ValueError, match="rejects its arguments"):
        memory(torch.randn(2, 1, 32), broken)
    spec, gates = memory.spec, Gates(lr=torch.ones(2, 1, 4), momentum=torch.zeros(2, 1, 4))
    q = torch.randn(2, 1, 4, spec.key_dim)
    with pytest.raises(ValueError):
        step(q, q, q, gates, broken, spec)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_matrices_of_other_rows_never_give_memory_that_nobody_wrote(rows, tokens):
    memory = NeuralMemory(dim=32, heads=4, chunk_size=8, retention="start")
    state, other = (memory.write(torch.randn(n, 5, 32)).clone() for n in (3, rows))
    for names in (("weights", "momentum", "anchor"), ("weights",), ("momentum",), ("anchor",), ("start",)):
        mixed = dataclasses.replace(state, **{name: getattr(other, name) for name in names})
        with pytest.raises(ValueError, match=r"rejects its arguments|is expected"):
            memory(torch.randn(3, tokens, 32), mixed)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize(
    "wrong",
    [
        {"position": torch.zeros(3)},
        {"position": torch.zeros(3, dtype=torch.int32)},
        {"chunk_offset": -3},
        {"chunk_offset": 99},
    ],
    ids=["float", "int32", "negative chunk_offset", "chunk_offset beyond the chunk"],
)
def test_a_place_that_no_state_has_is_refused(wrong, tokens):
    memory = NeuralMemory(dim=32, heads=4, chunk_size=8)
    state = memory.write(torch.randn(3, 5, 32))
    with pytest.raises(ValueError, match=r"position|chunk_offset"):
        memory(torch.randn(3, tokens, 32), dataclasses.replace(state, **wrong))


@torch.no_grad()
@pytest.mark.parametrize("position", [-1, -(2**63), 2**63 - 1])
def test_attention_refuses_a_position_outside_of_its_ring(position):
    attention = Attention(dim=32, heads=4, window=8)
    _, cache = attention(torch.randn(2, 5, 32))
    wrong = dataclasses.replace(cache, position=torch.tensor([5, position]))
    with pytest.raises(ValueError, match="rejects its arguments"):
        attention(torch.randn(2, 1, 32), wrong)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64])
def test_attention_refuses_positions_of_another_type(dtype):
    attention = Attention(dim=32, heads=4, window=8)
    _, cache = attention(torch.randn(2, 5, 32))
    with pytest.raises(ValueError, match="positions of"):
        attention(torch.randn(2, 1, 32), dataclasses.replace(cache, position=cache.position.to(dtype)))


def attend(
    position=None, key=None, value=None, x=None, heads=4, window=8, persistent=0, out=None, conv=None, tail=None
):
    parameters = torch.randn(96, 32), None, None, torch.randn(32, 32) if out is None else out, conv
    ring = torch.zeros(2, 8, 4, 8)
    cache = torch.zeros(2, dtype=torch.int64), ring.clone(), ring.clone()
    cache = [old if new is None else new for old, new in zip(cache, (position, key, value))]
    call, _ = token.attend(parameters, tuple(cache), tail, heads, window, persistent, 1e4, 1e-6)
    return call(torch.randn(2, 1, 32) if x is None else x)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(position=torch.zeros(2, dtype=torch.int32)),
        dict(position=torch.zeros(1, dtype=torch.int64)),
        dict(value=torch.zeros(2, 7, 4, 8)),
        dict(value=torch.zeros(2, 8, 4, 8, dtype=torch.float16)),
        dict(x=torch.randn(2, 1, 31)),
        dict(x=torch.randn(1, 1, 32)),
        dict(heads=8),
        dict(heads=2**40),
        dict(heads=0),
        dict(window=9),
        dict(window=0),
        dict(window=-8),
        dict(persistent=-60),
        dict(persistent=1),
        dict(persistent=2**62),
        dict(out=torch.randn(33, 32)),
        dict(out=torch.randn(32, 31)),
        dict(conv=torch.randn(4, 96)),
        dict(tail=torch.zeros(2, 3, 96)),
        dict(conv=torch.randn(4, 96), tail=torch.zeros(1, 3, 96)),
        dict(conv=torch.randn(4, 96), tail=torch.zeros(2, 2, 96)),
        dict(conv=torch.randn(4, 96), tail=torch.zeros(2, 4, 96)),
        dict(conv=torch.randn(4, 96), tail=torch.zeros(2, 3, 96, dtype=torch.float16)),
        dict(conv=torch.randn(4, 95), tail=torch.zeros(2, 3, 96)),
        dict(conv=torch.randn(1, 95)),
    ],
    ids=lambda wrong: "-".join(f"{k}={getattr(v, 'shape', v)}" for k, v in wrong.items()),
)
def test_the_attention_kernel_refuses_arrays_that_are_too_small(wrong):
    assert attend().shape == (2, 1, 32)
    assert attend(conv=torch.randn(4, 96), tail=torch.zeros(2, 3, 96)).shape == (2, 1, 32)
    with pytest.raises(ValueError, match="rejects its arguments"):
        attend(**wrong)


@pytest.mark.parametrize("which", range(4))
def test_the_step_kernel_refuses_vectors_that_are_too_small(which):
    spec = MemorySpec(key_dim=4, value_dim=4, window=2)
    state = spec.initial_state([torch.randn(3, 4, 16), torch.randn(3, 16, 4)], batch=2).clone()
    matrices = [[x.contiguous() for x in xs] for xs in (state.weights, state.momentum, state.anchor, [])]
    maps = token.Maps(*matrices, *matrices[:2])
    tensors = [torch.randn(6, 1, 4), torch.randn(6, 2, 4), torch.randn(6, 2, 4), torch.rand(6, 2, 1)]

    def run():
        query, keys, values, weight = tensors
        return token.chain_step(spec, query, (keys, values, weight), (None, None, None), maps)

    assert run().shape == (6, 1, 4)
    if which == 0:  # y is made as long as the query
        tensors[0] = torch.randn(6, 1, 3)
    else:
        tensors[which] = tensors[which][:5].contiguous()
    with pytest.raises(ValueError, match="rejects its arguments"):
        run()


def layer_call(**choices):
    """The kernel's call of a memory layer with a window, with sizes of its own that a test may change."""
    torch.manual_seed(0)
    memory = NeuralMemory(dim=16, heads=2, chunk_size=4, retention="start", **choices)
    state, x = memory.write(torch.randn(3, 5, 16)), torch.randn(3, 1, 16)
    begin = decode._begin(memory, x, state)
    assert begin is not None
    call, _ = begin()
    call.structs = tuple(type(part).from_buffer_copy(part) for part in call.structs)
    return call, x


WINDOWED = EVERY_TOKEN | {"features": "monomials", "key_dim": 3, "gate": "token*decay*per-lag"}


@torch.no_grad()
def test_the_layer_kernel_refuses_every_array_that_is_too_small():
    call, x = layer_call(**WINDOWED)
    assert call(x).shape == (3, 1, 16)
    _, _, _, layer, arrays = call.structs
    names = [name for name, _ in layer._fields_ if name.endswith("_bytes") and getattr(layer, name)]
    names = [name for name in names if name not in ("x_bytes", "y_bytes")]
    assert len(names) == 20, names
    for name in names:
        size = getattr(layer, name)
        setattr(layer, name, size - 4)
        with pytest.raises(ValueError, match="rejects its arguments"):
            call(x)
        setattr(layer, name, size)
        setattr(layer, name.removesuffix("_bytes"), None)
        if name not in ("start_norm_bytes", "output_gate_bytes"):  # which a layer may not have
            with pytest.raises(ValueError, match="rejects its arguments"):
                call(x)
        call, x = layer_call(**WINDOWED)
        _, _, _, layer, arrays = call.structs
    for at in range(1, len(arrays.matrices), 2):
        size = arrays.matrices[at]
        if size:
            arrays.matrices[at] = size - 4
            with pytest.raises(ValueError, match="rejects its arguments"):
                call(x)
            arrays.matrices[at] = size
    assert call(x).shape == (3, 1, 16)


@torch.no_grad()
@pytest.mark.parametrize(
    "part, name, value",
    [
        *((0, "degree", value) for value in (-1, 0, 1, 3, 65, 2**40)),
        *((0, "hidden", value) for value in (-1, 65, 2**31, 2**62)),
        *((0, name, value) for name in ("lags", "decay", "inside") for value in (-1, 2, 2**62)),
        (0, "momentum", 1),
        *((1, name, value) for name in ("B", "H", "K", "V") for value in (0, 1, 4, 2**31, -3)),
        *(
            (2, name, value)
            for name in ("entries", "lanes", "heads", "groups", "starts")
            for value in (-1, 4, 5, 2**40)
        ),
        (2, "entries", 0),
    ],
)
def test_the_layer_kernel_refuses_sizes_that_do_not_fit(part, name, value):
    call, x = layer_call(**WINDOWED)
    setattr(call.structs[part], name, value)
    with pytest.raises(ValueError, match="rejects its arguments"):
        call(x)


@torch.no_grad()
@pytest.mark.parametrize("name, value", [("window", 2), ("window", 0), ("window", 2**40), ("steps", -1), ("steps", 65)])
def test_the_layer_kernel_refuses_a_rule_that_does_not_fit(name, value):
    call, x = layer_call(**WINDOWED)
    setattr(call.structs[2].rule, name, value)
    with pytest.raises(ValueError, match="rejects its arguments"):
        call(x)


@torch.no_grad()
@pytest.mark.parametrize("name", ["window_key", "window_value", "window_gate"])
@pytest.mark.parametrize(
    "cut", [lambda x: x[:, :1], lambda x: x[:, :, :1], lambda x: x[:1]], ids=["window", "heads", "rows"]
)
def test_a_state_with_window_buffers_too_small_is_refused(name, cut):
    memory = NeuralMemory(dim=16, heads=2, chunk_size=4, **WINDOWED)
    state = memory.write(torch.randn(3, 5, 16))
    broken = dataclasses.replace(state, **{name: cut(getattr(state, name)).contiguous()})
    with pytest.raises(ValueError):
        memory(torch.randn(3, 1, 16), broken)


def test_small_maps_refuse_arrays_that_are_too_small():
    x, weight = torch.randn(1, 8), torch.randn(4, 8)
    assert torch.allclose(token.linear(x, weight, None), x @ weight.T, atol=1e-5)
    for call in (
        lambda: token.linear(x[:, :7], weight, None),
        lambda: token.linear(x, weight, torch.randn(3)),
        lambda: token.norm(x, torch.randn(7), 1.0, 1e-6),
        lambda: token.feed(x, torch.randn(15, 8), torch.randn(8, 8)),
        lambda: token.join(x, x[:, :7], x, torch.randn(2, 8), torch.randn(2), 0.0, False),
        lambda: token.join(x, x, x, torch.randn(3, 8), torch.randn(3), 0.0, False),
        lambda: token.ends(torch.empty(0)),
    ):
        with pytest.raises(ValueError, match="rejects its arguments"):
            call()


@pytest.mark.parametrize(
    "choices",
    [{}, {"retention": "start"}, {"rule": "muon"}, EVERY_TOKEN, EVERY_TOKEN | {"retention": "start"}],
    ids=lambda choices: "-".join(map(str, choices.values())) or "gd",
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_scan_kernels_refuse_every_array_that_is_too_small(choices, backward, monkeypatch):
    """Each array of the call in turn is handed over one row short, while everything else stays as it is."""
    spec = MemorySpec(key_dim=4, value_dim=4, chunk_size=4, **choices)
    real, names = scan_kernels.call, set()

    def call(name, kind, what, back, **arrays):
        if back == backward and not names:
            for key, value in arrays.items():
                if value is None or not value.numel():
                    continue
                short = value.flatten()[:-1].contiguous()
                with pytest.raises(ValueError, match="rejects its arguments"):
                    real(name, kind, what, back, **arrays | {key: short})
                names.add(key)
        real(name, kind, what, back, **arrays)

    monkeypatch.setattr("mnemos.backends.cpu.scan_kernels.call", call)
    W0 = [torch.randn(2, 4, 16, requires_grad=True), torch.randn(2, 16, 4, requires_grad=True)]
    q, k, v = torch.randn(3, 1, 13, 2, 4, requires_grad=True)
    gates = Gates(lr=torch.rand(1, 13, 2), retain=torch.rand(1, 13, 2))
    gates.momentum = torch.rand(1, 13, 2) if spec.momentum else None
    y, _ = scan(q, k, v, gates, spec.initial_state(W0, batch=1), spec, backend="cpu")
    y.sum().backward()
    assert len(names) >= (12 if backward else 10), sorted(names)
    assert ("W0" in names) == spec.retains.keeps_start
