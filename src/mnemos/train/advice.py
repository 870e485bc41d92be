"""Advice before a training starts: settings that have no effect, and rows too short for the memory to learn from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..memory import MemorySpec
from ..models import MnemosConfig
from .config import TrainConfig
from .hooks import AnyModel, gates

MIN_COMMITS = 4


def advice(config: TrainConfig, model: AnyModel) -> Iterator[str]:
    """One sentence for each problem with the settings of a run."""
    if config.loss.polarisation and not gates(model):
        yield (
            f"loss.polarisation={config.loss.polarisation:g} has no effect: no layer of this model has a gate between "
            "attention and memory with a value per token"
        )
    short = short_rows(config, model.config)
    if short:
        yield short


def short_rows(config: TrainConfig, model: Any) -> str | None:
    """`few_commits` of a run's rows; None if rows continue with the state of the previous ones."""
    if config.data.carry_state:
        return None
    return few_commits(model, config.data.seq_len, config.subject.remedies)


def few_commits(model: MnemosConfig, length: int, remedies: str) -> str | None:
    """A warning if sequences of `length` tokens hold fewer than four commits of the model's memory; else None.

    Gradients are taken at weights that change once per chunk, and rules such as Muon write once per commit: a sequence with few of
    them trains a memory that hardly ever reads its writes. remedies: the caller's words, in which {length} is a sufficient
    length and {smaller} a sufficiently small interval.

    >>> from mnemos.models import presets
    >>> few_commits(presets.config("titans-mag"), 256, "longer sequences") is None
    True
    >>> few_commits(presets.config("titans-mag"), 128, "use sequences of {length} tokens or {smaller}").partition(": ")[2]
    'use sequences of 256 tokens or memory_chunk_size=32'
    """
    if not model.has_memory:
        return None
    spec = model.memory_config.spec
    interval = commit_interval(spec)
    if length >= MIN_COMMITS * interval:
        return None
    count, most = length // interval, max(1, length // MIN_COMMITS)
    times = {0: "never commits", 1: "commits once"}.get(count, f"commits {count} times")
    if spec.commits and spec.commit_every:
        most = next(n for n in range(most, 0, -1) if spec.chunk_size % n == 0)
        smaller = f"memory_commit_every={most}"
    else:
        smaller = f"memory_chunk_size={most}"
    return (
        f"the memory {times} in a sequence of {length:,} tokens (its interval is {interval:,}), too rarely to learn from its writes: "
        f"{remedies.format(length=MIN_COMMITS * interval, smaller=smaller)}"
    )


def commit_interval(spec: MemorySpec) -> int:
    """Tokens between two changes of the weights: a commit, else a chunk; 1 for a memory that does not depend on chunks.

    >>> commit_interval(MemorySpec(key_dim=4, value_dim=4, rule="muon", chunk_size=64, commit_every=16))
    16
    """
    if spec.commits:
        return spec.commit
    return spec.chunk_size if spec.depends_on_chunking else 1
