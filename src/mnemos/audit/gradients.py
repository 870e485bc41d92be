"""`gradients`: every trainable parameter has a gradient.

A factor that starts at 0 hides the parameters behind it for one step only: what has no gradient at first is looked at again
after a small step of those that have one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .probe import Probe
from .registry import Outcome, failed, not_applicable, passed, register_check
from .subject import Subject

TEXTS = 3
STEP = 1e-3
SHOWN = 4


@register_check("gradients", "every trainable parameter has a gradient, at once or after one step", ["calls"])
def gradients(probe: Probe) -> Outcome:
    model = probe.wide
    named = {n: p for n, p in model.model.named_parameters() if p.requires_grad} if model.parameters() else {}
    if not named:
        return not_applicable("no parameter is trainable")
    with restored(named.values()):
        found = _gradients(probe, model, named)
        if not found:
            hint = "; if the memory writes only certain texts, --text FILE gives it one" * (probe.settings.text is None)
            return failed(f"no logit has a gradient{hint}", float(len(named)), 0.0, parameters=list(named))
        missing = [name for name in named if name not in found]
        if missing:
            with torch.no_grad():
                for name, gradient in found.items():
                    named[name] -= STEP * gradient.sign()
            later = _gradients(probe, model, named)
            missing = [name for name in missing if name not in later]
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        text = f"{len(missing)} of {len(named)} parameters have no gradient: {', '.join(missing[:SHOWN])}{more}"
        return failed(text, float(len(missing)), 0.0, parameters=missing)
    return passed(f"{len(named)} parameters, each with a gradient", 0.0, 0.0)


def _gradients(probe: Probe, model: Subject, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients of the next-token loss that are not 0, by name; of several texts, until none is missing."""
    found: dict[str, Tensor] = {}
    for seed in range(TEXTS):
        ids = probe.texts(seed)
        with torch.enable_grad():
            logits = model.differentiable_logits(ids)
            if not logits.requires_grad:
                return {}
            targets = ids[:, 1:].to(logits.device).flatten()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
            new = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        found |= {name: g for name, g in zip(named, new) if g is not None and bool(g.any()) and name not in found}
        probe.tick()
        if len(found) == len(named):
            break
    return found


@contextlib.contextmanager
def restored(parameters) -> Generator[None]:
    """Undo every change of the parameters at the end of the block."""
    kept = [(p, p.detach().clone()) for p in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in kept:
                p.copy_(before)
