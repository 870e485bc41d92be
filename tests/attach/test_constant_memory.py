"""A conversation of any length takes constant memory with a window: the bytes of the state, and the memory of the process."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from tiny_models import attached

STATUS = Path("/proc/self/status")
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}  # 4 KB of keys and values per token


def resident() -> float:
    """MB of memory of this process, without what its allocator keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmRSS")) / 1024


@torch.no_grad()
def conversation(window: int | None, lengths: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Bytes of the state and MB of the process after each length, read in calls of up to 500 tokens."""
    model = attached(base=WIDE, window=window, memory={"preset": "deltanet", "heads": 2, "chunk_size": 50})
    cache, state, process = model.new_cache(), [], []
    for length in lengths:
        while cache.length < length:
            ids = torch.randint(3, 61, (1, min(500, length - cache.length)))
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        state.append(cache.nbytes)
        process.append(resident())
    return state, process


@pytest.mark.skipif(not STATUS.exists(), reason="reads /proc/self/status of Linux")
def test_with_a_window_100_000_tokens_take_the_memory_of_1_000():
    state, process = conversation(64, (1_000, 10_000, 30_000, 100_000))
    assert len(set(state)) == 1
    assert max(process) - process[0] < 8, process
    state, process = conversation(None, (1_000, 11_000))  # the measurement sees what full attention keeps: 40 MB
    assert state[1] - state[0] > 40e6 and process[1] - process[0] > 30
