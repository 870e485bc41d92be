"""`SegmentAttention`: by its definition, in any split, for rows at different places of their segments."""

from __future__ import annotations

import pytest
import torch
from naive import f64, naive_segments, some
from safetensors.torch import load, save

from helpers import assert_close_rms, randomise
from mnemos.nn import SegmentAttention, SegmentCache

DIM, HEADS, L, T = 12, 2, 8, 29
CASES = {
    "plain": {},
    "longterm": dict(longterm=2),
    "persistent": dict(persistent=3),
    "both": dict(longterm=3, persistent=2),
    "grouped": dict(longterm=1, persistent=1, kv_heads=1, head_dim=4),
    "raw": dict(qk_norm=False, rope_theta=50.0),
    "conv": dict(conv_width=4),
    "conv, all": dict(conv_width=3, longterm=2, persistent=2, kv_heads=1),
}
each_case = pytest.mark.parametrize("case", CASES)


class Run:
    """A layer with a sequence, and the calls a block would make: cut where a segment ends."""

    def __init__(self, case: str, rows: int = 2, segment_len: int = L, seed: int = 0):
        options = dict(CASES[case])
        self.P = options.pop("persistent", 0)
        torch.manual_seed(0)
        self.layer = randomise(SegmentAttention(DIM, HEADS, segment_len, **options).double())
        self.x, self.retrieved = some(2, rows, self.P + T, DIM, seed=seed)
        self.longterm = some(rows, 40, self.layer.longterm, DIM, seed=seed + 1)

    def call(self, cache, lengths: list[int], keep_longterm: bool = True):
        """The next tokens of each row, `lengths` of them, padded to the right with NaN."""
        start = [0] * len(lengths) if cache is None else [self.P + p for p in cache.position.tolist()]
        lengths = [n + (self.P if cache is None else 0) for n in lengths]
        x = torch.full((len(lengths), max(lengths), DIM), float("nan"), dtype=f64)
        retrieved = x.clone()
        for r, (s, n) in enumerate(zip(start, lengths)):
            x[r, :n], retrieved[r, :n] = self.x[r, s : s + n], self.retrieved[r, s : s + n]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        segment = [max(0, s - self.P) // self.layer.segment_len for s in start]
        begins = [max(0, s - self.P) % self.layer.segment_len == 0 for s in start]
        longterm = None
        if self.layer.longterm and (keep_longterm or any(begins)):
            longterm = torch.stack([self.longterm[r, s] for r, s in enumerate(segment)])
        y, cache = self.layer(x, retrieved, longterm, cache, None if mask.all() else mask, persistent=self.P)
        assert y.isfinite().all()
        return [y[r, :n] for r, n in enumerate(lengths)], cache

    def all(self, calls, **options):
        cache, outputs = None, []
        for lengths in calls:
            lengths = [lengths] * len(self.x) if isinstance(lengths, int) else lengths
            y, cache = self.call(cache, lengths, **options)
            outputs.append(y)
        return [torch.cat([y[r] for y in outputs]) for r in range(len(self.x))], cache

    def naive(self, row: int) -> torch.Tensor:
        return naive_segments(self.layer, self.x[row], self.retrieved[row], self.longterm[row], self.P)


WHOLE = [8, 8, 8, 5]


def assert_caches_close(a: SegmentCache, b: SegmentCache, tol: float = 1e-12) -> None:
    assert a.settings() == b.settings() and torch.equal(a.position, b.position)
    assert_close_rms(a.key, b.key, tol, "key")
    assert_close_rms(a.value, b.value, tol, "value")
    if a.conv is not None:
        assert_close_rms(a.conv, b.conv, tol, "conv")


@each_case
def test_segment_attention_is_its_definition(case):
    run = Run(case)
    y, _ = run.all(WHOLE)
    for r in range(2):
        assert_close_rms(y[r], run.naive(r), 1e-12)


@each_case
def test_a_segment_of_one_token(case):
    run = Run(case, segment_len=1)
    y, _ = run.all([1] * T)
    assert_close_rms(y[0], run.naive(0), 1e-12)


@each_case
@pytest.mark.parametrize("keep_longterm", [True, False])
def test_any_split_is_the_same(case, keep_longterm):
    run = Run(case)
    whole, end = run.all(WHOLE)
    for calls in ([1] * T, [3, 5, 1, 7, 4, 4, 2, 3], [7, 1, 1, 7, 8, 5], [0, 8, 8, 8, 5]):
        calls = calls if run.P else [n for n in calls if n]
        y, cache = run.all(calls, keep_longterm=keep_longterm)
        for a, b in zip(y, whole):
            assert_close_rms(a, b, 1e-12, f"{calls}")
        assert_caches_close(cache, end)


@each_case
def test_rows_may_stand_at_different_places(case):
    run = Run(case, rows=3)
    calls = [
        [5, 0, 8],
        [1, 1, 1],
        [0, 4, 7],
        [2, 3, 8],
        [1, 1, 1],
        [7, 7, 1],
        [1, 1, 0],
        [7, 7, 3],
        [1, 1, 0],
        [4, 4, 0],
    ]
    y, cache = run.all(calls)
    assert cache.position.tolist() == [T, T, T]
    _, end = run.all(WHOLE)
    for r in range(3):
        assert_close_rms(y[r], run.naive(r), 1e-12, f"row {r}")
    assert_caches_close(cache, end)
    parts = SegmentCache.stack([cache.select([r]) for r in (2, 0, 1)])
    assert_caches_close(parts, cache.select(torch.tensor([2, 0, 1])), 0.0)


@each_case
@pytest.mark.parametrize("n", [1, 4])
def test_a_row_without_valid_tokens_stays_as_it_is_and_so_does_the_cache_given(case, n):
    run = Run(case)
    for before in ([8], [3]):
        _, cache = run.all(before)
        copy = cache.clone()
        longterm = some(2, run.layer.longterm, DIM, seed=9)
        x = some(2, n, DIM, seed=8)
        _, after = run.layer(x, x, longterm, cache, torch.zeros(2, n, dtype=torch.bool))
        assert_caches_close(after, cache, 0.0)
        run.layer(x, x, longterm, cache)
        assert_caches_close(cache, copy, 0.0)


@each_case
def test_later_tokens_and_what_was_retrieved_for_them_change_nothing_before(case):
    run = Run(case)
    for calls in ([8], [1] * 8, [3, 5]):
        y, _ = run.all(calls)
        for t in range(1, 8):
            other = Run(case)
            other.x[:, run.P + t :] += 10.0
            other.retrieved[:, run.P + t :] -= 10.0
            changed, _ = other.all(calls)
            for a, b in zip(changed, y):
                assert torch.equal(a[: run.P + t], b[: run.P + t])
                assert not torch.equal(a[run.P + t], b[run.P + t])


def test_a_segment_sees_nothing_of_the_one_before_but_the_persistent_tokens():
    run, other = Run("both"), Run("both")
    other.x[:, run.P : run.P + 8] += 1.0
    other.longterm[:, 0] += 1.0
    y, changed = run.all(WHOLE)[0], other.all(WHOLE)[0]
    assert torch.equal(y[0][run.P + 8 :], changed[0][run.P + 8 :])
    other.x[:, 1] += 1.0
    changed = other.all(WHOLE)[0]
    assert ((y[0][run.P + 8 :] - changed[0][run.P + 8 :]).abs().amax(-1) > 1e-6).all()


def test_the_convolution_crosses_segments_over_tokens_of_the_row_alone():
    """The first token of a segment is projected with the last ones before it; what was retrieved for them has no part in it."""
    run, other = Run("conv"), Run("conv")
    y = run.all(WHOLE)[0][0]
    other.x[:, 7] += 1.0
    changed = (other.all(WHOLE)[0][0] - y).abs().amax(-1)
    assert (changed[8:16] > 1e-6).all() and (changed[16:] == 0.0).all()
    other = Run("conv")
    other.retrieved[:, :8] += 1.0
    assert torch.equal(other.all(WHOLE)[0][0][8:], y[8:])


@each_case
def test_gradients_reach_every_parameter_and_input_and_agree_between_splits(case):
    def gradients(calls):
        run = Run(case)
        leaves = [run.x, run.retrieved, run.longterm]
        run.x, run.retrieved, run.longterm = (t.clone().requires_grad_() for t in leaves)
        y, _ = run.all(calls)
        weight = some(run.P + T, DIM, seed=5)
        leaves = [run.x, run.retrieved, *([run.longterm] if run.layer.longterm else []), *run.layer.parameters()]
        return torch.autograd.grad(sum((row * weight).sum() for row in y), leaves)

    whole = gradients(WHOLE)
    assert all(g.abs().max() > 0 for g in whole)
    for a, b in zip(gradients([3, 5, 1, 7, 1, 1, 6, 5]), whole):
        assert_close_rms(a, b, 1e-12)


@each_case
def test_a_cache_survives_a_file_and_keeps_its_size(case):
    run = Run(case)
    _, cache = run.all([8, 3])
    loaded = SegmentCache.from_tensors(load(save(cache.tensors())), **cache.settings())
    assert torch.equal(run.call(loaded, [1, 1])[0][0], run.call(cache, [1, 1])[0][0])
    assert len({run.all(calls)[1].nbytes for calls in ([1], [8], WHOLE)}) == 1


@pytest.mark.parametrize("case", ["both", "conv, all"])
def test_an_inplace_cache_gives_the_same(case):
    run = Run(case)
    whole, _ = run.all(WHOLE)
    with torch.no_grad():
        _, cache = run.all([1])
        cache.inplace = True
        key = cache.key.data_ptr()
        for t in range(1, T):
            y, cache = run.call(cache, [1, 1])
            assert_close_rms(y[1], whole[1][run.P + t : run.P + t + 1], 1e-12)
        before = cache.clone()
        x = some(2, 1, DIM)
        run.layer(x, x, None, cache, use_cache=False)
        assert_caches_close(cache, before, 0.0)
    assert cache.key.data_ptr() == key


@pytest.mark.parametrize("case", ["both", "conv, all"])
def test_bfloat16_autocast_is_finite_and_the_training_path_compiles_whole(case):
    run = Run(case)
    sizes = 10, 10, run.layer.longterm
    layer, x, r, lt = run.layer.float(), *(some(2, n, DIM, dtype=torch.float32) for n in sizes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, cache = layer(x, r, lt, persistent=2)
        z, cache = layer(x[:, :1], r[:, :1], lt, cache)
        w, cache = layer(x[:, :3], r[:, :3], None, cache)
    (y.float().sum() + z.float().sum() + w.float().sum()).backward()
    assert all(t.isfinite().all() for t in (y, z, w, *(p.grad for p in layer.parameters())))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, cache = compiled(x, r, lt, persistent=2)
    z, _ = compiled(x[:, 2:], r[:, 2:], lt, cache, use_cache=False)
    plain, cache = layer(x, r, lt, persistent=2)
    assert_close_rms(y, plain, 1e-5)
    assert_close_rms(z, layer(x[:, 2:], r[:, 2:], lt, cache)[0], 1e-5)


def test_what_does_not_fit_is_refused_in_words():
    run = Run("both")
    layer, x, lt = run.layer, some(2, 8, DIM), some(2, 3, DIM)
    _, cache = layer(x[:, :7], x[:, :7], lt, persistent=2)
    for message, call in [
        ("segment_len=0 must be >= 1", lambda: SegmentAttention(12, 2, 0)),
        ("retrieved has shape", lambda: layer(x, x[:, :3], lt)),
        ("longterm has shape", lambda: layer(x, x, lt[:, :1])),
        ("longterm is needed", lambda: layer(x, x)),
        ("9 tokens, but a segment has 8", lambda: layer(some(2, 9, DIM), some(2, 9, DIM), lt)),
        ("cross the end of their segment", lambda: layer(x[:, :4], x[:, :4], lt, cache)),
        ("cache was begun with 2", lambda: layer(x[:, :1], x[:, :1], lt, cache, persistent=1)),
        ("cache has 2 batch rows", lambda: layer(x[:1], x[:1], lt[:1], cache)),
        (r"cache has \(segment_len, longterm\)", lambda: Run("plain").layer(x[:, :1], x[:, :1], None, cache)),
        ("tail of shape None", lambda: Run("conv").layer(x[:, :1], x[:, :1], None, Run("plain").all([1])[1])),
        ("persistent=9 must lie", lambda: layer(x, x, lt, persistent=9)),
        ("mask has shape", lambda: layer(x, x, lt, mask=torch.ones(2, 3, dtype=torch.bool))),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
