"""One token by the compiled kernels: the numbers of the torch path, and nothing written that another state holds."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from decoding import Adapted, tensors

from helpers import assert_close, needs_kernel
from mnemos.backends.cpu import build, token
from mnemos.memory import Gates, MemorySpec, MemoryState, NeuralMemory, step
from mnemos.models import MnemosCache, MnemosForCausalLM, presets
from mnemos.models.gate import TokenGate, make_gate
from mnemos.nn import Attention, SwiGLU
from mnemos.nn.linear import Linear
from mnemos.nn.norm import l2_normalize, rms_norm

pytestmark = needs_kernel


def draw_spec(draw: random.Random) -> MemorySpec:
    return MemorySpec(
        key_dim=draw.choice([3, 8, 17]),
        value_dim=draw.choice([3, 8, 17]),
        structure=draw.choice(["linear", "mlp", "gated_mlp"]),
        depth=draw.choice([1, 2, 3]),
        objective=draw.choice(["l2", "dot"]),
        window=draw.choice([1, 1, 3, 5]),
        chunk_size=draw.choice([1, 4, 7]),
        momentum=draw.random() < 0.7,
        read=draw.choice(["after", "before"]),
        residual=draw.random() < 0.7,
        retention=draw.choice(["zero", "start"]),
    )


def draw_gates(B: int, H: int, spec: MemorySpec, given: list[bool]) -> Gates:
    def gate(*more: int) -> torch.Tensor:
        return torch.rand(B, 1, H, *more, dtype=torch.float64)

    momentum, retain, token_gate, decay, lag = given
    return Gates(
        gate() * 0.1,
        gate() if momentum and spec.momentum else None,
        gate() if retain else None,
        gate() if token_gate else None,
        torch.rand(H, dtype=torch.float64) if decay else None,
        gate(spec.window) if lag else None,
    )


@torch.no_grad()
@pytest.mark.parametrize("seed", range(60))
def test_a_step_is_that_of_torch_in_place_or_not_for_rows_at_any_position(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    spec, B, H = draw_spec(draw), draw.choice([1, 3]), draw.choice([1, 2])
    given = [draw.random() < 0.7 for _ in range(5)]
    W0 = [torch.randn(H, *shape, dtype=torch.float64) * 0.3 for shape in spec.shapes]
    kept = [w.clone() for w in W0]
    states = {kind: spec.initial_state(W0, B) for kind in ("torch", "cpu", "inplace")}
    for t in range(14):
        q, k = torch.randn(2, B, 1, H, spec.key_dim, dtype=torch.float64) * 0.4
        v, gates = torch.randn(B, 1, H, spec.value_dim, dtype=torch.float64), draw_gates(B, H, spec, given)
        mask = torch.rand(B, 1) < 0.6 if t in (3, 5) else None
        found = {}
        for kind, state in states.items():
            state.inplace = kind == "inplace"
            before = None if state.inplace else [x.clone() for x in tensors(state)]
            backend = "torch" if kind == "torch" else "cpu"
            found[kind], states[kind] = step(q, k, v, gates, state, spec, mask=mask, backend=backend)
            assert before is None or all(torch.equal(a, b) for a, b in zip(before, tensors(state)))
        for kind in ("cpu", "inplace"):
            assert_close(found[kind], found["torch"], 1e-12)
            assert states[kind].chunk_offset == states["torch"].chunk_offset
            for a, b in zip(tensors(states[kind]), tensors(states["torch"])):
                assert_close(a, b, 1e-12)
    assert all(torch.equal(a, b) for a, b in zip(W0, kept))


LAYERS = {
    "default": {},
    "no convolution": {"conv_width": None},
    "rms": {"qk_norm": "rms", "value_bound": None},
    "no norm": {"qk_norm": "none", "max_lr": 0.01},
    "fixed retain": {"retain": "fixed"},
    "bare": {"retain": False, "momentum": False, "output_gate": False},
    "linear": {"structure": "linear", "objective": "dot", "key_dim": 6},
    "gated": {"structure": "gated_mlp", "read": "before"},
    "deep": {"depth": 3, "conv_width": 1},
    "no residual": {"residual": False},
    "window": {"window": 3, "gate": "token*decay"},
    "lifted": {"features": "monomials", "key_dim": 4, "structure": "linear"},
    "towards the start": {"retention": "start"},
    "towards the start, gated": {"retention": "start", "structure": "gated_mlp", "read": "before", "momentum": False},
    "towards the start, fixed retain": {"retention": "start", "retain": "fixed", "w0_branch": False},
    "towards the start, no decay": {"retention": "start", "retain": False},
    "towards the start, window": {"retention": "start", "window": 3, "gate": "token*decay"},
}


def make_layer(**choices) -> NeuralMemory:
    torch.manual_seed(0)
    layer = NeuralMemory(dim=24, heads=3, chunk_size=5, **choices).double()
    for p in layer.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return layer


@torch.no_grad()
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_decodes_what_it_computes_at_once(name, batch, inplace):
    layer, plain = make_layer(**LAYERS[name]), make_layer(**LAYERS[name], backend="torch")
    x = torch.randn(batch, 17, 24, dtype=torch.float64)
    right, right_state = plain(x)
    found, state = [], None
    for t in range(x.shape[1]):
        if state is not None:
            state.inplace = inplace
        y, state = layer(x[:, t : t + 1], state)
        found.append(y)
    assert_close(torch.cat(found, 1), right, 1e-10)
    for a, b in zip([*tensors(state), state.position], [*tensors(right_state), right_state.position]):
        assert_close(a, b, 1e-10)
    if right_state.conv is not None:
        assert torch.allclose(state.conv, right_state.conv)


@torch.no_grad()
@pytest.mark.parametrize("retention", ["zero", "start"])
def test_rows_at_different_positions_decode_in_place_as_they_do_alone(retention):
    layer = make_layer(retention=retention)
    x = torch.randn(4, 20, 24, dtype=torch.float64)
    alone = [layer(x[i : i + 1, : 3 + 2 * i])[1] for i in range(4)]
    together = MemoryState.stack(alone)
    assert together.chunk_offset is None
    for t in range(10, 20):
        together.inplace = True
        y, together = layer(x[:, t : t + 1], together)
        for i in range(4):
            right, alone[i] = layer(x[i : i + 1, t : t + 1], alone[i])
            assert_close(y[i : i + 1], right, 1e-10)
    right_state = MemoryState.stack(alone)
    for a, b in zip(tensors(together), tensors(right_state)):
        assert_close(a, b, 1e-10)


@torch.no_grad()
@pytest.mark.parametrize("retention", ["zero", "start"])
@pytest.mark.parametrize("length", [4, 5, 8])
def test_what_was_made_from_a_state_stays_when_the_state_goes_on_in_place(length, retention):
    layer = make_layer(retention=retention)
    x = torch.randn(2, 30, 24, dtype=torch.float64)
    _, state = layer(x[:, :length])
    start = [w.clone() for w in layer.W0]
    for t in range(length, 25):
        state.inplace = True
        _, state = layer(x[:, t : t + 1], state)
        state.inplace = False
        fork, picked = state.clone(), state.select([1, 0])
        _, branch = layer(x[:, t : t + 1] * 2, state)  # not in place: shares at most the anchor with `state`
        held = [tensors(s) for s in (fork, picked, branch)]
        copies = [[y.clone() for y in ys] for ys in held]
        state.inplace = True
        for later in range(t + 1, t + 4):
            _, state = layer(x[:, later : later + 1], state)
        assert all(torch.equal(a, b) for xs, ys in zip(held, copies) for a, b in zip(xs, ys))
        assert not (fork.inplace or fork.own or picked.own)
        state = fork
    assert all(torch.equal(a, b) for a, b in zip(layer.W0, start))


@torch.no_grad()
def test_a_token_that_is_not_finite_is_refused_and_changes_nothing():
    layer = make_layer()
    _, state = layer(torch.randn(1, 7, 24, dtype=torch.float64))
    _, state = layer(torch.randn(1, 1, 24, dtype=torch.float64), state)
    state.inplace, before = True, [x.clone() for x in tensors(state)]
    with pytest.raises(ValueError, match=r"x is nan in batch row 0, position 0"):
        layer(torch.full((1, 1, 24), float("nan"), dtype=torch.float64), state)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(state)))


@torch.no_grad()
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "batch, persistent, choices",
    [
        (1, 0, {}),
        (3, 2, {"kv_heads": 2}),
        (2, 1, {"qk_norm": False}),
        (1, 0, {"conv_width": 4}),
        (3, 2, {"conv_width": 3, "kv_heads": 1}),
        (2, 1, {"conv_width": 1, "qk_norm": False}),
        (2, 0, {"conv_width": 9}),
    ],
)
def test_attention_decodes_what_it_computes_at_once(batch, persistent, choices, inplace, monkeypatch):
    torch.manual_seed(0)
    attention = Attention(dim=32, heads=4, window=5, **choices).double()
    x = torch.randn(batch, 23, 32, dtype=torch.float64)
    right, right_cache = attention(x, persistent=persistent)
    y, cache = attention(x[:, :4], persistent=persistent)
    found, calls, run = [y], [], token._run
    monkeypatch.setattr(token, "_run", lambda name, *rest: (calls.append(name), run(name, *rest))[1])
    for t in range(4, 23):
        cache.inplace, before = inplace, cache.clone().tensors()
        y, new = attention(x[:, t : t + 1], cache)
        kept = {name: x for name, x in before.items() if name == "conv" or not inplace}  # a tail is never written into
        assert all(torch.equal(cache.tensors()[name], x) for name, x in kept.items())
        cache = new
        found.append(y)
    assert calls == ["attend"] * 19
    assert_close(torch.cat(found, 1), right, 1e-10)
    assert cache.tensors().keys() == right_cache.tensors().keys()
    for name, x in cache.tensors().items():
        assert_close(x.double(), right_cache.tensors()[name].double(), 1e-10, name)


@torch.no_grad()
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_small_maps_and_norms_are_those_of_torch(dtype, tolerance):
    torch.manual_seed(0)
    for n, out in ((1, 1), (3, 5), (37, 11), (256, 768), (2048, 700)):
        layer, x = Linear(n, out).to(dtype), torch.randn(1, 1, n, dtype=dtype)
        assert_close(layer(x), F.linear(x, layer.weight, layer.bias), tolerance)
    for shape, weight in (((2, 3, 8), (8,)), ((2, 1, 3, 8), (3, 8)), ((1, 5), None)):
        x = torch.randn(shape, dtype=dtype)
        w = None if weight is None else torch.randn(weight, dtype=dtype)
        right = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        assert_close(rms_norm(x, w), right if w is None else right * w, tolerance)
        assert_close(l2_normalize(x, 0.1), x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 0.1), tolerance)
    feed, x = SwiGLU(12, 31).to(dtype), torch.randn(5, 1, 12, dtype=dtype)
    gate, up = F.linear(x, feed.gate_up.weight).chunk(2, -1)
    assert_close(feed(x), F.linear(F.silu(gate) * up, feed.down.weight), tolerance)
    for mode in ("convex", "additive"):
        join = make_gate(presets.config("titans-mag", size="nano", gate_mode=mode)).to(dtype)
        assert isinstance(join, TokenGate)
        join.linear.weight.normal_()
        x, y, m = torch.randn(3, 2, 1, join.linear.in_features, dtype=dtype)
        with torch.enable_grad():
            right = join(y, m, x)
        assert_close(join(y, m, x), right.detach(), tolerance)


@torch.no_grad()
@pytest.mark.parametrize(
    "name, choices",
    [
        ("titans-lmm", {}),
        ("titans-mag", {}),
        ("titans-mal", {}),
        ("titans-lmm", {"memory_retention": "start"}),
        ("titans-mal", {"memory_retention": "start"}),
        ("titans-mag", {"attention_conv_width": 4, "memory_retention": "start"}),
        ("swa", {}),
    ],
)
def test_sessions_at_different_positions_decode_in_place_as_one_forward_reads_them(name, choices):
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=2)
    config = presets.config(name, size="nano", **sizes, **choices)
    model = MnemosForCausalLM(config).double().eval()
    ids = torch.randint(0, 64, (3, 90))
    cache = MnemosCache.stack([model.state(ids[i : i + 1, : 60 + 4 * i]) for i in range(3)])
    logits = []
    for t in range(20):
        tokens = torch.stack([ids[i, 60 + 4 * i + t] for i in range(3)]).unsqueeze(1)
        output = model(tokens, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        cache.inplace = True
        logits.append(output.logits)
        if t == 9:
            kept = cache.fork(1)
    for i in range(3):
        right = model(ids[i : i + 1, : 80 + 4 * i]).logits[:, -20:]
        assert_close(torch.cat(logits, 1)[i : i + 1], right, 1e-9)
    for t in range(10, 20):  # from a fork taken on the way, without writing in place
        tokens = torch.stack([ids[i, 60 + 4 * i + t] for i in range(3)]).unsqueeze(1)
        output = model(tokens, past_key_values=kept, use_cache=True)
        kept = output.past_key_values
        assert_close(output.logits, logits[t], 1e-9)


@torch.no_grad()
def test_any_number_of_threads_gives_the_same_bits():
    token.share_from(1, 1)
    layer, attention = make_layer(), Attention(dim=24, heads=2, window=4, conv_width=4).double()
    x, found, before = torch.randn(3, 6, 24, dtype=torch.float64), [], torch.get_num_threads()
    feed, rows = SwiGLU(256), torch.randn(16, 1, 256)  # large enough for the maps to use them
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            _, state = layer(x[:, :1])
            _, cache = attention(x[:, :1])
            for t in range(1, 6):
                y, state = layer(x[:, t : t + 1], state)
                z, cache = attention(x[:, t : t + 1], cache)
            found.append([y, z, *tensors(state), cache.key, cache.conv, feed(rows)])
    finally:
        torch.set_num_threads(before)
        token.share_from()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


@pytest.fixture
def no_compiler(monkeypatch):
    caches = build.library, build.gemm, build._missing
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    yield
    for cached in caches:
        cached.cache_clear()


@torch.no_grad()
def test_without_a_compiler_torch_decodes(no_compiler):
    layer, x = make_layer(), torch.randn(2, 9, 24, dtype=torch.float64)
    right, _ = layer(x)
    _, state = layer(x[:, :8])
    state.inplace = True
    assert_close(layer(x[:, 8:], state)[0], right[:, 8:], 1e-10)
    with pytest.raises(ValueError, match="backend='cpu' is not available"):
        make_layer(backend="cpu")(x[:, :1])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["adapter", "hook"])
@pytest.mark.parametrize(
    "place", ["mixer.memory.qkv", "mixer.memory.out", "mixer.attention.out", "feedforward.gate_up", "feedforward.down"]
)
def test_a_map_that_was_replaced_or_listened_to_is_called_in_decoding_too(place, kind):
    torch.manual_seed(0)
    model = MnemosForCausalLM(presets.config("titans-mag", "nano", num_hidden_layers=1, hidden_size=32)).eval().double()
    parent, name = place.rsplit(".", 1)
    owner = model.model.layers[0].get_submodule(parent)
    if kind == "adapter":
        setattr(owner, name, Adapted(getattr(owner, name)))
    else:
        getattr(owner, name).register_forward_hook(lambda module, given, out: out * 1.5)
    ids = torch.randint(0, 256, (1, 12))
    whole, cache, parts = model(ids).logits, None, []
    for i in range(12):
        output = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    assert_close(torch.cat(parts, 1), whole, 1e-9)


@torch.no_grad()
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("rows", [2, 4, 5, 8, 9, 16, 17, 31, 33])
def test_few_rows_go_through_their_own_product(rows, dtype, tolerance):
    torch.manual_seed(0)
    for dim, hidden in ((1, 1), (12, 31), (37, 6), (64, 100)):
        feed, x = SwiGLU(dim, hidden).to(dtype), torch.randn(rows, 1, dim, dtype=dtype)
        gate, up = F.linear(x, feed.gate_up.weight).chunk(2, -1)
        assert_close(feed(x), F.linear(F.silu(gate) * up, feed.down.weight), tolerance)
