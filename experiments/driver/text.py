"""Kind "text": a model learns to predict the bytes of a corpus, and is measured on bytes it has not seen. B rows, T tokens."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from mnemos.memory.freeze import frozen_memory, has_memory
from mnemos.memory.validation import NotFiniteError
from mnemos.models import MnemosForCausalLM
from mnemos.train.config import ScheduleConfig
from mnemos.train.hooks import GateWatch, gates, memories, memory_off, set_chunk_size
from mnemos.train.schedules import chunk_size
from mnemos.trials import train
from mnemos.trials.text import TEST_SEED, bits, corpus, rows

from .models import config_of, trial_config


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """bits: per byte of held-out text, all positions of T but the first.

    eval_chunks: also `bits@chunk<b>`, the same model read with other chunk sizes; `diverged` where its memory breaks at one. finish_chunk: the chunk of the last tenth of the steps.
    routing: also `beyond`, `beyond_unwritten` and `beyond_without`, bits of the positions beyond the attention window with the memory, with
    one in which nothing is written, and with silence in its place, and `gate`, `gate_spread`: mean and standard deviation of what the gates between attention and memory say.
    """
    learn, held_out = corpus(cell["corpus"])
    T, steps, seed = cell["length"], cell["steps"], cell["seed"]
    count = max(1, cell["tokens"] // T)
    schedule = ScheduleConfig(finish_chunk=cell.get("finish_chunk"), finish_share=0.1)
    torch.manual_seed(seed)
    model = MnemosForCausalLM(config_of(cell, vocab_size=256))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        size = chunk_size(schedule, step, steps)
        if size is not None:
            set_chunk_size(model, size)
        ids = rows(learn, count, T, (seed + 1) * steps + step)
        return ids, ids

    found = train(model, trial_config(cell, batch))
    test = rows(held_out, cell["examples"], T, TEST_SEED)
    found["bits"] = bits(model, test)
    if cell.get("routing"):
        found |= routing(model, test)
    trained_chunk = model.config.memory_config.chunk_size if model.config.has_memory else None
    for size in cell.get("eval_chunks", ()) if trained_chunk else ():
        set_chunk_size(model, size)
        found |= _bits_or_diverged(model, test, f"bits@chunk{size}")
    return found


def _bits_or_diverged(model: MnemosForCausalLM, test: Tensor, name: str) -> dict[str, float]:
    """A memory that learned its rates with small chunks may overshoot with large ones, until a later layer's gates are not finite."""
    try:
        found = bits(model, test)
    except NotFiniteError:
        found = math.nan
    return {name: found} if math.isfinite(found) else {"diverged": 1}


@torch.no_grad()
def routing(model: MnemosForCausalLM, ids: Tensor) -> dict[str, float]:
    """What the memory is worth beyond the window, and what the gates say."""
    window = model.config.attention_window
    found = {"beyond": bits(model, ids, window)}
    if has_memory(model):
        with frozen_memory(model):
            found["beyond_unwritten"] = bits(model, ids, window)
    if memories(model):
        with memory_off(model):
            found["beyond_without"] = bits(model, ids, window)
    if gates(model):
        watch = GateWatch(model)
        with contextlib.closing(watch):
            model(ids[:16], use_cache=False, logits_to_keep=1)
        seen = torch.cat([g.flatten() for g in watch.values.values()])
        found |= {"gate": seen.mean().item(), "gate_spread": seen.std().item()}
    return found
