"""Kind "scale": what a training at the papers' sizes would need. One block of each model is built and run; nothing is trained."""

from __future__ import annotations

from typing import Any

from mnemos.train.config import TrainConfig, merge
from mnemos.train.estimate import estimate
from mnemos.train.recipes import recipe


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """Parameters (millions), tokens (billions), 10^18 FLOPs, and GiB per device on `devices` of them, by the recipe of the cell's size."""
    config = merge(recipe(TrainConfig(), cell["size"]), {"model": {"preset": cell["preset"], "size": cell["size"]}})
    found = estimate(config, cell["devices"])
    return {
        "parameters_M": found.parameters / 1e6,
        "tokens_B": found.tokens / 1e9,
        "exaflops": found.flops / 1e18,
        "GiB_per_device": found.memory / 2**30,
    }
