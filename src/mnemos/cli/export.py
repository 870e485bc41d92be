"""`mnemos export`: a run's model as one transformers folder."""

from __future__ import annotations

from typing import Annotated

import tyro


def export(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    checkpoint: str = "best",
    average: bool = False,
    allow_missing: bool = False,
) -> None:
    """Write the model of a run, whatever number of processes trained it, as one folder for transformers.

    Args:
        run: a run's folder.
        out: the folder to write; it must not exist, or be empty.
        checkpoint: best, last, or a step.
        average: the average of the weights (runs with optim.ema).
        allow_missing: open weights that lack tensors, which are then initialised as in a new model.
    """
    from ..train.runs import export as write

    path = write(run, out, checkpoint, average, allow_missing)
    print(f"{path}: open it with AutoModelForCausalLM.from_pretrained({str(path)!r}) after `import mnemos`")
