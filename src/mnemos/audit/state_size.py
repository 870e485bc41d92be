"""`state`: the bytes of the state after more and more tokens."""

from __future__ import annotations

from typing import Any

from .probe import Probe
from .registry import Outcome, failed, not_applicable, passed, register_check
from .states import state_bytes

DOUBLINGS = 3
SLACK = 1.1  # of bytes per token, from one length to the next


@register_check("state", "the bytes of the state against length: constant, or in proportion to it", ["calls"])
def state(probe: Probe) -> Outcome:
    model = probe.own
    if not model.has_state:
        return not_applicable("the model returns no state or cache")
    unit, limit = probe.length, model.max_length
    if limit is not None:
        unit = min(unit, limit >> DOUBLINGS)
    if unit < 2:
        return not_applicable(f"the model reads {limit} tokens alone, too few to see its state grow")
    lengths = [unit << n for n in range(DOUBLINGS + 1)]
    sizes, held, read = {}, None, 0
    probe.expect(1 << DOUBLINGS)
    while read < lengths[-1]:
        held = model.step(probe.ids(1, unit, seed=read), held)[1]
        read += unit
        if read in lengths:
            sizes[read] = state_bytes(held)
        probe.tick()
    rates = [(sizes[b] - sizes[a]) / (b - a) for a, b in zip(lengths, lengths[1:])]
    shown = ", ".join(f"{n:,} tokens {size:,} bytes" for n, size in sizes.items())
    promised = probe.settings.state if probe.settings.state != "auto" else promise(model.model, held)
    last = round(rates[-1], 3)
    if not any(rates):
        return passed(
            f"constant: {sizes[unit]:,} bytes at {unit:,} and at {lengths[-1]:,} tokens", 0.0, 0.0, bytes=sizes
        )
    if promised == "constant":
        return failed(f"a constant state is promised, but it grows: {shown}", last, 0.0, bytes=sizes)
    if rates[-1] == 0:
        return passed(f"constant in the end: {shown}", 0.0, None, bytes=sizes)
    if rates[-1] > SLACK * max(rates[0], 1e-9):
        return failed(f"it grows faster than the text: {shown}", last, rates[0], bytes=sizes)
    return passed(f"linear: {last:,.0f} bytes per token; {shown}", last, None, bytes=sizes)


def promise(model: Any, held: Any) -> str | None:
    """The growth that a model promises: "constant" if its state has is_kv_cache = False or is_windowed = True, or the model has_constant_state."""
    constant = getattr(held, "is_kv_cache", None) is False or getattr(held, "is_windowed", None) is True
    return "constant" if constant or getattr(model, "has_constant_state", None) is True else None
