"""Recognises the files that a run has written, by name and content; only those are overwritten or removed."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from ..atomic_io import part_of, remove_parts
from .files import sync_folder

MANIFEST = "manifest.json"
MAX_NAME_BYTES = 200
CHECKPOINT = re.compile(r"step-(\d{6,})")
PART = re.compile(r"\.(step-\d{6,})\.part")
OLD = re.compile(r"\.(step-\d{6,})\.old")  # a checkpoint that is being replaced
CHECKPOINT_FILES = re.compile(
    r"(manifest|state|rank-\d+)\.json|carried-\d+\.safetensors|tensors/[^/]+\.(safetensors|json)"
)
LINES = ("metrics.jsonl", "samples.jsonl")
RECORDS = (*LINES, "best.json", "abandoned.json")
FOLDERS = ("checkpoints", "tokenizer")


def check_name(name: Any) -> None:
    """Raise an error if a run's name is not one plain path component.

    >>> check_name("atlas-mag-nano")
    >>> check_name("../other")
    Traceback (most recent call last):
    ValueError: name='../other' must be one path component: up to 200 bytes of printable characters, without / or \\, not beginning with a dot or a space
    """
    is_plain = isinstance(name, str) and name.isprintable() and not {"/", "\\"} & {*name}
    if is_plain and name and name[0] not in ". " and not name.endswith(" ") and len(name.encode()) <= MAX_NAME_BYTES:
        return
    rule = f"up to {MAX_NAME_BYTES} bytes of printable characters, without / or \\, not beginning with a dot or a space"
    raise ValueError(f"name={name!r:.80} must be one path component: {rule}")


def check_own(path: Path) -> None:
    """Raise an error if a folder holds files but no run of ours."""
    for name in FOLDERS:
        if (path / name).is_symlink():
            raise ValueError(f"{path / name} is a link: a run's folders must be its own; choose another name")
    lock = path / ".lock"
    if lock.is_symlink() or (lock.exists() and (not lock.is_file() or lock.stat().st_size)):
        raise ValueError(f"{lock} was not written by mnemos: move it away, or choose another name")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: choose another name")
    if not is_run(path) and _holds_files(path):
        raise ValueError(f"{path} is not empty and holds no run of mnemos: choose another name or folder")


def is_run(path: Path) -> bool:
    """Whether a folder has a run's config, of this version or an older one, or one of its checkpoints."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        config = yaml.safe_load((path / "config.yaml").read_text())
        parts = ("model", "data", "optim", "schedule", "checkpoint", "watch")
        if isinstance(config, dict) and all(isinstance(config.get(name), dict) for name in parts):
            return True
    return any(_is_checkpoint(folder) for folder in checkpoint_folders(path / "checkpoints"))


def _is_checkpoint(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
        manifest = json.loads((folder / MANIFEST).read_text())
        return "state.json" in manifest and all(len(entry) == 2 for entry in manifest.values())
    return False


def checkpoint_folders(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, complete or not; symbolic links do not count."""
    try:
        found = [path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name) or PART.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def old_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were moved aside for another one and left there by a kill."""
    try:
        return sorted(p for p in folder.iterdir() if OLD.fullmatch(p.name) and p.is_dir() and not p.is_symlink())
    except OSError:
        return []


def _holds_files(path: Path) -> bool:
    """Whether a folder holds anything except empty folders and the remains of a run killed before its first file."""
    for folder, folders, files in os.walk(path):
        for name in files:
            if Path(folder) != path or (name != ".lock" and part_of(name) != "config.yaml"):
                return True
        if any(os.path.islink(os.path.join(folder, name)) for name in folders):
            return True
    return False


def check_records(path: Path) -> None:
    """Raise an error if a file has the name of one of our records but other content."""
    for name in RECORDS:
        if os.path.lexists(path / name) and not _is_record(path / name):
            raise ValueError(f"{path / name} was not written by mnemos: move it away, or choose another name")


def clear_run(path: Path) -> None:
    """Remove the remains of a run that never completed a checkpoint."""
    for name in RECORDS:
        (path / name).unlink(missing_ok=True)
    for folder in checkpoint_folders(path / "checkpoints"):
        remove_checkpoint(folder)


def _is_record(file: Path) -> bool:
    if file.is_symlink() or not file.is_file():
        return False
    if file.name in LINES:
        begin = b'{"step": '
        with open(file, "rb") as lines:  # a crash may have truncated the first line, or filled it with zeros
            return begin.startswith(lines.read(len(begin)).strip(b"\0\n"))
    with contextlib.suppress(OSError, ValueError, RecursionError, TypeError):
        content = json.loads(file.read_text())
        return isinstance(content, list) if file.name == "abandoned.json" else {*content} == {"step", "val_loss"}
    return False


def remove_checkpoint(folder: Path) -> None:
    """Remove our files of a checkpoint; other files and their folders stay.

    The manifest is removed first, so that a kill leaves no valid checkpoint; the next start removes the rest.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
        sync_folder(folder)
        tensors = folder / "tensors"
        for place, prefix in ((folder, ""), (tensors, "tensors/")):
            for file in [] if place.is_symlink() or not place.is_dir() else list(place.iterdir()):
                if CHECKPOINT_FILES.fullmatch(prefix + (part_of(file.name) or file.name)) and not file.is_dir():
                    file.unlink(missing_ok=True)
        for place in (tensors, folder):
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of a killed run."""
    remove_parts(path, ("config.yaml", *RECORDS))
    remove_parts(path / "tokenizer")
