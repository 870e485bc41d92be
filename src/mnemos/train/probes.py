"""Probes of the memory during training: gates, surprise, vitality, gain from learning at test time, a needle in a haystack.

Everything runs without gradients and leaves the model and its random numbers as they were.
Shapes: B batch, T time, H heads, C chunk.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..memory import MemoryState, NeuralMemory, measure_vitality, relearning
from ..memory.freeze import frozen_memory, has_memory
from ..memory.vitality import lowest_rank
from ..models.cache import MnemosCache
from .hooks import AnyModel, GateWatch, memories

Stats = dict[str, float]


def gate_statistics(g: Tensor) -> Stats:
    """Mean, standard deviation, minimum and maximum of gates in [0, 1], and the fractions near 0, 1 and 0.5.

    >>> gate_statistics(torch.tensor([0.0, 0.5, 1.0, 1.0]))["near_1"]
    0.5
    """
    g = g.detach().float()
    return {
        "mean": g.mean().item(),
        "std": g.std(correction=0).item(),
        "min": g.min().item(),
        "max": g.max().item(),
        "near_0": (g < 0.1).float().mean().item(),
        "near_1": (g > 0.9).float().mean().item(),
        "undecided": ((g > 0.4) & (g < 0.6)).float().mean().item(),
    }


@torch.no_grad()
def look_inside(model: AnyModel, call, batch: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Statistics of one forward pass over a batch, by layer.

    gate: the mix of attention and memory (with "convex" 1 is attention alone, with "additive" 1 is all of the memory).
    lr (as a fraction of its range), momentum, retain, token: the memory's own gates. surprise_before, surprise_after: the inner
    loss of the tokens of the last whole chunk, with the weights before and after they were written. relearning, effective_rank,
    distance: see `mnemos.memory.measure_vitality`.
    """
    found: dict[str, dict[str, Any]] = {}
    watch = GateWatch(model)
    handles = []
    for layer, memory in memories(model).items():
        if isinstance(memory, NeuralMemory):

            def hook(module, args, output, layer=layer):
                found[str(layer)] = _memory_numbers(module, args[0], args[1] if len(args) > 1 else None)

            handles.append(memory.register_forward_hook(hook))
    try:
        call(**_inputs(batch), use_cache=False, logits_to_keep=1)
    finally:
        watch.close()
        for handle in handles:
            handle.remove()
    for layer, g in watch.values.items():
        found.setdefault(str(layer), {})["gate"] = gate_statistics(g)
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def _memory_numbers(memory: NeuralMemory, x: Tensor, state: MemoryState | None) -> dict[str, Any]:
    gates = memory.gates(x, state or memory.initial_state(x.shape[0]), None, None)
    ceiling = memory.config.effective_max_lr
    numbers: dict[str, Any] = {"lr": gate_statistics(gates.lr / ceiling)}
    for name, g in (("momentum", gates.momentum), ("retain", gates.retain), ("token", gates.gate)):
        if g is not None:
            numbers[name] = gate_statistics(g)
    C, state = memory.spec.chunk_size, state or memory.initial_state(x.shape[0])
    first = (
        None if state.chunk_offset is None else -state.chunk_offset % C
    )  # index of the first token of the call that begins a chunk
    if first is not None and x.shape[1] >= first + C:
        end = first + (x.shape[1] - first) // C * C
        past, chunk = x[:, : end - C], x[:, end - C : end]
        state = memory.write(past, state) if past.shape[1] else state
        found = relearning(memory, chunk, state)
        numbers |= {"surprise_before": found.before.mean().item(), "surprise_after": found.after.mean().item()}
        numbers |= measure_vitality(memory, x, memory.write(chunk, state))
    return numbers


def carried_ranks(cache: MnemosCache) -> dict[str, Stats]:
    """Effective rank of the memories that training carries from batch to batch, by layer: of the row that has read most.

    carried_rank: see `lowest_rank`. carried_tokens: tokens that this row has read.
    """
    found = {}
    for layer, states in enumerate(cache.layers):
        for state in states.values():
            if isinstance(state, MemoryState) and state.weights:
                row = int(state.position.argmax())
                rank, tokens = lowest_rank(state.select([row])), int(state.position[row])
                found[str(layer)] = {"carried_rank": rank, "carried_tokens": tokens}
    return found


@torch.no_grad()
def learning_gain(model: AnyModel, call, batches: Iterable[dict[str, Tensor]], world) -> Stats | None:
    """The gain from learning at test time: perplexity with writes on, relative to perplexity with writes off.

    perplexity, perplexity_frozen: of the tokens beyond the attention window (of all tokens, if the model has no window), with memories that
    learn and with memories that stay at their initial weights W0. gain: 1 - perplexity / perplexity_frozen, negative if writing does harm.
    beyond: the window. None if the model has no memory that learns, or no text is that long.
    """
    if not has_memory(model):
        return None
    window = model.config.longest_attention
    totals = {"learning": 0.0, "frozen": 0.0}
    count = 0.0
    for batch in batches:
        labels = batch["labels"].clone()
        labels[:, : window + 1] = -100
        if "position_ids" in batch:
            labels[batch["position_ids"] <= window] = -100
        n = int((labels[:, 1:] != -100).sum())
        for name in totals:
            with frozen_memory(model) if name == "frozen" else contextlib.nullcontext():
                totals[name] += call(**_inputs(batch), labels=labels, num_items_in_batch=1, use_cache=False).loss.item()
        count += n
    learning, frozen, count = world.sum([totals["learning"], totals["frozen"], count])
    if not count:
        return None
    learning, frozen = math.exp(min(20.0, learning / count)), math.exp(min(20.0, frozen / count))
    return {"perplexity": learning, "perplexity_frozen": frozen, "gain": 1 - learning / frozen, "beyond": window}


@torch.no_grad()
def needle(call, tokenizer, haystack: Tensor, length: int, device, samples: int = 4, depths=(0.1, 0.5, 0.9)) -> Stats:
    """Score a needle in a haystack: a fact is inserted into a text at some depth and queried at the end; only the answer is scored.

    accuracy: fraction of the answer's tokens that are the argmax. exact: fraction of answers that are correct in every token.
    gain: increase of the answer's log-probability, in nats per token, over the same text with a fact about another number.
    haystack: (n,) token ids. The probe is one batch of samples x depths rows of `length` tokens, and one with the wrong fact.
    """
    draw = random.Random(0)
    right, wrong, answers = [], [], []
    for i in range(samples):
        number, other = (str(draw.randrange(10**4, 10**5)) for _ in range(2))
        question = tokenizer.encode(" The secret number is ")
        answer = tokenizer.encode(number)[-5:]
        for depth in depths:
            rows = []
            for told in (number, other):
                fact = tokenizer.encode(f" The secret number is {told}. ")
                room = max(1, length - len(fact) - len(question) - len(answer))
                start = (i * room) % max(1, len(haystack) - room)
                text = haystack[start : start + room].tolist()
                cut = int(depth * len(text))
                rows.append([*text[:cut], *fact, *text[cut:], *question, *answer])
            right.append(rows[0])
            wrong.append(rows[1])
            answers.append(len(answer))
    scores = [_answers(call, rows, answers, device) for rows in (right, wrong)]
    hits, likelihood = scores[0]
    _, other_likelihood = scores[1]
    return {
        "accuracy": sum(sum(row) / len(row) for row in hits) / len(hits),
        "exact": sum(all(row) for row in hits) / len(hits),
        "gain": sum(a - b for a, b in zip(likelihood, other_likelihood)) / len(likelihood),
        "length": length,
    }


def _answers(call, rows: list[list[int]], answers: list[int], device) -> tuple[list[list[bool]], list[float]]:
    """Whether each answer token of each batch row is the argmax, and the mean log-probability of each answer."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    keep = max(answers) + 1
    logits = (
        call(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=keep).logits.float().log_softmax(-1)
    )
    hits, likelihood = [], []
    for row, n in enumerate(answers):
        predicted, truth = logits[row, -n - 1 : -1], ids[row, -n:]
        hits.append((predicted.argmax(-1) == truth).tolist())
        likelihood.append(predicted.gather(-1, truth.unsqueeze(-1)).mean().item())
    return hits, likelihood


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: batch[key] for key in ("input_ids", "position_ids") if key in batch}
