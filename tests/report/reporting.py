"""Small models, a text with everything that may go wrong in it, and the way back from a page to its data."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import torch

from mnemos.models import MnemosForCausalLM, presets

TEXT = (
    "so it goes, and so it went – naïve, was it?\n\tThe café of the senate <b>met</b> & spoke; </script> so it goes.\n"
    * 4
)
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "attention_window": 16,
    "segment_length": 16,
}
MEMORY = {"memory_heads": 2, "memory_chunk_size": 16}


def small_model(preset: str, **changes) -> MnemosForCausalLM:
    torch.manual_seed(0)
    fields = SMALL | (MEMORY if presets.PRESETS[preset].memory is not None else {}) | changes
    return MnemosForCausalLM(presets.config(preset, "nano", **fields)).eval()


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def unpack(packed: dict) -> np.ndarray:
    kind = "f32" if "f32" in packed else "i16"
    dtype = {"f32": "<f4", "i16": "<i2"}[kind]
    return np.frombuffer(base64.b64decode(packed[kind]), dtype).reshape(packed["shape"])
