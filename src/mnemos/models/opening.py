"""Opens a causal language model of transformers or of ours, from a folder or a hub name. Needs transformers."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import torch

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def open_pretrained(path: str, dtype: str | torch.dtype = "auto", allow_missing: bool = False) -> Any:
    """A causal language model of transformers or of ours, from a folder or a hub name; whatever is wrong is one sentence."""
    from transformers import AutoModelForCausalLM

    from .folder import read_object  # this import also registers our models

    _check_exists(path)
    config = Path(path) / "config.json"
    ours = os.path.isfile(config) and read_object(config).get("model_type") == "mnemos"
    extra = {"allow_missing": True} if ours and allow_missing else {}
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **extra)
    except (ImportError, MemoryError):
        raise
    except Exception as failed:  # transformers can raise anything for a foreign file
        lines = [line.strip() for line in str(failed).splitlines() if line.strip()] or [type(failed).__name__]
        reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        names_path = type(failed) is ValueError and path in reason
        raise ValueError(reason if names_path else f"{path:.200} cannot be opened: {reason:.300}") from failed


def _check_exists(path: str) -> None:
    """Raise an error for a path that does not exist and cannot be a hub name, instead of asking the hub for half a minute."""
    if os.path.exists(path):
        return
    first, _, rest = path.rstrip("/").partition("/")
    is_run = rest and (first == "runs" or glob.glob(os.path.join(glob.escape(first), "*", "config.yaml")))
    if first in ("", ".", "..", "~") or "/" in rest or path.endswith("/") or is_run:
        raise ValueError(f"{path:.200} does not exist")
