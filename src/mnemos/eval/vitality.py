"""Vitality of a model's memories on long streams: the same text after more and more tokens of other text.

Shapes: B batch rows, T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..memory import MemoryState, NeuralMemory, measure_vitality
from ..memory.freeze import frozen_memory
from .model_adapter import Ids, LanguageModel, Past, state_bytes
from .recall import ProgressCallback
from .settings import EvalSettings


def vitality_suite(
    model: Any,
    tokenizer: Any,
    text: str | Ids,
    other: str | Ids,
    lengths: Sequence[int] = EvalSettings.stream_lengths,
    tokens: int = EvalSettings.stream_text,
    progress: ProgressCallback | None = None,
) -> list[dict[str, Any]]:
    """Read the first `tokens` tokens of `text` after 0, 10,000, 100,000 … tokens of `other`, which repeats if it is shorter.

    For each length: bits per token with the state carried from `other`, from a fresh state, and with no test-time learning
    (frozen); and after the text the vitality of the memories (`mnemos.memory.measure_vitality`): effective_rank, distance and relearning,
    what a chunk teaches them relative to a fresh memory. These are means over layers; layers: each one's.
    One pass over `other` serves all lengths; the state's size does not depend on them.

    >>> from mnemos.data.tasks import ByteTokenizer
    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("titans-lmm", hidden_size=32, num_hidden_layers=1, memory_heads=2))
    >>> rows = vitality_suite(model, ByteTokenizer(), "to be or not to be. " * 10, "so it goes. " * 9, [0, 300], tokens=200)
    >>> [row["length"] for row in rows], rows[0]["fresh"] == rows[1]["fresh"]
    ([0, 300], True)
    """
    lm = LanguageModel.of(model, tokenizer)
    memories = finite_memories(lm.model)
    if not memories:
        raise ValueError("vitality is not applicable: the model has no memory of fixed size that learns at test time")
    if not lengths or min(lengths) < 0:
        raise ValueError(f"lengths={list(lengths)} must be one or more numbers of tokens, 0 or more each")
    ids, stream = _ids(lm, text)[:tokens], _ids(lm, other)
    if len(ids) < 2:
        raise ValueError(f"vitality reads {len(ids)} tokens of the text, but needs at least 2")
    if not len(stream):
        raise ValueError("the other text has no tokens")
    told = progress or (lambda count: None)
    fresh = _bits(lm, ids, None, told)
    with frozen_memory(lm.model):
        frozen = _bits(lm, ids, None, told)
    rows, past, before = [], None, 0
    for length in sorted(set(lengths)):
        if length > before:
            past = lm.read(_counted(_repeated(stream, before, length), told), past)
        before = length
        with _watching(memories) as watched:
            carried = _bits(lm, ids, past, told)
        layers = [_measure(memories[name], seen) for name, seen in watched.items()]
        row: dict[str, Any] = {
            "length": length,
            "tokens": len(ids) - 1,
            "carried": carried,
            "fresh": fresh,
            "frozen": frozen,
        }
        row |= {key: _mean([layer[key] for layer in layers]) for key in layers[0]}
        row |= {"state_bytes": None if past is None else state_bytes(past.state)}
        rows.append(row | {"layers": layers})
    return rows


def work(lengths: Sequence[int], tokens: int) -> int:
    """Tokens that `vitality_suite` reads, as its progress counts them."""
    return max(lengths) + (len(set(lengths)) + 2) * tokens


def finite_memories(model: Any) -> dict[str, NeuralMemory]:
    """The memories of a model whose state has a fixed size, by name."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return {name: m for name, m in modules if isinstance(m, NeuralMemory) and not m.spec.is_kv_cache}


@dataclass
class _Seen:
    """Inputs (1, T, D) of a memory in its longest call, and its state after the last call."""

    inputs: Tensor | None = None
    after: MemoryState | None = None


@contextlib.contextmanager
def _watching(memories: dict[str, NeuralMemory]) -> Generator[dict[str, _Seen]]:
    """Record what each memory reads inside the block."""
    watched, handles = {}, []
    for name, memory in memories.items():
        seen = watched[name] = _Seen()

        def hook(module: nn.Module, args: tuple, output: tuple, seen: _Seen = seen) -> None:
            if seen.inputs is None or seen.inputs.shape[1] < args[0].shape[1]:
                seen.inputs = args[0]
            seen.after = output[1]

        handles.append(memory.register_forward_hook(hook))
    try:
        yield watched
    finally:
        for handle in handles:
            handle.remove()


def _measure(memory: NeuralMemory, seen: _Seen) -> dict[str, float]:
    assert seen.inputs is not None and seen.after is not None
    return measure_vitality(memory, seen.inputs, seen.after)


def _bits(lm: LanguageModel, ids: np.ndarray, past: Past | None, told: ProgressCallback) -> float:
    """Mean bits of all tokens but the first, which a fresh state does not predict."""
    losses = torch.cat(list(lm.losses(_counted([ids], told), past)))
    return float(losses[-(len(ids) - 1) :].double().mean()) / math.log(2)


def _counted(pieces: Iterable[np.ndarray], told: ProgressCallback, block: int = 2048) -> Iterator[np.ndarray]:
    for piece in pieces:
        for start in range(0, len(piece), block):
            yield piece[start : start + block]
            told(len(piece[start : start + block]))


def _repeated(ids: np.ndarray, start: int, stop: int) -> Iterator[np.ndarray]:
    """Tokens [start, stop) of a text that repeats."""
    while start < stop:
        inside = start % len(ids)
        piece = ids[inside : inside + stop - start]
        yield piece
        start += len(piece)


def _ids(lm: LanguageModel, text: str | Ids) -> np.ndarray:
    return np.asarray(lm.encode(text) if isinstance(text, str) else text, dtype=np.int64)


def _mean(values: list[float]) -> float:
    finite = [x for x in values if math.isfinite(x)]
    return sum(finite) / len(finite) if finite else math.nan
