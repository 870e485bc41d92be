"""`swap`: the state holds all that a sequence needs to continue."""

from __future__ import annotations

import torch

from .caching import NO_STATE
from .probe import Probe, difference
from .registry import Outcome, failed, not_applicable, passed, register_check


@register_check(
    "swap", "a sequence continues from the state that it is given, and from nothing else", ["cached", "batch"]
)
def swap(probe: Probe) -> Outcome:
    """Two sequences are read and their states exchanged: each must continue as the other one, with tokens of its own."""
    model, limit = probe.wide, probe.tolerance(probe.wide)
    if not model.has_state:
        return not_applicable(NO_STATE)
    ids, after = probe.ids(2), probe.ids(2, 4, seed=5)
    ids[1] = probe.other(ids)[1]

    def resume(rows: list[int], swapped: bool):
        state = model.step(ids[rows])[1]
        state = model.select(state, [1, 0]) if swapped else state
        if state is None:
            return None
        parts = []
        for token in after.split(1, 1):
            logits, state = model.step(token, state)
            parts.append(logits)
        return torch.cat(parts, 1)

    own, expected, found = resume([0, 1], False), resume([1, 0], False), resume([0, 1], True)
    if found is None or expected is None or own is None:
        return not_applicable(
            "the batch rows of its state cannot be exchanged: give the state a method reorder_cache or select"
        )
    matters = difference(own, expected)
    if matters <= limit:
        return failed(
            f"other states change the logits by {matters:.1e} alone: the state carries nothing", matters, limit
        )
    number = difference(found, expected)
    text = f"exchanged states move the logits by {matters:.1e} of their scale"
    if number > limit:
        return failed(f"{text}, but not to those of the other sequence: part of the state is elsewhere", number, limit)
    return passed(f"{text}, to those of the other sequence", number, limit, moved=matters)
