"""`causality`: no logit depends on a later token, exactly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .exact import Exactness
from .probe import Probe
from .registry import Outcome, failed, register_check
from .subject import Subject

PLACES_WITH_STATE = 8
Read = Callable[[Subject, Tensor], Tensor]


@register_check(
    "causality", "no logit depends on a later token: exactly 0.0, at edges of chunks and inside them", ["calls"]
)
def causality(probe: Probe) -> Outcome:
    """Tokens from t on are replaced; the logits before t must keep every bit. The batch has one sequence, so that no other can interfere."""
    ids, exact, places = probe.ids(1), Exactness(probe), probe.positions()
    other, cut = probe.other(ids), probe.length // 3
    ways: list[tuple[str, int, Read, list[int]]] = [("in one call", 0, lambda model, x: model.logits(x), places)]
    if probe.own.has_state:
        behind = [t for t in probe.positions(PLACES_WITH_STATE) if t > cut]
        ways.append(
            ("with a cache", cut, lambda model, x: model.step(x[:, cut:], model.step(x[:, :cut])[1])[0], behind)
        )
    probe.expect(sum(len(chosen) for *_, chosen in ways))
    for name, start, read, chosen in ways:
        before: dict[Subject, Tensor] = {}
        for t in chosen:
            replaced = torch.cat([ids[:, :t], other[:, t:]], 1)

            def pair(model: Subject) -> tuple[Tensor, Tensor]:
                if model not in before:  # noqa: B023
                    before[model] = read(model, ids)  # noqa: B023
                return read(model, replaced)[:, : t - start], before[model][:, : t - start]  # noqa: B023

            worst = exact.change(pair)
            if worst:
                found, expected = pair(probe.own)
                moved = (found != expected)[0].any(-1).nonzero()
                i = start + int(moved[-1]) if len(moved) else start
                text = f"{name}, logits of token {i} change with tokens from {t} on, of {probe.length}"
                return failed(text, worst, 0.0, token=i, changed_from=t, length=probe.length)
            probe.tick()
    tested = ", ".join(f"{len(chosen)} {name}" for name, _, _, chosen in ways if chosen)
    missed = [size for size in probe.sizes if size >= probe.length]
    note = f"; {missed[0]} tokens of a window or chunk are not reached: --length {5 * missed[0] // 2}" if missed else ""
    return exact.outcome(f"positions: {tested}, of {probe.length} tokens{note}")
