"""Perplexity, speed and memory use by context length, up to millions of tokens, in one pass through the state."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .model_adapter import Ids, LanguageModel, state_bytes
from .recall import ProgressCallback

CONTEXT_LENGTHS = (512, 1024, 2048, 4096)


def context_length_scaling(
    model: Any,
    tokenizer: Any,
    text: str | Iterable[Ids],
    lengths: Sequence[int] = CONTEXT_LENGTHS,
    tail: int = 256,
    repeat: bool = False,
    progress: ProgressCallback | None = None,
) -> list[dict[str, Any]]:
    """For each length in tokens: perplexity of the text up to there and of its last `tail` tokens, tokens per second so far, bytes of the
    state, resident memory of the process.

    text: a string, or ids in pieces of any size. One pass serves all lengths, so the cost is that of the longest. A text that is too short
    raises an error; repeat=True repeats it, which is fine for speed and memory, but not for perplexity.

    >>> from mnemos.data.tasks import ByteTokenizer
    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("titans-lmm"))
    >>> rows = context_length_scaling(model, ByteTokenizer(), "to be or not to be. " * 10, [50, 150], tail=20)
    >>> [row["length"] for row in rows], rows[0]["state_bytes"] == rows[1]["state_bytes"]
    ([50, 150], True)
    """
    lm = LanguageModel.of(model, tokenizer)
    lengths = sorted(set(lengths))
    if not lengths or lengths[0] < 2 or tail < 1:
        raise ValueError(f"lengths={list(lengths)} must be at least 2 each, and tail={tail} at least 1")
    if lm.max_length is not None and lengths[-1] > lm.max_length:
        raise ValueError(f"lengths has {lengths[-1]}, but this model reads at most {lm.max_length} tokens")
    source = [lm.encode(text)] if isinstance(text, str) else text
    pieces = _until(_repeated(source) if repeat else source, lengths[-1])
    recent: list[np.ndarray] = []
    rows: list[dict[str, Any]] = []
    state, before, total, position, elapsed = None, None, 0.0, 0, 0.0
    for piece in _cut(lm.pieces_of(pieces), lengths):
        began = time.perf_counter()
        logits, state = lm.call(piece, state)
        log_p = logits[0].log_softmax(-1).cpu()
        after = log_p if before is None else np.concatenate([before, log_p.numpy()])
        targets = piece[0, 1:] if before is None else piece[0]
        losses = -np.asarray(after)[np.arange(len(targets)), targets.numpy()].astype(np.float64)
        elapsed += time.perf_counter() - began
        before = log_p[-1:].numpy()
        total += float(losses.sum())
        position += piece.shape[1]
        recent = _last([*recent, losses], tail)
        if progress is not None:
            progress(piece.shape[1])
        if position in lengths:
            last = np.concatenate(recent)
            rows.append(
                {
                    "length": position,
                    "loss": total / (position - 1),
                    "perplexity": math.exp(min(700.0, total / (position - 1))),
                    "tail_tokens": len(last),
                    "tail_perplexity": math.exp(min(700.0, float(last.mean()))),
                    "tokens_per_second": position / elapsed,
                    "state_bytes": state_bytes(state),
                    "resident_mb": resident_mb(),
                }
            )
    if position < lengths[-1]:
        raise ValueError(
            f"the text has {position} tokens, but lengths asks for {lengths[-1]}; give more, or repeat=True"
        )
    return rows


def resident_mb() -> float | None:
    """Resident memory of this process in MB, if the system reports it (Linux)."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        return None


def _repeated(pieces: Iterable[Ids]) -> Iterator[Ids]:
    kept = [np.asarray(piece) for piece in pieces]
    if not any(map(len, kept)):
        raise ValueError("the text has no tokens")
    while True:
        yield from kept


def _until(pieces: Iterable[Ids], count: int) -> Iterator[np.ndarray]:
    """The first `count` tokens."""
    for piece in pieces:
        piece = np.asarray(piece)[:count]
        yield piece
        count -= len(piece)
        if count == 0:
            return


def _cut(pieces, lengths: Sequence[int]):
    """The pieces, cut at the given lengths."""
    position = 0
    for piece in pieces:
        ends = [n - position for n in lengths if position < n < position + piece.shape[1]]
        for start, stop in zip([0, *ends], [*ends, piece.shape[1]]):
            yield piece[:, start:stop]
        position += piece.shape[1]


def _last(parts: list[np.ndarray], count: int) -> list[np.ndarray]:
    """The last `count` numbers of all parts."""
    return [np.concatenate(parts)[-count:]]
