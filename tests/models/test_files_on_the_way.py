"""The files that a training step and a decoded token pass through are as many as docs/architecture.md says."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import pytest
import torch

import mnemos
from helpers import needs_kernel
from mnemos.models import MnemosForCausalLM, presets

PACKAGE = str(Path(mnemos.__file__).parent)
DOCS = Path(__file__).parents[2] / "docs" / "architecture.md"


def files_of(call) -> set[str]:
    """The files of the package whose functions `call` runs, on all threads: a backward pass has its own."""
    found = set()

    def profile(frame, event, argument):
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # ty: ignore[invalid-argument-type]
    return found


@needs_kernel
@pytest.mark.skipif(not DOCS.exists(), reason="the docs are not beside the tests")
@pytest.mark.parametrize("preset", ["titans-lmm", "titans-mag"])
def test_the_docs_count_the_files_on_the_way(preset):
    torch.manual_seed(0)
    model = MnemosForCausalLM(presets.config(preset, "nano", vocab_size=256))
    ids = torch.randint(256, (2, 128))

    def train():
        model(input_ids=ids, labels=ids).loss.backward()

    def decode():
        model(input_ids=ids[:, :1], past_key_values=past)

    train()
    trained = files_of(train)
    model.eval()
    with torch.no_grad():
        past = model(input_ids=ids, use_cache=True).past_key_values
        decode()
        decoded = files_of(decode)
    row = re.search(rf"^\| `{preset}` \| (\d+) \| (\d+) \|$", DOCS.read_text(), re.MULTILINE)
    assert row is not None
    assert (len(trained), len(decoded)) == (int(row[1]), int(row[2])), [*sorted(trained), "decoded:", *sorted(decoded)]
