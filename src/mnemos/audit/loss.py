"""`loss`: the loss that a model reports is that of the next token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .probe import Probe
from .registry import Outcome, failed, not_applicable, passed, register_check

SHIFTS = {0: "the token that was just read", 2: "the token after the next"}
TOLERANCE = 1e-3  # nats; losses are often computed in float32


@register_check("loss", "the loss that the model reports is that of the next token", ["calls"])
def loss(probe: Probe) -> Outcome:
    """Given labels equal to the ids, as transformers wants them: the shift to the next token is the model's own work."""
    model, ids = probe.wide, probe.ids(2)
    if not model.has_labels:
        return not_applicable("forward has no labels")
    with torch.no_grad():
        found = model.loss(ids)
    if found is None or found.numel() != 1:
        return not_applicable("the model reports no loss for labels")
    log_p = model.logits(ids).double().log_softmax(-1)

    def of(shift: int) -> float:
        targets = ids[:, shift:].to(log_p.device)
        return F.nll_loss(log_p[:, : ids.shape[1] - shift].flatten(0, 1), targets.flatten()).item()

    number = abs(found.item() - of(1))
    limit = max(TOLERANCE, probe.tolerance(model))
    if number <= limit:
        return passed(f"{found.item():.4f} nats, as computed from the logits", number, limit)
    kind = next((words for shift, words in SHIFTS.items() if abs(found.item() - of(shift)) <= limit), None)
    reason = f"it scores {kind}" if kind else f"the next token costs {of(1):.4f}"
    return failed(f"the model reports {found.item():.4f} nats, but {reason}", number, limit)
