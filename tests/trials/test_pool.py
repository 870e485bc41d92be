"""Pieces of work in processes of their own."""

import torch

from mnemos.trials import run_all


def threads(n: int) -> dict:
    """What a worker does here: say how many threads torch has."""
    return {"n": n, "threads": torch.get_num_threads()}


def test_workers_keep_to_the_threads_of_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    assert [found["threads"] for _, found in run_all(threads, [(0,)], workers=1)] == [1]


def test_every_piece_has_its_result(monkeypatch):
    found = dict(run_all(threads, [(i,) for i in range(3)], workers=2))
    assert {i: result["n"] for i, result in found.items()} == {0: 0, 1: 1, 2: 2}
