"""Saved models for programs that do not import mnemos, by the `auto_map` of transformers."""

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
    """Make a saved model usable by programs that do not import mnemos. Adds a file of three lines, and its name in config.json.

    Such a program is `lm_eval --model hf --model_args pretrained=FOLDER,trust_remote_code=True`.
    """
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
