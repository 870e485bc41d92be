"""Saved models for programs that do not import mnemos: the `auto_map` of transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..atomic_io import write_text
from .folder import read_object

REMOTE = '''"""Lets transformers find the models of the package mnemos, which must be installed (trust_remote_code=True)."""

from mnemos.models import MnemosConfig, MnemosForCausalLM, MnemosModel

__all__ = ["MnemosConfig", "MnemosForCausalLM", "MnemosModel"]
'''


def add_remote_code(folder: str | os.PathLike) -> None:
    """Let a saved model be opened by programs that do not import mnemos, such as `lm_eval --model hf --model_args
    pretrained=FOLDER,trust_remote_code=True`: adds a file of three lines to the folder, and its name to config.json."""
    folder = Path(folder)
    config = read_object(folder / "config.json")
    if config.get("model_type") != "mnemos":
        raise ValueError(
            f"{folder} holds a model of type {config.get('model_type')!r}, but remote code is only for mnemos"
        )
    config["auto_map"] = {
        "AutoConfig": "mnemos_auto.MnemosConfig",
        "AutoModel": "mnemos_auto.MnemosModel",
        "AutoModelForCausalLM": "mnemos_auto.MnemosForCausalLM",
    }
    write_text(folder / "mnemos_auto.py", REMOTE)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
