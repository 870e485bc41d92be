"""Whatever calls a server makes for whatever rows: every row is what it would be alone. And what the folder may import."""

from __future__ import annotations

import subprocess
import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import f64, some

from helpers import assert_close_rms, randomise
from mnemos.nn import Attention

ROWS = 3
lengths = st.one_of(st.integers(0, 3), st.integers(0, 40))
schedules = st.lists(st.tuples(*[lengths] * ROWS).filter(any), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedules, st.sampled_from([1, 2, 5, 16, 70, None]), st.integers(0, 2), st.booleans())
def test_every_row_of_every_schedule_is_the_row_alone(calls, window, persistent, inplace):
    torch.manual_seed(0)
    layer = randomise(Attention(8, 2, window, kv_heads=1).double()).requires_grad_(False)
    rows = [some(1, persistent + sum(call[r] for call in calls), 8, seed=r) for r in range(ROWS)]
    cache, outputs, start = None, [[] for _ in rows], [0] * ROWS
    with torch.no_grad():
        for call in calls:
            counts = [n + (persistent if cache is None else 0) for n in call]
            x = torch.full((ROWS, max(counts), 8), float("nan"), dtype=f64)
            for r, n in enumerate(counts):
                x[r, :n] = rows[r][0, start[r] : start[r] + n]
                start[r] += n
            mask = torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1)
            y, cache = layer(x, cache, None if mask.all() else mask, persistent)
            cache.inplace = inplace
            assert y.isfinite().all()
            for r, n in enumerate(counts):
                outputs[r].append(y[r, :n])
        for r, row in enumerate(rows):
            if row.shape[1]:
                assert_close_rms(torch.cat(outputs[r]), layer(row, persistent=persistent)[0][0], 1e-12, f"row {r}")


def test_the_folder_needs_torch_and_the_memory_alone():
    code = "import sys, mnemos.nn; print([m for m in ('transformers', 'tokenizers', 'einops', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
