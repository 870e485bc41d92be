"""Opens a saved model, a run, or a model on a hub for evaluation. Needs transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..data import ByteTokenizer, open_tokenizer
from ..data.tokenizer import check_vocabulary
from ..models.opening import TOKENIZER_FILES, open_pretrained


def load(
    path: str | os.PathLike,
    device: str = "cpu",
    dtype: str = "auto",
    checkpoint: str | None = None,
    allow_missing: bool = False,
) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer, from a folder that transformers can open, a run's folder, or a hub name.

    Of a run, export/ is opened if it exists, else the best checkpoint; checkpoint: "best", "last" or a step. A byte-level model needs no
    tokenizer file. A model over ids that are not text has no tokenizer (None), and runs only the suites over ids.

    Damaged, incomplete or non-finite weights raise a ValueError; allow_missing=True initialises tensors that a model of ours lacks.
    """
    from ..train.distributed import open_device

    home = open_device(device)
    folder = Path(path)
    place = next((f for f in (folder, folder / "export") if os.path.isfile(f / "config.json")), None)
    if (place is None or checkpoint is not None) and os.path.isfile(folder / "config.yaml"):
        model, tokenizer = _from_run(folder, checkpoint or "best", allow_missing)
        return model.to(device=home, dtype=_dtype(dtype, model.dtype)).eval(), tokenizer
    if checkpoint is not None:
        raise ValueError(f"checkpoint={checkpoint!r} needs a run, but {path} has no config.yaml")
    if place is None and os.path.exists(folder):
        raise ValueError(
            f"{path} has no config.json, export/config.json or config.yaml: it is neither a saved model nor a run"
        )
    model = open_pretrained(
        str(place or path), "auto" if dtype == "auto" else _dtype(dtype, torch.float32), allow_missing
    )
    tokenizer = load_tokenizer(place or path, model.config)
    if tokenizer is not None and place is not None and model.config.model_type == "mnemos":
        check_vocabulary(tokenizer.vocab_size, model.config.vocab_size)
    return model.to(home).eval(), tokenizer


def load_tokenizer(path: str | os.PathLike, config: Any) -> Any:
    """The tokenizer saved with a model; bytes for a model of ours with 256 to 260 ids and no tokenizer; else None."""
    folder = Path(path)
    if not folder.is_dir() or any((folder / name).is_file() for name in TOKENIZER_FILES):
        if getattr(config, "model_type", None) == "mnemos":
            return open_tokenizer(str(path))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(path))
    return ByteTokenizer() if 256 <= config.vocab_size <= 260 else None


def _from_run(folder: Path, checkpoint: str, allow_missing: bool) -> tuple[Any, Any]:
    from ..train import runs

    return runs.load_model(folder, checkpoint, allow_missing=allow_missing), runs.load_tokenizer(folder)


def _dtype(name: str, default: torch.dtype) -> torch.dtype:
    found = default if name == "auto" else getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={name!r} is unknown; choose auto, float32, bfloat16 or float64")
    return found
