"""Kind "stream": a model learns to predict text, then reads one long stream with its state carried from segment to segment, and fresh in each.

B segments, T tokens of a segment.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mnemos.data.embedded import documents
from mnemos.eval.vitality import finite_memories
from mnemos.memory import MemoryState, relearning
from mnemos.memory.freeze import frozen_memory
from mnemos.memory.vitality import lowest_rank, noise_like
from mnemos.models import MnemosForCausalLM
from mnemos.trials import train
from mnemos.trials.text import rows

from .models import config_of, trial_config

SEGMENT = 4000  # tokens after which a fresh state begins again
FRESH_ROWS = 8  # fresh segments read as one batch


@cache
def halves(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the embedded text to train on, and its last `tokens` bytes."""
    whole = np.frombuffer("".join(documents()).encode(), np.uint8).astype(np.int64)
    return whole[:-tokens], whole[-tokens:]


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """Bits per byte of the stream behind its first `late` tokens: `carried`, `fresh` every `SEGMENT` tokens, and `frozen`, without test-time
    learning. gain: fresh - carried, a mean over segments, with its standard error `gain_error`. rank@1000, rank@late: effective rank of the
    lowest map, the mean of all layers. relearning: what a chunk of noise teaches a memory after the stream, relative to a fresh one.
    """
    learn, stream = halves(cell["stream"])
    T, steps, seed = cell["length"], cell["steps"], cell["seed"]
    count = max(1, cell["tokens"] // T)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids = rows(learn, count, T, (seed + 1) * steps + step)
        return ids, ids

    torch.manual_seed(seed)
    model = MnemosForCausalLM(config_of(cell, vocab_size=256))
    found = train(model, trial_config(cell, batch))
    segments = torch.from_numpy(stream[: len(stream) // SEGMENT * SEGMENT]).view(-1, SEGMENT)
    late = cell["late"] // SEGMENT
    carried, ranks, alive = carried_bits(model, segments, late)
    fresh = fresh_bits(model, segments[late:])
    with frozen_memory(model):
        found["frozen"] = fresh_bits(model, segments[late:]).mean().item()
    gain = fresh - carried[late:]
    found |= {"carried": carried[late:].mean().item(), "fresh": fresh.mean().item(), "gain": gain.mean().item()}
    found |= {"gain_error": gain.std().item() / math.sqrt(len(gain)), "relearning": alive}
    return found | ranks


@torch.no_grad()
def carried_bits(model: MnemosForCausalLM, segments: Tensor, late: int) -> tuple[Tensor, dict[str, float], float]:
    """Bits of each segment (B, T) -> (B,), ranks after 1,000 tokens and after `late` segments, and relearning after the last."""
    memories, states, inputs = finite_memories(model), {}, {}

    def hook(name: str):
        def keep(module, given, made) -> None:
            inputs[name], states[name] = given[0], made[1]

        return keep

    handles = [memory.register_forward_hook(hook(name)) for name, memory in memories.items()]
    found, ranks = [], {}
    try:
        model(segments[:1, :1000], use_cache=True, logits_to_keep=1)
        ranks["rank@1000"] = _rank(states)
        past = None
        for number, ids in enumerate(segments.unsqueeze(1)):
            made = model(ids, past_key_values=past, use_cache=True)
            past = made.past_key_values
            found.append(_bits(made.logits, ids))
            if number + 1 == late:
                ranks["rank@late"] = _rank(states)
        ranks["rank@end"] = _rank(states)
        ratios = []
        for name, memory in memories.items():
            C = memory.spec.chunk_size
            state, rest = states[name], -int(states[name].position[0]) % C
            noise = noise_like(inputs[name], rest + 4 * C)
            state = memory.write(noise[:, :rest], state) if rest else state
            ratios.append(relearning(memory, noise[:, rest:], state).ratio)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(found), ranks, sum(ratios) / len(ratios)


@torch.no_grad()
def fresh_bits(model: MnemosForCausalLM, segments: Tensor) -> Tensor:
    """Bits of each segment (B, T), each from a fresh state: (B,)."""
    return torch.cat([_bits(model(ids, use_cache=False).logits, ids) for ids in segments.split(FRESH_ROWS)])


def _bits(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean bits of all tokens but the first: (B,)."""
    log_p = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return -log_p.double().mean(1) / math.log(2)


def _rank(states: dict[str, MemoryState]) -> float:
    return sum(map(lowest_rank, states.values())) / len(states)
