"""Tensors in a file: written whole or not at all, read without ever running what a stranger put there."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..atomic_io import whole_file

LONGEST_NAME = 200  # of a tensor: messages quote names


def write_tensors(path: str | os.PathLike, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write a safetensors file under a temporary name, sync it, and rename it."""
    data = save({name: x.detach().contiguous().cpu().clone() for name, x in tensors.items()}, metadata=header)
    with whole_file(path) as file:
        file.write(data)


def one_line(error: BaseException) -> str:
    """The message of an error, short and on one line: a file may have put anything into it.

    >>> one_line(ValueError("a tensor of dtype\\n'x'"))
    "a tensor of dtype 'x'"
    """
    text = " ".join(str(error).split()) or repr(error)
    return text if len(text) <= 240 else f"{text[:240]} ..."


def check_names(path: str | os.PathLike, names: Iterable[str]) -> None:
    """Raise an error for names of tensors that cannot be quoted on one line."""
    for name in names:
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise ValueError(
                f"{path} names a tensor {name!r:.60}, but a name of at most {LONGEST_NAME} printable characters is expected"
            )


def read_tensors(
    path: str | os.PathLike, what: str, form: str, device: torch.device | str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file whose header names the format `form`; else a sentence that it is not a `what`."""
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as broken:  # TypeError: a size beyond int64
        raise ValueError(f"{path} is not a readable {what}: {one_line(broken)}") from None
    check_names(path, tensors)
    if header.get("format") != form:
        raise ValueError(f"{path} is not a {what} of this version ({form})")
    return tensors, header
