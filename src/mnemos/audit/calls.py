"""`calls`: a call depends on its arguments alone; nothing stays in the model between calls."""

from __future__ import annotations

import torch

from .probe import Probe, changes
from .registry import Outcome, failed, passed, register_check


@register_check("calls", "the same call gives the same bits, whatever was called before it")
def calls(probe: Probe) -> Outcome:
    model, ids = probe.own, probe.ids(2)
    first = model.logits(ids)
    if not bool(torch.isfinite(first).all()):
        return failed("logits are not finite", float("inf"), 0.0)
    worst = changes(model.logits(ids), first)
    if worst:
        return failed(f"the same call twice differs by {worst:.2e}", worst, 0.0)
    model.logits(probe.other(ids))
    if model.has_state:
        _, state = model.step(probe.other(ids))
        model.step(ids[:, :1], state)
    worst = changes(model.logits(ids), first)
    if worst:
        return failed(f"after calls with other tokens the same call differs by {worst:.2e}", worst, 0.0)
    return passed("calls with other tokens in between change no bit", 0.0, 0.0)
