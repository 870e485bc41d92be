"""Which earlier tokens a read resembles."""

from __future__ import annotations

import pytest
import torch

from mnemos.backends.torch.coefficients import gd_coefficients, window_matrix
from mnemos.memory import Gates, MemorySpec, scan
from mnemos.report.attention_map import Writes, coefficients, resemblance
from mnemos.report.spectrum import look, over_time


def gates_of(T: int, H: int, c: int, lag: bool) -> Writes:
    torch.manual_seed(1)
    lr, momentum, retain, gate = torch.rand(4, T, H, dtype=torch.float64)
    return Writes(lr, momentum, retain, gate, torch.rand(T, H, c, dtype=torch.float64) if lag else None)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("lag", [False, True])
def test_coefficients_are_those_of_the_engine(window, lag):
    T, H = 9, 2
    writes = gates_of(T, H, window, lag)
    spec = MemorySpec(key_dim=4, value_dim=4, structure="linear", window=window)
    found = torch.stack(list(coefficients(writes, spec)))  # T H T
    tiled = [x.mT.unsqueeze(0) for x in (writes.lr, writes.momentum, writes.retain)]  # 1 H T
    entries = torch.nn.functional.pad(writes.gate.mT.unsqueeze(0), (window - 1, 0))
    lags = None if writes.lag is None else writes.lag.transpose(0, 1).unsqueeze(0)
    C = gd_coefficients(*tiled, None, window_matrix(entries, lags, T, window)).C[0, :, 1:, window - 1 :]  # H T T
    torch.testing.assert_close(found.transpose(0, 1), C)


@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("window", [1, 4])
def test_weights_times_values_are_the_read_of_a_hebbian_memory_across_chunks(read, window):
    T, H, D = 23, 2, 4
    writes = gates_of(T, H, window, lag=False)
    spec = MemorySpec(
        key_dim=D, value_dim=D, structure="linear", objective="dot", window=window, chunk_size=8, read=read
    )
    q, k, v = torch.randn(3, 1, T, H, D, dtype=torch.float64)
    state = spec.initial_state([torch.zeros(H, D, D, dtype=torch.float64)], batch=1)
    gates = Gates(*(x.unsqueeze(0) for x in (writes.lr, writes.momentum, writes.retain, writes.gate)))
    y, _ = scan(q, k, v, gates, state, spec)
    C = torch.stack(list(coefficients(writes, spec)), 1)  # H T T
    w = C * (q[0].transpose(0, 1) @ k[0].transpose(0, 1).mT)
    torch.testing.assert_close(y[0].transpose(0, 1), w @ v[0].transpose(0, 1))


def test_the_tokens_kept_are_the_earlier_ones_of_the_largest_weight():
    T, H, D, count = 150, 2, 8, 3
    writes = gates_of(T, H, 1, lag=False)
    writes.retain = 0.9 + 0.1 * writes.retain
    spec = MemorySpec(key_dim=D, value_dim=D, structure="linear")
    q, k = torch.randn(2, T, H, D, dtype=torch.float64)
    found = resemblance(q, k, writes, spec, None, count)
    C = torch.stack(list(coefficients(writes, spec)), 1)
    w = C * torch.einsum("thd,ihd->hti", q, k)
    for t in (0, 1, 2, 70, 149):
        for h in range(H):
            order = sorted(range(t), key=lambda i: -abs(w[h, t, i]))[:count]
            assert found.token[1 + h, t].tolist()[: len(order)] == order
            assert found.weight[1 + h, t, : len(order)].tolist() == pytest.approx([w[h, t, i].item() for i in order])
            assert found.own[1 + h, t].item() == pytest.approx(w[h, t, t].item())
        whole = w[:, t].abs().mean(0)
        order = sorted(range(t), key=lambda i: -whole[i])[:count]
        assert found.token[0, t].tolist()[: len(order)] == order
    assert found.token[:, 0].eq(-1).all() and found.token[:, 2, 2].eq(-1).all()


def test_a_repeated_key_is_what_a_read_with_it_resembles():
    T, D = 40, 16
    torch.manual_seed(3)
    k = torch.nn.functional.normalize(torch.randn(T, 1, D), dim=-1)
    q = k.clone()
    q[30] = k[7]
    one = torch.ones(T, 1)
    spec = MemorySpec(key_dim=D, value_dim=D, structure="linear")
    found = resemblance(q, k, Writes(one, 0 * one, one, one, None), spec, None, 2)
    assert found.token[0, 30, 0] == 7 and found.weight[0, 30, 0].item() == pytest.approx(1.0)


def test_with_muon_nothing_counts_before_its_commit_and_parts_sum_to_the_rates():
    T, H = 10, 1
    writes = gates_of(T, H, 1, lag=False)
    writes.retain = torch.ones_like(writes.retain)
    spec = MemorySpec(key_dim=4, value_dim=4, rule="muon", chunk_size=4, commit_every=4)
    rows = list(coefficients(writes, spec))
    assert all(rows[t].abs().sum() == 0 for t in range(3))
    assert rows[3].sum().item() == pytest.approx(writes.lr[3].item())
    assert rows[9].sum().item() == pytest.approx((writes.lr[3] + writes.lr[7]).item())


def test_a_spectrum_has_norm_and_distance_of_every_head():
    start = torch.randn(2, 3, 5)
    found = over_time("map", (3, 5), [look(w, start, 2) for w in (start, start + 1)])
    torch.testing.assert_close(found.norm[0], start.flatten(1).norm(dim=-1))
    torch.testing.assert_close(found.moved, torch.tensor([[0.0, 0.0], [15**0.5, 15**0.5]]))
    torch.testing.assert_close(found.values, torch.linalg.svdvals(torch.stack([start, start + 1]))[..., :2])
