"""`mnemos export`: writes the model of a run as a transformers folder."""

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
    """Write the model of a run as a transformers folder, with a model card (README.md).

    Of a run with a pretrained base, the folder has the adapter alone.
    Any number of processes may have trained it. The card contains the run's eval.json if it was measured on the exported weights.

    Args:
        run: folder of the run.
        out: folder to write; it must not exist, or be empty.
        checkpoint: best, last, or a step.
        average: export the average of the weights (runs with optim.ema).
        allow_missing: initialise tensors that the weights lack as in a new model, instead of raising an error.
    """
    from ..train.runs import export as write

    path = write(run, out, checkpoint, average, allow_missing)
    if (path / "config.json").is_file():
        print(f"{path}: open it with AutoModelForCausalLM.from_pretrained({str(path)!r}) after `import mnemos`")
    else:
        print(f"{path}: one folder with the base: mnemos attach BASE OUT --load {path}/adapter.safetensors")
