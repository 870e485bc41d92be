"""`Attention`: by its definition, in any split of a sequence, for rows of any length, and in its window exactly."""

from __future__ import annotations

import pytest
import torch
from naive import f64, naive_attention, some
from safetensors.torch import load, save

from helpers import assert_close_rms, randomise
from mnemos.nn import Attention, AttentionCache
from mnemos.nn.attention import sliding_attention

DIM, HEADS = 12, 2
WINDOWS = [1, 3, 16, 100, None]
LENGTHS = [1, 7, 63, 65]
each_window = pytest.mark.parametrize("window", WINDOWS)
each_persistent = pytest.mark.parametrize("persistent", [0, 3])
each_conv = pytest.mark.parametrize("conv_width", [0, 4])


def build(window, **more) -> Attention:
    torch.manual_seed(0)
    return randomise(Attention(DIM, HEADS, window, **more).double())


def prefix_mask(lengths, T: int) -> torch.Tensor:
    return torch.arange(T) < torch.tensor(lengths).unsqueeze(1)


def run(layer, x, lengths, persistent=0, **options):
    """x in calls of these lengths; the persistent tokens come with the first."""
    cache, outputs, start = None, [], 0
    for n in lengths:
        stop = start + n + (persistent if cache is None else 0)
        y, cache = layer(x[:, start:stop], cache, persistent=persistent, **options)
        outputs.append(y)
        start = stop
    assert start == x.shape[1]
    return torch.cat(outputs, 1), cache


def assert_caches_close(a: AttentionCache, b: AttentionCache, tol: float = 1e-12) -> None:
    assert a.settings() == b.settings()
    assert torch.equal(a.position, b.position)
    assert_close_rms(a.key, b.key, tol, "key")
    assert_close_rms(a.value, b.value, tol, "value")
    if a.conv is not None:
        assert_close_rms(a.conv, b.conv, tol, "conv")


@each_window
@each_persistent
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        dict(kv_heads=1, head_dim=4),
        dict(qk_norm=False, rope_theta=100.0),
        dict(conv_width=4),
        dict(conv_width=3, kv_heads=1, head_dim=4, qk_norm=False),
    ],
)
def test_attention_is_its_definition(window, persistent, T, more):
    layer, x = build(window, **more), some(2, persistent + T, DIM)
    y, _ = layer(x, persistent=persistent)
    assert_close_rms(y, torch.stack([naive_attention(layer, row, persistent) for row in x]), 1e-12)


@pytest.mark.parametrize("block", [1, 5, 16, 31, 64])
@pytest.mark.parametrize("window", [1, 3, 16, 40])
@each_persistent
def test_the_block_size_is_a_choice_of_speed_alone(block, window, persistent):
    q, k, v = some(3, 2, 101, 3, 4)
    expected = sliding_attention(q, k, v, window, persistent, block=101)
    assert_close_rms(sliding_attention(q, k, v, window, persistent, block=block), expected, 1e-13)


@each_window
@each_persistent
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("more", [{}, dict(kv_heads=1), dict(conv_width=4), dict(conv_width=1), dict(conv_width=9)])
def test_any_split_is_one_call(window, persistent, T, more):
    layer, x = build(window, **more), some(3, persistent + T, DIM)
    whole, end = layer(x, persistent=persistent)
    splits = [[1] * T, [T // 2, T - T // 2], [0, T], [T // 3, 1, T - T // 3 - 1], [5] * (T // 5) + [T % 5]]
    for split in splits:
        lengths = [n for i, n in enumerate(split) if n or (i == 0 and persistent)]
        if min(lengths) < 0 or sum(lengths) != T:
            continue
        y, cache = run(layer, x, lengths, persistent)
        assert_close_rms(y, whole, 1e-12, f"split {lengths}")
        assert_caches_close(cache, end)


@each_window
@each_persistent
@each_conv
def test_ragged_rows_are_the_rows_alone_over_several_calls(window, persistent, conv_width):
    layer, P = build(window, conv_width=conv_width), persistent
    calls = [[5, 0, 20], [1, 1, 1], [0, 1, 1], [7, 33, 0], [40, 2, 19], [1, 0, 1], [1, 1, 1]]
    totals = [sum(call[r] for call in calls) for r in range(3)]
    rows = [some(1, P + n, DIM, seed=r) for r, n in enumerate(totals)]
    cache, outputs, start = None, [[] for _ in rows], [0] * 3
    for call in calls:
        extra = P if cache is None else 0
        T = extra + max(call)
        x, mask = torch.full((3, T, DIM), float("nan"), dtype=f64), prefix_mask([extra + n for n in call], T)
        for r, n in enumerate(call):
            x[r, : extra + n] = rows[r][0, start[r] : start[r] + extra + n]
            start[r] += extra + n
        y, cache = layer(x, cache, mask=None if mask.all() else mask, persistent=P)
        assert y.isfinite().all()
        for r, n in enumerate(call):
            outputs[r].append(y[r, : extra + n])
    ends = []
    for r, row in enumerate(rows):
        whole, end = layer(row, persistent=P)
        assert_close_rms(torch.cat(outputs[r]), whole[0], 1e-12, f"row {r}")
        ends.append(end)
    assert_caches_close(cache, AttentionCache.stack(ends))
    for r, end in enumerate(ends):
        assert_caches_close(cache.select([r]), end)


@each_window
@each_conv
def test_a_row_without_valid_tokens_stays_as_it_is(window, conv_width):
    layer = build(window, conv_width=conv_width)
    _, cache = layer(some(2, 9, DIM))
    for T in (1, 5):
        y, after = layer(some(2, T, DIM), cache, mask=torch.zeros(2, T, dtype=torch.bool))
        assert y.isfinite().all()
        assert_caches_close(after, cache, tol=0.0)


@pytest.mark.parametrize("window", [1, 3, 16])
@pytest.mark.parametrize("lengths", [[65], [1] * 65, [20, 45]])
@each_conv
def test_the_window_counts_exactly_its_tokens_and_the_convolution_those_before_it(window, lengths, conv_width):
    layer, x, t = build(window, conv_width=conv_width), some(1, 65, DIM), 30
    y, _ = run(layer, x, lengths)
    changed = x.clone()
    changed[:, t] += 1.0
    difference = (run(layer, changed, lengths)[0] - y).abs().amax((0, 2))
    reach = window + max(0, conv_width - 1)
    assert (difference[t : t + reach] > 1e-6).all()  # the last of them at distance reach - 1
    assert (difference[t + reach :] == 0.0).all()
    assert (difference[:t] == 0.0).all()


@pytest.mark.parametrize("lengths", [[62], [1] * 62])
def test_a_persistent_token_is_seen_at_any_distance(lengths):
    layer, x = build(3), some(1, 65, DIM)
    y, _ = run(layer, x, lengths, persistent=3)
    changed = x.clone()
    changed[:, 1] += 1.0
    difference = (run(layer, changed, lengths, persistent=3)[0] - y).abs().amax((0, 2))
    assert difference[0] == 0.0
    assert (difference[1:] > 1e-6).all()


@each_window
@each_persistent
@pytest.mark.parametrize("cached", [False, True])
@each_conv
def test_later_tokens_change_nothing_before_them(window, persistent, cached, conv_width):
    layer, x = build(window, conv_width=conv_width), some(2, 65, DIM)
    cache = layer(some(2, 20, DIM, seed=1), persistent=persistent)[1] if cached else None
    y, _ = layer(x, cache, persistent=persistent)
    for t in (1, 16, 17, 40, 64):
        changed = x.clone()
        changed[:, t:] = some(2, 65 - t, DIM, seed=2) * 100
        assert torch.equal(layer(changed, cache, persistent=persistent)[0][:, :t], y[:, :t])


@each_window
@each_conv
def test_rows_are_independent(window, conv_width):
    layer, x = build(window, conv_width=conv_width), some(3, 40, DIM)
    y, cache = layer(x)
    other = x.clone()
    other[1] += 1.0
    assert torch.equal(layer(other)[0][[0, 2]], y[[0, 2]])
    assert torch.equal(layer(other[:, :1], cache)[0][[0, 2]], layer(x[:, :1], cache)[0][[0, 2]])


@each_window
@pytest.mark.parametrize("T", [1, 9, 40])
@each_conv
def test_a_call_leaves_its_cache_as_it_was(window, T, conv_width):
    layer = build(window, conv_width=conv_width)
    _, cache = layer(some(2, 20, DIM))
    before = cache.clone()
    layer(some(2, T, DIM, seed=1), cache)
    assert_caches_close(cache, before, tol=0.0)


@each_conv
def test_an_inplace_ring_gives_the_same_and_is_written_without_gradients_only(conv_width):
    layer, x = build(5, conv_width=conv_width), some(2, 30, DIM)
    whole, _ = layer(x)
    _, cache = layer(x[:, :12])
    cache.inplace = True
    layer(x[:, 12:13], cache)
    key = cache.key
    with torch.no_grad():
        for t in range(12, 30):
            y, cache = layer(x[:, t : t + 1], cache)
            assert_close_rms(y, whole[:, t : t + 1], 1e-12)
    assert cache.key.data_ptr() == key.data_ptr()


@each_window
@each_conv
def test_a_look_without_use_cache_writes_nothing_and_inplace_caches_are_joined(window, conv_width):
    layer, x = build(window, conv_width=conv_width), some(2, 20, DIM)
    with torch.no_grad():
        _, cache = layer(x)
        cache.inplace = True
        _, cache = layer(x[:, :1], cache)
        before = cache.clone()
        y, none = layer(x[:, :1], cache, use_cache=False)
        assert none is None
        assert_caches_close(cache, before, 0.0)
        joined = AttentionCache.stack([cache.select([0]), layer(x[:1])[1]])
        assert not joined.inplace
        assert_close_rms(layer(x[:, :1], joined)[0][:1], y[:1], 1e-13)


@each_persistent
@each_conv
def test_an_inplace_cache_without_a_window_grows_by_steps_and_gives_the_same(persistent, conv_width):
    layer, x = build(None, conv_width=conv_width), some(2, persistent + 60, DIM)
    whole, end = layer(x, persistent=persistent)
    buffers = set()
    with torch.no_grad():
        _, cache = layer(x[:, : persistent + 5], persistent=persistent)
        cache.inplace = True
        start = persistent + 5
        for n in [1] * 30 + [7, 1, 1, 16]:
            y, cache = layer(x[:, start : start + n], cache)
            assert_close_rms(y, whole[:, start : start + n], 1e-12)
            buffers.add(cache.key.data_ptr())
            start += n
    assert len(buffers) < 10
    last, after = layer(x[:, :3], cache)  # with gradients nothing is written in place
    assert after.spare == 0
    assert_close_rms(layer(x[:, :3], cache)[0], last, 0.0)
    cache = cache.select([0, 1])
    cache.inplace = False
    assert_caches_close(cache, end)


@pytest.mark.parametrize("window", [2, 3, 16, 100, None])  # over a window of 1 softmax is 1, whatever q and k are
@each_persistent
@each_conv
def test_gradients_reach_every_parameter_and_agree_between_splits(window, persistent, conv_width):
    layer = build(window, kv_heads=1, conv_width=conv_width)
    x = some(2, persistent + 40, DIM).requires_grad_()
    weight = some(2, persistent + 40, DIM, seed=1)
    inputs = [x, *layer.parameters()]
    whole = torch.autograd.grad((layer(x, persistent=persistent, use_cache=False)[0] * weight).sum(), inputs)
    assert all(g.abs().max() > 0 for g in whole)
    for lengths in ([17, 1, 22], [1] * 40):
        split = torch.autograd.grad((run(layer, x, lengths, persistent)[0] * weight).sum(), inputs)
        for a, b in zip(split, whole):
            assert_close_rms(a, b, 1e-12)


def test_a_window_of_one_needs_no_rotary_but_every_parameter_of_values():
    layer, x = build(1), some(1, 8, DIM)
    y, _ = layer(x)
    value = (x @ layer.qkv.weight.T)[..., -HEADS * layer.head_dim :]
    assert_close_rms(y, value @ layer.out.weight.T, 1e-13)


def test_positions_go_on_in_the_cache_at_any_height():
    """Scores see distances alone: moving a cache and its position by ten million tokens changes no output."""
    layer, x, height = build(64), some(1, 30, DIM), 10**7
    near, _ = layer(torch.cat((torch.zeros(1, 44, DIM, dtype=f64), x), 1))
    _, k, v, _ = layer.project(x[:, :20], layer.angles(torch.arange(20).unsqueeze(0) + height, f64))
    ring = torch.zeros(2, 1, 64, *k.shape[2:], dtype=f64)  # the other slots: tokens of zeros, as above
    ring[:, :, (torch.arange(20) + height) % 64] = torch.stack((k, v)).detach()
    for lengths in ([10], [1] * 10):
        cache, outputs = AttentionCache(torch.tensor([height + 20]), ring[0], ring[1], window=64), []
        for part in x[:, 20:].split(lengths, 1):
            y, cache = layer(part, cache)
            outputs.append(y)
        assert_close_rms(torch.cat(outputs, 1), near[:, -10:], 1e-8)
        assert cache.position.item() == height + 30


def relative_change(a, b):
    return ((a - b).norm() / b.norm()).item()


@each_window
@each_persistent
@each_conv
def test_a_cache_survives_a_file(window, persistent, conv_width):
    layer, x = build(window, conv_width=conv_width), some(2, 40, DIM)
    _, cache = layer(x, persistent=persistent)
    loaded = AttentionCache.from_tensors(load(save(cache.tensors())), **cache.settings())
    assert_caches_close(loaded, cache, tol=0.0)
    assert torch.equal(layer(x, loaded)[0], layer(x, cache)[0])


def test_the_bytes_of_a_ring_do_not_depend_on_the_length():
    for conv_width, tail in ((0, 0), (4, 3)):
        layer = build(16, conv_width=conv_width)
        sizes = {layer(some(2, T, DIM), persistent=1)[1].nbytes for T in (1, 7, 63, 200)}
        assert sizes == {2 * 2 * 17 * DIM * 8 + 2 * tail * 3 * DIM * 8 + 2 * 8}


@each_window
@each_conv
def test_rows_are_chosen_repeated_forked_and_joined(window, conv_width):
    layer, x = build(window, conv_width=conv_width), some(3, 20, DIM)
    _, cache = layer(x)
    next_token = some(3, 1, DIM, seed=1)
    chosen = cache.select(torch.tensor([2, 0, 2]))
    y, _ = layer(next_token, chosen)
    for i, r in enumerate([2, 0, 2]):
        alone, _ = layer(next_token[i : i + 1], layer(x[r : r + 1])[1])
        assert_close_rms(y[i : i + 1], alone, 1e-12)
    joined = AttentionCache.stack([cache.select([2]), layer(x[:1, :7])[1]])
    y, _ = layer(next_token[:2], joined)
    assert_close_rms(y[1:], layer(next_token[1:2], layer(x[:1, :7])[1])[0], 1e-12)
    fork = cache.clone()
    fork.key.zero_()
    assert cache.key.abs().max() > 0
    single = cache.to(torch.float32)
    assert single.key.dtype == torch.float32 and single.position.dtype == torch.int64
    assert not layer(x, cache.detach())[1].detach().key.requires_grad


@each_window
@each_conv
def test_a_module_in_float64_stays_there_and_bfloat16_autocast_is_finite(window, conv_width):
    layer = build(window, conv_width=conv_width)
    y, cache = layer(some(2, 40, DIM))
    assert y.dtype == cache.key.dtype == f64
    single = layer.float()
    x = some(2, 40, DIM, dtype=torch.float32).requires_grad_()
    exact, _ = single(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, cache = single(x, persistent=2)
        assert len({t.dtype for t in cache.tensors().values()}) == 2  # positions, and one type of floats: files need it
        last, cache = single(x[:, :1], cache)
        more, cache = single(x, cache)
        plain, _ = single(x)
    assert relative_change(plain, exact) < 0.05
    (y.float().sum() + last.float().sum() + more.float().sum()).backward()
    assert all(t.isfinite().all() for t in (y, last, more, x.grad, *(p.grad for p in single.parameters())))
    assert single(x, cache)[0].isfinite().all()  # and goes on without autocast


@pytest.mark.parametrize(
    ("window", "persistent", "conv_width"), [(3, 0, 0), (16, 3, 0), (None, 3, 0), (16, 3, 4), (None, 0, 4)]
)
def test_the_training_path_compiles_whole(window, persistent, conv_width):
    torch._dynamo.reset()
    layer, x = build(window, conv_width=conv_width), some(2, 80, DIM)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for options in (dict(), dict(mask=prefix_mask([60, 80], 80))):
        y, _ = compiled(x, persistent=persistent, use_cache=False, **options)
        assert_close_rms(y, layer(x, persistent=persistent, use_cache=False, **options)[0], 1e-12)
        y.sum().backward()


@each_conv
def test_gradients_of_each_row_by_torch_func_are_those_of_autograd(conv_width):
    layer, x = build(4, conv_width=conv_width), some(3, 9, DIM)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, row):
        return torch.func.functional_call(layer, parameters, (row[None],), {"use_cache": False})[0].square().sum()

    rows = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for r in range(3):
        right = torch.autograd.grad(layer(x[r : r + 1], use_cache=False)[0].square().sum(), list(layer.parameters()))
        for name, grad in zip(parameters, right):
            assert_close_rms(rows[name][r], grad, 1e-12, name)


@pytest.mark.parametrize("window", [4, None])
def test_long_continuations_without_a_window_are_cut_into_affordable_masks(window, monkeypatch):
    layer, x = build(window), some(2, 50, DIM)
    whole, _ = layer(x)
    monkeypatch.setattr("mnemos.nn.attention.MASK_ELEMENTS", 700)
    assert_close_rms(run(layer, x, [10, 40])[0], whole, 1e-12)


def test_what_does_not_fit_is_refused_in_words():
    layer, x = build(4), some(2, 6, DIM)
    _, cache = layer(x, persistent=2)
    for message, call in [
        ("heads=5 must divide dim=12", lambda: Attention(12, 5, 4)),
        ("head_dim=3 must be even", lambda: Attention(12, 4, 4)),
        ("kv_heads=3 must divide heads=2", lambda: build(4, kv_heads=3)),
        ("window=0 must be >= 1", lambda: build(0)),
        ("conv_width=-1 must be >= 0", lambda: build(4, conv_width=-1)),
        ("x has shape", lambda: layer(x[..., :5])),
        ("x has shape", lambda: layer(x[:, :0])),
        ("mask has shape", lambda: layer(x, mask=torch.ones(2, 5, dtype=torch.bool))),
        ("mask has shape", lambda: layer(x, mask=torch.ones(2, 6))),
        ("persistent=7 must lie in 0..6", lambda: layer(x, persistent=7)),
        ("cache was begun with 2", lambda: layer(x, cache, persistent=1)),
        ("cache is of window=4", lambda: build(5)(x, cache)),
        ("cache has 2 batch rows", lambda: layer(x[:1], cache)),
        ("cache is a int", lambda: layer(x, 3)),
        ("cache has keys of shape", lambda: build(4, kv_heads=1)(x, cache)),
        (r"tail of shape None, but \(2, 3, 36\)", lambda: build(4, conv_width=4)(x, cache)),
        (r"tail of shape \(2, 2, 36\), but None", lambda: layer(x, build(4, conv_width=3)(x)[1])),
        ("the caches differ", lambda: AttentionCache.stack([layer(x)[1], build(4, conv_width=3)(x)[1]])),
        ("rows must lie in 0..1", lambda: cache.select([2])),
        ("rows must be a non-empty list", lambda: cache.select([])),
        ("stack needs at least one", lambda: AttentionCache.stack([])),
        ("the caches differ", lambda: AttentionCache.stack([cache, layer(x)[1]])),
        ("needs", lambda: AttentionCache.from_tensors({"key": x})),
        ("different numbers of batch rows", lambda: AttentionCache.from_tensors(
            dict(key=cache.key, value=cache.value, position=torch.zeros(3, dtype=torch.int64)), window=4)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
