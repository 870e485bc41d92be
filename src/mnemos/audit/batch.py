"""`batch` and `padding`: a sequence has the same logits alone, beside others, in another place of the batch, and after padding."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .caching import kind_of
from .exact import Exactness
from .probe import Probe, closest, difference
from .registry import FAIL, Outcome, failed, not_applicable, passed, register_check
from .subject import Subject

ROWS = 3
PADDED_STEPS = 3  # tokens read one by one behind a padded prompt


@register_check(
    "batch",
    "sequences of a batch are independent: the same logits beside others, alone, and in another order",
    ["calls"],
)
def batch(probe: Probe) -> Outcome:
    ids, exact, cut = probe.ids(ROWS), Exactness(probe), probe.length // 2
    changed = torch.cat([ids[:1], probe.other(ids)[1:]])
    if worst := exact.change(lambda model: (model.logits(changed)[0], model.logits(ids)[0])):
        return failed("the logits of a batch row change with the tokens of the other rows", worst, 0.0)

    def behind(model: Subject, x: Tensor) -> Tensor:
        return model.step(x[:, cut:], model.step(x[:, :cut])[1])[0][0]

    if probe.own.has_state and (worst := exact.change(lambda model: (behind(model, changed), behind(model, ids)))):
        return failed("with a state, the logits of a batch row change with the tokens of the other rows", worst, 0.0)
    probe.tick()
    seen: list[tuple[float, float]] = []
    for model, limit in probe.subjects():
        together = model.logits(ids)
        alone = torch.cat([model.logits(ids[i : i + 1]) for i in range(ROWS)])
        turned = model.logits(ids.roll(1, 0)).roll(-1, 0)
        for how, found in (("alone", alone), ("in another order", turned)):
            new = difference(found, together)
            if new > limit:
                return failed(f"sequences {how} differ from sequences together ({kind_of(model)})", new, limit)
            seen.append((new, limit))
        probe.tick()
    found = exact.outcome(
        "other sequences of a batch change no bit; alone and in another order the logits are the same"
    )
    number, limit = closest(seen)
    return found if exact.unclear else dataclasses.replace(found, number=number, limit=limit)


@register_check("padding", "left padding changes nothing, in the first call and after it", ["causality", "batch"])
def padding(probe: Probe) -> Outcome:
    """Sequences of different lengths after padding, with an attention_mask, and position_ids as `generate` of transformers gives them."""
    if not probe.own.has_mask:
        return not_applicable("forward has no attention_mask")
    lengths = [probe.length - min(5, probe.length // 4), probe.length // 2 + 1, probe.length]
    continues = probe.own.has_state and probe.status_of("cached") not in (FAIL, None) and "cached" not in probe.blocked
    seen: list[tuple[float, float]] = []
    for model, limit in probe.subjects():
        ids = probe.ids(ROWS)
        mask = torch.stack([torch.arange(probe.length) >= probe.length - n for n in lengths]).long()
        padded = ids.masked_fill(mask == 0, min(model.special_ids, default=0))
        alone = [model.logits(ids[row : row + 1, probe.length - n :]) for row, n in enumerate(lengths)]

        def worst(found: Tensor) -> tuple[float, int]:  # and its tokens of padding
            rows = enumerate(lengths)
            each = [(difference(found[r : r + 1, probe.length - n :], alone[r]), probe.length - n) for r, n in rows]  # noqa: B023
            return max(each)

        ways = {"in one call": worst(model.logits(padded, mask))}
        if continues:
            ways["token by token after it"] = _behind(model, padded, mask, worst, limit)
        for how, (new, tokens) in ways.items():
            if new > limit:
                return failed(f"{tokens} tokens of padding change the logits {how} ({kind_of(model)})", new, limit)
            seen.append((new, limit))
        probe.tick()
    shown = ", ".join(str(probe.length - n) for n in lengths)
    behind = " and token by token after it" if continues else ""
    return passed(f"sequences with {shown} tokens of padding, in one call{behind}", *closest(seen))


def _behind(model: Subject, padded: Tensor, mask: Tensor, worst, limit: float) -> tuple[float, int]:
    """The difference of tokens that are read one by one behind a padded prompt, under the better of two conventions for their mask."""
    sizes = [padded.shape[1] - PADDED_STEPS] + [1] * PADDED_STEPS
    found: list[tuple[float, int]] = []
    for whole in (True, False):
        try:
            found.append(worst(model.in_pieces(padded, sizes, mask, whole)))
        except (RuntimeError, ValueError, TypeError, IndexError):
            if not whole and not found:
                raise
        if found and found[-1][0] <= limit:
            break
    return min(found)
