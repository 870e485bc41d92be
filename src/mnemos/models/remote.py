"""Saved models for programs that do not import mnemos, by the `auto_map` of transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..atomic_io import write_text
from .folder import read_object

CLASSES = {  # model_type -> module of the package, and the class behind each of transformers' Auto classes
    "mnemos": (
        "mnemos.models",
        {"AutoConfig": "MnemosConfig", "AutoModel": "MnemosModel", "AutoModelForCausalLM": "MnemosForCausalLM"},
    ),
    "mnemos_attached": (
        "mnemos.attach",
        {"AutoConfig": "AttachedModelConfig", "AutoModelForCausalLM": "AttachedForCausalLM"},
    ),
}
REMOTE = '''"""Lets transformers find the models of the package mnemos, which must be installed (trust_remote_code=True)."""

from {module} import {names}

__all__ = [{quoted}]
'''


def add_remote_code(folder: str | os.PathLike) -> None:
    """Make a saved model usable by programs that do not import mnemos. Adds a file of three lines, and its name in config.json.

    Such a program is `lm_eval --model hf --model_args pretrained=FOLDER,trust_remote_code=True`.
    """
    folder = Path(folder)
    config = read_object(folder / "config.json")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CLASSES:
        raise ValueError(
            f"{folder} holds a model of type {kind!r}, but remote code is only for {' and '.join(CLASSES)}"
        )
    module, classes = CLASSES[kind]
    names = sorted(classes.values())
    config["auto_map"] = {auto: f"mnemos_auto.{name}" for auto, name in classes.items()}
    quoted = ", ".join(f'"{name}"' for name in names)
    write_text(folder / "mnemos_auto.py", REMOTE.format(module=module, names=", ".join(names), quoted=quoted))
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
