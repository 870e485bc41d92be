"""`memory`: switching a memory off must change the logits. Only logits count, not what a model reports about its memory.

A model of one's own joins in by a method `knock_out(what)`, a context manager inside which nothing is written ("writes"), nothing is
read ("reads") or every batch row reads the memory of the next one ("swap"); `knock_outs` names those that it has (default: writes, reads).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from .probe import Probe, difference
from .registry import Outcome, failed, not_applicable, passed, register_check

Switch = Callable[[], contextlib.AbstractContextManager]
MEANING = {
    "writes": "with nothing written",
    "reads": "with nothing read",
    "swap": "with the memories of two sequences exchanged",
}


def knock_outs(model: Any) -> dict[str, Switch]:
    """The ways in which the memory of a model can be switched off, by name; empty if it has no memory, or none that can be.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("titans-mag", num_hidden_layers=1))
    >>> list(knock_outs(model))
    ['writes', 'reads']
    """
    from ..attach import AttachedForCausalLM, MemoryControl
    from ..attach.control import KNOCK_OUTS
    from ..eval.freeze_memory import frozen_memory, has_memory
    from ..models import MnemosForCausalLM
    from ..train.hooks import memory_off

    if isinstance(model, AttachedForCausalLM):
        control: MemoryControl = model.memory
        return {what: lambda what=what: control.knock_out(what) for what in KNOCK_OUTS}
    if isinstance(model, MnemosForCausalLM) and has_memory(model):
        return {"writes": lambda: frozen_memory(model), "reads": lambda: memory_off(model)}
    own = getattr(model, "knock_out", None)
    if callable(own):
        return {what: lambda what=what: own(what) for what in getattr(model, "knock_outs", ("writes", "reads"))}
    if isinstance(model, nn.Module) and has_memory(model):  # a layer of ours in a stranger's model
        return {"writes": lambda: frozen_memory(model)}
    return {}


@register_check(
    "memory",
    "switching the memory off changes the logits: nothing written, nothing read, memories exchanged",
    ["batch"],
)
def memory(probe: Probe) -> Outcome:
    model, limit = probe.wide, probe.tolerance(probe.wide)
    switches = knock_outs(model.model)
    if not switches:
        return not_applicable("no memory is known that could be knocked out: give the model a method knock_out(what)")
    ids = probe.texts()
    if probe.settings.text is None:
        ids[1] = probe.other(ids)[1]
    normal, found = model.logits(ids), {}
    for what, switch in switches.items():
        with switch():
            found[what] = difference(model.logits(ids), normal)
        probe.tick()
    after = difference(model.logits(ids), normal)
    dead = [what for what, number in found.items() if number <= limit]
    least = min(found.values())
    if dead:
        numbers = ", ".join(f"{MEANING.get(what, what)} by {found[what]:.1e}" for what in dead)
        zero = "; its gates are 0, as before training" if _gates_are_zero(model.model) else ""
        if not zero and probe.settings.text is None:
            zero = "; if it writes only certain texts, --text FILE gives it one"
        return failed(f"the memory does nothing: logits change {numbers} of their scale{zero}", least, limit, **found)
    if after > limit:
        return failed(
            f"after the knock-outs the logits differ by {after:.1e}: they leave traces", after, limit, **found
        )
    return passed(", ".join(f"{MEANING.get(w, w)} {number:.1e}" for w, number in found.items()), least, limit, **found)


def _gates_are_zero(model: Any) -> bool:
    memories = getattr(model, "memories", None)
    return isinstance(memories, nn.ModuleDict) and not any(bool(m.gate.any()) for m in memories.values())
