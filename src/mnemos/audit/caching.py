"""`cached`, `splits`: a model that resumes from its state computes what it computes in one call."""

from __future__ import annotations

from collections.abc import Iterable

from .probe import Probe, difference
from .registry import Outcome, failed, not_applicable, passed, register_check

NO_STATE = "the model returns no state or cache"
SPLITS = (6, 3)  # of a small and of a large model
DECODED = (512, 16)  # most tokens that are read one by one


def _compare(probe: Probe, splits: Iterable[list[int]]) -> tuple[float, float, str]:
    """The largest difference from one call, by its tolerance: (difference, tolerance, how)."""
    worst: tuple[float, float, str] = (0.0, 1.0, "")
    splits, ids, subjects = list(splits), probe.ids(2), list(probe.subjects())
    probe.expect(len(splits) * len(subjects))
    for model, limit in subjects:
        whole = model.logits(ids)
        for sizes in splits:
            number = difference(model.in_pieces(ids, sizes), whole)
            if number / limit >= worst[0] / worst[1]:
                worst = number, limit, f"calls of {_shown(sizes)} tokens, {kind_of(model)}"
            probe.tick()
    return worst


def kind_of(model) -> str:
    kinds = {p.dtype for p in model.parameters()} or {model.dtype}
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def _shown(sizes: list[int]) -> str:
    """Sizes in short: runs of equal ones as 1×n."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return " + ".join(str(size) if n == 1 else f"{n}×{size}" for size, n in runs)


def _judged(found: tuple[float, float, str], good: str) -> Outcome:
    number, limit, how = found
    if number > limit:
        return failed(f"{how}: logits differ from those of one call by {number:.1e} of their scale", number, limit)
    return passed(f"{good}; largest difference with {how}", number, limit)


@register_check("cached", "a prompt and then token by token gives the logits of one call", ["causality"])
def cached(probe: Probe) -> Outcome:
    if not probe.own.has_state:
        return not_applicable(NO_STATE)
    most = min(DECODED[probe.is_large], probe.length - 1)
    prompts = [probe.length - most, probe.length - max(1, most // 2), probe.length - max(1, most // 4)]
    splits = [[n] + [1] * (probe.length - n) for n in dict.fromkeys(prompts)]
    return _judged(_compare(probe, splits), f"{len(splits)} prompts of {probe.length} tokens")


@register_check("splits", "any split into calls gives the logits of one call", ["cached"])
def splits(probe: Probe) -> Outcome:
    if not probe.own.has_state:
        return not_applicable(NO_STATE)
    cut = probe.length // 2
    chosen = [[cut, probe.length - cut], [1, probe.length - 1]]
    chosen += [probe.random_sizes(seed) for seed in range(SPLITS[probe.is_large])]
    return _judged(_compare(probe, chosen), f"{len(chosen)} splits of {probe.length} tokens")
