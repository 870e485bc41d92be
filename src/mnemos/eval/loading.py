"""Open what is to be evaluated: a saved model, a run, or a name on a hub. Needs transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..data import ByteTokenizer, open_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load(
    path: str | os.PathLike, device: str = "cpu", dtype: str = "auto", checkpoint: str | None = None
) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer, from a folder that transformers can open, a run's folder, or a hub's name.

    Of a run, export/ is opened where there is one, else its best checkpoint; `checkpoint` ("best", "last", a step) chooses one. A model of bytes needs no tokenizer file; one of ids that are no
    text has none (None), and only the suites over ids can be run on it.
    """
    from ..train.distributed import open_device

    home = open_device(device)
    folder = Path(path)
    place = next((f for f in (folder, folder / "export") if os.path.isfile(f / "config.json")), None)
    if (place is None or checkpoint is not None) and os.path.isfile(folder / "config.yaml"):
        model, tokenizer = _from_run(folder, checkpoint or "best")
        return model.to(device=home, dtype=_dtype(dtype, model.dtype)).eval(), tokenizer
    if checkpoint is not None:
        raise ValueError(f"checkpoint={checkpoint!r} is of a run, but {path} has no config.yaml")
    if place is None and os.path.exists(folder):
        raise ValueError(
            f"{path} has no config.json, export/config.json or config.yaml: it is neither a saved model nor a run"
        )
    from transformers import AutoModelForCausalLM

    import mnemos.models  # noqa: F401  makes our models known

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(place or path), dtype="auto" if dtype == "auto" else _dtype(dtype, torch.float32)
        )
    except OSError as failed:
        raise ValueError(f"{path} cannot be opened: {str(failed).splitlines()[0]}") from None
    return model.to(home).eval(), load_tokenizer(place or path, model.config)


def load_tokenizer(path: str | os.PathLike, config: Any) -> Any:
    """The tokenizer saved with a model; bytes for a model of ours with 256 to 260 ids and no tokenizer; else None."""
    folder = Path(path)
    if not folder.is_dir() or any((folder / name).is_file() for name in TOKENIZER_FILES):
        if getattr(config, "model_type", None) == "mnemos":
            return open_tokenizer(str(path))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(path))
    return ByteTokenizer() if 256 <= config.vocab_size <= 260 else None


def _from_run(folder: Path, checkpoint: str) -> tuple[Any, Any]:
    from ..train import runs

    return runs.load_model(folder, checkpoint), runs.load_tokenizer(folder)


def _dtype(name: str, default: torch.dtype) -> torch.dtype:
    found = default if name == "auto" else getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={name!r} is unknown; choose auto, float32, bfloat16 or float64")
    return found
