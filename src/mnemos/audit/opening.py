"""Opens the MODEL of the command line: a run, a folder of transformers, a hub name, or `package:function`."""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

from ..data.modules import import_named

FUNCTION = re.compile(r"(?P<module>[^:]+):(?P<function>[A-Za-z_]\w*)")


def open_model(
    name: str, device: str = "cpu", checkpoint: str | None = None, allow_missing: bool = False
) -> tuple[Any, Any]:
    """A model and its tokenizer, or None for it.

    `package:function`, or `./file.py:function`, imports the module and calls the function, which returns a model, or a model and a
    tokenizer. That runs code of the user's; nothing else does: code in a model's folder or on a hub is not run.
    """
    found = FUNCTION.fullmatch(name)
    if found is None or os.path.exists(name):
        from ..eval.loading import load

        return load(name, device, checkpoint=checkpoint, allow_missing=allow_missing)
    if checkpoint is not None or allow_missing:
        raise ValueError(f"{name} is a function: checkpoint and allow_missing are for runs and folders")
    model, tokenizer = made_by(name, *found.groups())
    if hasattr(model, "to") and device != "cpu":
        from ..train.distributed import open_device

        model = model.to(open_device(device))
    return model, tokenizer


def made_by(name: str, module: str, function: str) -> tuple[Any, Any]:
    """The model that a function of a module returns, and its tokenizer or None."""
    maker = getattr(import_named(module), function, None)
    if not callable(maker):
        raise ValueError(f"{name:.200}: module {module} has no function {function}")
    needed = [
        p.name
        for p in inspect.signature(maker).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed:
        raise ValueError(f"{name:.200} must be a function without arguments, but needs {', '.join(needed)}")
    made = maker()
    model, tokenizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not callable(model):
        raise ValueError(
            f"{name:.200} returns a {type(made).__name__}, but must return a model, or a model and a tokenizer"
        )
    return model, tokenizer
