"""`QKProjection`: chunks are the recurrence, which is the definition; any split; every part learns."""

from __future__ import annotations

import pytest
import torch
from naive import f64, naive_qk_projection, some
from safetensors.torch import load, save

from helpers import assert_close_rms, randomise
from mnemos.nn import QKCache, QKProjection

DIM, HEADS, T = 12, 2, 65
CASES = {
    "sum": {},
    "per key": dict(normalise="per_key"),
    "bare": dict(persistent=0, decay=None, gate_hidden=None),
    "bare per key": dict(persistent=0, decay=None, gate_hidden=None, normalise="per_key"),
    "window": dict(window=7),
    "window 1": dict(window=1, normalise="per_key"),
    "long window": dict(window=100, decay=None),
    "fast decay": dict(decay=1e-8, chunk_size=64),
    "head dim": dict(head_dim=5, window=20, normalise="per_key", gate_hidden=None),
}
each_case = pytest.mark.parametrize("case", CASES)


def build(case: str, **more) -> QKProjection:
    torch.manual_seed(0)
    return randomise(QKProjection(DIM, HEADS, **(dict(persistent=3, chunk_size=16) | CASES[case] | more)).double())


def run(layer, x, lengths):
    cache, outputs = None, []
    for part in x.split(lengths, 1):
        y, cache = layer(part, cache)
        outputs.append(y)
    return torch.cat(outputs, 1), cache


def assert_caches_close(a: QKCache, b: QKCache, tol: float = 1e-12) -> None:
    left, right = a.tensors(), b.tensors()
    assert left.keys() == right.keys() and torch.equal(a.position, b.position)
    for name in left:
        assert_close_rms(left[name], right[name], tol, name)


@each_case
@pytest.mark.parametrize("n", [1, 7, 33])
def test_the_projection_is_its_definition(case, n):
    layer = build(case)
    q, k = some(2, 2, n, HEADS, layer.head_dim)
    gate = some(2, n, HEADS, seed=1).sigmoid()
    y, _ = layer.project(q, k, gate)
    for r in range(2):
        assert_close_rms(y[r], naive_qk_projection(layer, q[r], k[r], gate[r]), 1e-12)
    ones, _ = layer.project(q, k)
    assert_close_rms(ones[0], naive_qk_projection(layer, q[0], k[0], torch.ones(n, HEADS, dtype=f64)), 1e-12)


@each_case
def test_any_split_and_any_chunk_size_is_the_same(case):
    layer, x = build(case), some(3, T, DIM)
    whole, end = layer(x)
    for lengths in ([1] * T, [1, 7, 57], [63, 1, 1], [16, 16, 33]):
        y, cache = run(layer, x, lengths)
        assert_close_rms(y, whole, 1e-12, f"{lengths}")
        assert_caches_close(cache, end)
    layer.chunk_size = 5
    assert_close_rms(layer(x)[0], whole, 1e-12)


@each_case
def test_ragged_rows_are_the_rows_alone(case):
    layer = build(case)
    calls = [[5, 0, 20], [1, 1, 1], [0, 1, 1], [7, 33, 0], [1, 0, 1], [40, 2, 19]]
    rows = [some(1, sum(c[r] for c in calls), DIM, seed=r) for r in range(3)]
    cache, outputs, start = None, [[] for _ in rows], [0] * 3
    for call in calls:
        x = torch.full((3, max(call), DIM), float("nan"), dtype=f64)
        for r, n in enumerate(call):
            x[r, :n] = rows[r][0, start[r] : start[r] + n]
            start[r] += n
        mask = torch.arange(max(call)) < torch.tensor(call).unsqueeze(1)
        y, cache = layer(x, cache, mask)
        assert y.isfinite().all()
        for r, n in enumerate(call):
            outputs[r].append(y[r, :n])
    ends = []
    for r, row in enumerate(rows):
        y, end = layer(row)
        assert_close_rms(torch.cat(outputs[r]), y[0], 1e-12)
        ends.append(end)
    assert_caches_close(cache, QKCache.stack(ends))
    assert_caches_close(cache.select([2, 0]), QKCache.stack([ends[2], ends[0]]))


@each_case
def test_later_tokens_change_nothing_before_and_the_window_is_exact(case):
    layer, x, t = build(case), some(1, T, DIM), 20
    y, _ = layer(x)
    changed = x.clone()
    changed[:, t:] += 10.0
    assert torch.equal(layer(changed)[0][:, :t], y[:, :t])
    if layer.window is not None and layer.window < 40:
        changed = x.clone()
        changed[:, t] += 10.0
        difference = (layer(changed)[0] - y).abs().amax((0, 2))
        assert (difference[t : t + layer.window] > 1e-9).all() and (difference[t + layer.window :] == 0.0).all()


@each_case
def test_gradients_reach_every_parameter_and_agree_between_splits(case):
    layer, x = build(case), some(2, T, DIM).requires_grad_()
    weight = some(2, T, DIM, seed=1)
    names, parameters = zip(*layer.named_parameters())
    whole = torch.autograd.grad((layer(x)[0] * weight).sum(), [x, *parameters], materialize_grads=True)
    for name, g in zip(("x", *names), whole):
        if not (layer.window == 1 and name == "decay_offset"):  # a window of one token has nothing to decay
            assert g.isfinite().all() and g.abs().max() > 0, name
    for lengths in ([1, 7, 57], [1] * T):
        split = torch.autograd.grad(
            (run(layer, x, lengths)[0] * weight).sum(), [x, *parameters], materialize_grads=True
        )
        for name, a, b in zip(("x", *names), split, whole):
            assert_close_rms(a, b, 1e-11, name)


@each_case
def test_a_cache_survives_a_file_keeps_its_size_and_its_type(case):
    layer, x = build(case), some(2, T, DIM)
    y, cache = layer(x)
    loaded = QKCache.from_tensors(load(save(cache.tensors())), **cache.settings())
    assert torch.equal(layer(x, loaded)[0], layer(x, cache)[0])
    assert len({layer(x[:, :n])[1].nbytes for n in (1, 7, 65)}) == 1
    assert y.dtype == f64 and all(t.dtype == f64 for n, t in cache.tensors().items() if n != "position")
    copy = cache.clone()
    layer(x[:, :1], cache)
    layer(x, cache)
    assert_caches_close(cache, copy, 0.0)


def test_normalised_by_the_sum_a_projection_never_lengthens():
    layer = build("sum")
    q, k = some(2, 2, 65, HEADS, 6)
    y, _ = layer.project(q, k)
    assert (y.norm(dim=-1) <= q.norm(dim=-1)).all()


@pytest.mark.parametrize("case", ["sum", "window"])
def test_bfloat16_autocast_is_finite_and_the_training_path_compiles_whole(case):
    layer, x = build(case).float(), some(2, T, DIM, dtype=torch.float32)
    exact, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, cache = layer(x)
        z, cache = layer(x[:, :1], cache)
    assert all(t.dtype == torch.float32 for n, t in cache.tensors().items() if n != "position")
    assert ((y.float() - exact).norm() / exact.norm()).item() < 0.05
    (y.float().sum() + z.float().sum()).backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    torch._dynamo.reset()
    y, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, use_cache=False)
    assert_close_rms(y, exact, 1e-5)


def test_what_does_not_fit_is_refused_in_words():
    layer, x = build("sum"), some(2, 5, DIM)
    _, cache = layer(x)
    for message, call in [
        ("heads=5 must divide", lambda: QKProjection(12, 5)),
        ("normalise='max'", lambda: build("sum", normalise="max")),
        ("window=0", lambda: build("sum", window=0)),
        ("decay=1.5", lambda: build("sum", decay=1.5)),
        ("chunk_size=0", lambda: build("sum", chunk_size=0)),
        ("x has shape", lambda: layer(x[0])),
        ("mask has shape", lambda: layer(x, mask=torch.ones(2, 5))),
        ("cache has 2 batch rows", lambda: layer(x[:1], cache)),
        ("cache belongs to another layer", lambda: build("window")(x, cache)),
        ("cache is a str", lambda: layer(x, "cache")),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
