"""`causality`: no logit depends on a later token, exactly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .probe import Probe, changes
from .registry import Outcome, failed, passed, register_check

PLACES_WITH_STATE = 8


@register_check(
    "causality", "no logit depends on a later token: exactly 0.0, at edges of chunks and inside them", ["calls"]
)
def causality(probe: Probe) -> Outcome:
    """Tokens from t on are replaced; the logits before t must keep every bit. One row, so that no other row can interfere."""
    model, ids = probe.own, probe.ids(1)
    other, places = probe.other(ids), probe.positions()
    ways: list[tuple[str, int, Callable[[Tensor], Tensor], list[int]]] = [("in one call", 0, model.logits, places)]
    if model.has_state:
        cut = probe.length // 3
        behind = [t for t in probe.positions(PLACES_WITH_STATE) if t > cut]
        ways.append(("with a cache", cut, lambda x: model.step(x[:, cut:], model.step(x[:, :cut])[1])[0], behind))
    missed = [size for size in probe.sizes if size >= probe.length]
    note = f"; {missed[0]} tokens of a window or chunk are not reached: --length {5 * missed[0] // 2}" if missed else ""
    for name, cut, read, chosen in ways:
        before = read(ids)
        for t in chosen:
            found = read(torch.cat([ids[:, :t], other[:, t:]], 1))
            worst = changes(found[:, : t - cut], before[:, : t - cut])
            if worst:
                moved = (found != before)[0, : t - cut].any(-1).nonzero()
                i = cut + int(moved[-1]) if len(moved) else cut
                text = f"{name}, logits of token {i} change with tokens from {t} on, of {probe.length}"
                return failed(text, worst, 0.0, token=i, changed_from=t, length=probe.length)
            probe.tick()
    tested = ", ".join(f"{len(chosen)} {name}" for name, _, _, chosen in ways if chosen)
    return passed(f"positions: {tested}, of {probe.length} tokens{note}", 0.0, 0.0, positions=places)
