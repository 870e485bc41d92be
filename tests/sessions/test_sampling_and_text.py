"""Choosing tokens, and showing them in whole characters."""

from __future__ import annotations

import random

import pytest
import torch

from mnemos.data import ByteTokenizer
from mnemos.sessions import Sampling, TextStream

TEXT = "naïve – 日本語 😀👩‍👩‍👧 e\u0301nd"


@pytest.mark.parametrize("data", [TEXT.encode() * 3, b"\xff" * 200 + b"a", b"ok \xf0\x9f", bytes(range(1, 256)) * 2])
def test_the_pieces_of_a_stream_are_the_text_and_never_end_inside_a_character(data):
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer.decode)
    pieces = [stream.push(byte) for byte in data]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(data)
    if data.startswith(TEXT.encode()):
        assert not any("\ufffd" in piece for piece in pieces)


def test_random_bytes_are_streamed_as_they_are_decoded():
    rng, tokenizer = random.Random(0), ByteTokenizer()
    for _ in range(50):
        data = bytes(rng.choice((0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80)) for _ in range(150))
        stream = TextStream(tokenizer.decode)
        assert "".join(stream.push(byte) for byte in data) + stream.finish() == tokenizer.decode(data)


def test_top_k_top_p_and_seed_choose_as_they_say():
    logits = torch.tensor([0.1, 3.0, 2.0, 1.0])
    assert Sampling().choose(logits, torch.Generator()) == 1
    drawn = lambda **options: [  # noqa: E731
        Sampling(temperature=1.0, seed=seed, **options).choose(logits, Sampling(seed=seed).generator())
        for seed in range(60)
    ]
    assert set(drawn(top_k=2)) == {1, 2} and set(drawn(top_p=0.5)) == {1} and set(drawn(top_k=1)) == {1}
    assert drawn() == drawn() and len(set(drawn())) >= 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 1.0},
        {"temperature": float("nan")},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"stop": [""]},
        {"stop": [3]},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)
