"""Folders of attached models that `AutoModelForCausalLM.from_pretrained` opens, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ..models.remote import add_remote_code
from .model import AttachedForCausalLM


def check_absent(path: str | os.PathLike) -> None:
    """Raise a ValueError for a file, and for a folder that is not empty."""
    path = Path(path)
    if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
        raise ValueError(f"{path} exists already and is not empty; choose another folder")


@contextlib.contextmanager
def whole_folder(path: str | os.PathLike) -> Generator[Path]:
    """A temporary folder, which is renamed to `path` when the block ends without an error. `path` must not exist, or be empty."""
    path = Path(path)
    check_absent(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.part")
    part.mkdir()
    try:
        yield part
        for file in part.iterdir():
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        if path.exists():
            path.rmdir()
        part.rename(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def save_merged(model: AttachedForCausalLM, folder: str | os.PathLike, tokenizer: Any = None) -> Path:
    """Write base and memories as one transformers folder: `AutoModelForCausalLM.from_pretrained(folder)` after `import mnemos`.

    tokenizer: saved beside the model, if given.
    """
    if not isinstance(model, AttachedForCausalLM):
        raise ValueError(f"model is a {type(model).__name__}, but save_merged needs one that attach returned")
    if model.lora is not None:
        raise ValueError(
            "the base has LoRA maps: merge_lora(model) adds them to its weights, save_adapter keeps them apart"
        )
    with whole_folder(folder) as part:
        model.save_pretrained(part)
        add_remote_code(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
    return Path(folder)
