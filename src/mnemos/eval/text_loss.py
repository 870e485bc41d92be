"""Perplexity over all tokens, by position and by context length; streamed through the state or in windows.

Shapes: T tokens of a document.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..memory.freeze import frozen_memory
from .model_adapter import LanguageModel

MEMORY_MODES = ("learning", "frozen")


@dataclass
class Perplexity:
    """Number of predicted tokens, their bytes, mean loss in nats, and derived measures. by_position: the same for tokens preceded by
    [start, stop) tokens of their document."""

    tokens: int
    bytes: int
    loss: float
    perplexity: float
    bits_per_token: float
    bits_per_byte: float
    by_position: list[dict[str, float]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def perplexity(
    model: Any,
    tokenizer: Any,
    texts: str | Iterable[str],
    context: int | None = None,
    stride: int | None = None,
    memory: str = "learning",
    progress: Callable[[int], object] | None = None,
) -> Perplexity:
    """Perplexity over all tokens of all texts, with equal weights; texts are independent.

    context None: a text is streamed through the state from its first token to its last. context n: windows of n tokens, moved by `stride`
    (default n/2) and each from a new state; only tokens that are new in a window count. A model that cannot read a whole text gets windows
    of its maximum length. memory: "learning", or "frozen" for no test-time learning.
    The token in front of a text is the tokenizer's bos or eos token; without one, the first token is not predicted.

    >>> from mnemos.data.tasks import ByteTokenizer
    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("titans-lmm"))
    >>> perplexity(model, ByteTokenizer(), ["some text", "and another"]).tokens
    20
    """
    lm = LanguageModel.of(model, tokenizer)
    texts = [texts] if isinstance(texts, str) else texts
    sums = Sums()
    with _memory(lm, memory):
        for text in texts:
            ids = np.asarray(lm.encode(text), dtype=np.int64)
            sums.bytes += len(text.encode("utf-8"))
            if lm.prefix is None and len(ids):
                sums.bytes -= _first_bytes(lm, text, ids)
            for start, losses in document_losses(lm, ids, context, stride):
                sums.add(start, losses)
                if progress is not None:
                    progress(len(losses))
    return sums.result()


def document_losses(
    lm: LanguageModel, ids: np.ndarray, context: int | None = None, stride: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Losses of a document's tokens in order, in pieces: (position of the first token, losses)."""
    if len(ids) == 0:
        return
    head = [] if lm.prefix is None else [lm.prefix]
    if context is None and lm.max_length is not None and len(ids) + len(head) > lm.max_length:
        context = lm.max_length
    position = 1 - len(head)
    if context is None:
        for losses in lm.losses([np.asarray(head, dtype=np.int64), ids]):
            yield position, losses
            position += len(losses)
        return
    whole = np.concatenate([np.asarray(head, dtype=np.int64), ids])
    for start, new, stop in windows(len(whole), context, stride or max(1, context // 2)):
        found = torch.cat(list(lm.losses([whole[start:stop]])) or [torch.zeros(0)])
        yield position, found[len(found) - (stop - new) :]
        position += stop - new


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows (start, new, stop): predictions of [new, stop) count, made from [start, stop-1), at most `context` tokens.
    Each of 1 .. length-1 counts once. stride = context corresponds to "rolling" in lm-evaluation-harness.

    >>> list(windows(10, 4, 2))
    [(0, 1, 5), (2, 5, 7), (4, 7, 9), (5, 9, 10)]
    """
    if not 1 <= stride <= context:
        raise ValueError(f"stride={stride} must lie between 1 and context={context}")
    new = 1
    while new < length:
        stop = min(length, context + 1 if new == 1 else new + stride)
        yield max(0, stop - 1 - context), new, stop
        new = stop


def perplexity_by_context(
    model: Any,
    tokenizer: Any,
    text: str,
    contexts: Sequence[int],
    tokens: int | None = None,
    memory: str = "learning",
) -> list[dict[str, float]]:
    """Perplexity of the same tokens at different context lengths: the last `tokens` (default: all that are preceded by the longest
    context), each with between half of the context and all of it. memory: as in `perplexity`."""
    lm = LanguageModel.of(model, tokenizer)
    ids = np.asarray(lm.encode(text), dtype=np.int64)
    longest = max(contexts)
    first = longest if tokens is None else max(longest, len(ids) - tokens)
    if first >= len(ids):
        raise ValueError(f"the text has {len(ids)} tokens, but the longest context of {longest} leaves none to predict")
    rows = []
    for context in contexts:
        if context < 1:
            raise ValueError(f"contexts has {context}, but a context is at least 1 token")
        total, step = 0.0, max(1, (context + 1) // 2)
        with _memory(lm, memory):
            for new in range(first, len(ids), step):
                stop = min(len(ids), new + step)
                found = torch.cat(list(lm.losses([ids[new + step - 1 - context : stop]])))
                total += float(found[len(found) - (stop - new) :].double().sum())
        mean = total / (len(ids) - first)
        rows.append({"context": context, "tokens": len(ids) - first, "loss": mean, "perplexity": _exp(mean)})
    return rows


class Sums:
    """Sums of losses in float64: over all tokens, and by position between powers of two."""

    def __init__(self) -> None:
        self.tokens, self.bytes, self.loss = 0, 0, 0.0
        self.places: dict[int, list[float]] = {}

    def add(self, start: int, losses: Tensor) -> None:
        losses = losses.double()
        self.tokens += len(losses)
        self.loss += float(losses.sum())
        place = np.frexp(np.maximum(np.arange(start, start + len(losses)), 31) // 32 * 32)[1]
        for bucket in np.unique(place):
            chosen = losses[torch.from_numpy(place == bucket)]
            entry = self.places.setdefault(int(bucket), [0, 0.0])
            entry[0] += len(chosen)
            entry[1] += float(chosen.sum())

    def result(self) -> Perplexity:
        if self.tokens == 0:
            raise ValueError("there is no token to predict; give a longer text")
        mean = self.loss / self.tokens
        rows = []
        for bucket, (count, total) in sorted(self.places.items()):
            start = 0 if bucket == 0 else 2 ** (bucket - 1)
            rows.append(
                {
                    "start": start,
                    "stop": max(32, 2**bucket),
                    "tokens": count,
                    "loss": total / count,
                    "perplexity": _exp(total / count),
                }
            )
        bits = self.loss / math.log(2)
        return Perplexity(
            self.tokens, self.bytes, mean, _exp(mean), bits / self.tokens, bits / max(1, self.bytes), rows
        )


def _memory(lm: LanguageModel, memory: str) -> contextlib.AbstractContextManager:
    if memory not in MEMORY_MODES:
        raise ValueError(f"memory={memory!r} is unknown; choose one of {', '.join(MEMORY_MODES)}")
    return frozen_memory(lm.model) if memory == "frozen" else contextlib.nullcontext()


def _first_bytes(lm: LanguageModel, text: str, ids: np.ndarray) -> int:
    """Bytes of the first token: 1 if every token is a byte, which alone may not decode."""
    return 1 if len(ids) == len(text.encode("utf-8")) else len(lm.decode(ids[:1].tolist()).encode("utf-8"))


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
