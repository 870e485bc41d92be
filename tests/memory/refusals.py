"""What the tests of bad input share."""

from __future__ import annotations

import re

import pytest
import torch

from mnemos.memory import MemorySpec

B, T, H, D, E, WINDOW = 2, 6, 3, 4, 5, 3
SPEC = MemorySpec(D, E, structure="linear", chunk_size=4, window=WINDOW)


def refuses(words: str, call, state=None) -> None:
    """`call` raises a ValueError of one line that matches `words`; `state` keeps its tensors and their numbers."""
    tensors = {} if state is None else state.tensors()
    kept = {name: (x, x.clone()) for name, x in tensors.items() if x.device.type != "meta"}
    fields = None if state is None else (state.chunk_offset, state.spec)
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert re.search(words, message), message
    assert "\n" not in message and 10 < len(message) < 320, message
    for name, (x, copy) in kept.items():
        assert state.tensors()[name] is x and torch.equal(x, copy), f"{name} was changed by a refused call"
    assert fields is None or (state.chunk_offset, state.spec) == fields
