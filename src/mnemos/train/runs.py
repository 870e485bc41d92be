"""Runs on disk: folders, names, checkpoints and exported models.

runs/<name>/config.yaml  metrics.jsonl  best.json  samples.jsonl  abandoned.json  tokenizer/  checkpoints/step-000500/
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import time
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from ..atomic_io import part_of
from .checkpoints import checkpoint_steps, problem_of
from .config import TrainConfig
from .distributed import World
from .ownership import check_name, check_own, check_records, clear_run, remove_leftovers
from .records import read_best

STALE_EXPORT_SECONDS = 3600  # longer than any export takes


def new_name(folder: Path, wanted: str) -> str:
    """`wanted`, or wanted-2, wanted-3, … if that is taken.

    >>> new_name(Path("no-such-folder"), "atlas-mag-nano")
    'atlas-mag-nano'
    """
    name, number = wanted, 1
    while (folder / name).exists():
        number += 1
        name = f"{wanted}-{number}"
    return name


def check_free(config: TrainConfig) -> None:
    """Raise an error if the folder of a new run holds a run or other files."""
    if config.name is None:
        return
    check_name(config.name)
    path = Path(config.folder) / config.name
    check_own(path)
    if checkpoint_steps(path / "checkpoints"):
        raise ValueError(f"{path} holds a run already: continue it with --resume {path}, or choose another name")


def prepare_folder(config: TrainConfig, world: World, resume: bool, tokenizer) -> tuple[Path, BaseFileLock | None]:
    """The run's folder. The first process locks and clears it and writes its config, with the run's name."""
    lock, problem = None, ""
    if world.first:
        try:
            if config.name is None:
                config.name = _claim(Path(config.folder), config.title.replace(" ", "-"))
            check_name(config.name)
            path = Path(config.folder) / config.name
            check_own(path)  # before the lock, which creates a file
            lock = _lock(path)
            check_records(path)
            if not resume:
                check_free(config)  # again, because another process may have been faster
                _check_config(path / "config.yaml")
                clear_run(path)
        except ValueError as wrong:
            problem = str(wrong)
            if lock is not None:
                lock.release()
    config.name, problem = world.broadcast((config.name, problem))
    if problem:
        raise ValueError(problem)
    path = Path(config.folder) / config.name
    if world.first:
        remove_leftovers(path)
        if not _holds(path / "config.yaml", config):
            config.save(path / "config.yaml")
        (path / "tokenizer").mkdir(exist_ok=True)
        tokenizer.save(path / "tokenizer")
    return path, lock


def _check_config(path: Path) -> None:
    """Raise an error if the config was edited by hand, for instance with comments: a new run would overwrite it."""
    if path.exists() and TrainConfig.load_recorded(path).to_yaml() != path.read_text(encoding="utf-8"):
        raise ValueError(f"{path} was edited by hand: train it with --config {path}, or choose another name")


def _holds(path: Path, config: TrainConfig) -> bool:
    """Whether a file already holds these settings; it is then kept, comments included."""
    with contextlib.suppress(OSError, ValueError):
        return TrainConfig.load_recorded(path) == config
    return False


def _lock(path: Path) -> BaseFileLock:
    """Lock a run's folder until the lock is released or the process ends."""
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / ".lock", is_singleton=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{path} is being trained by another process: wait for it, or choose another name") from None
    return lock


def _claim(folder: Path, wanted: str) -> str:
    """A unique name, even if two runs start at once: the process that creates the folder gets it."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        name = new_name(folder, wanted)
        with contextlib.suppress(FileExistsError):
            (folder / name).mkdir()
            return name


def find_checkpoint(run: str | os.PathLike, which: str = "best") -> Path:
    """The folder of a run's checkpoint: "best" (the last one if none was validated), "last", or a step."""
    run = Path(run)
    steps = checkpoint_steps(run / "checkpoints")
    if not steps:
        raise ValueError(f"{run} has no checkpoint" if run.is_dir() else f"{run} is not a run's folder")
    if which == "best":
        step = (read_best(run) or {"step": steps[-1]})["step"]
    elif which == "last":
        step = steps[-1]
    elif which.isdigit() and int(which) in steps:
        step = int(which)
    else:
        raise ValueError(
            f"checkpoint={which!r} does not exist; choose best, last or one of {', '.join(map(str, steps))}"
        )
    path = run / "checkpoints" / f"step-{step:06d}"
    wrong = problem_of(path)
    if wrong:
        raise ValueError(f"{path} cannot be used: {wrong}")
    return path


def check_folder(config: TrainConfig, resume: bool) -> None:
    """Raise an error if a new run would overwrite files, or if a run to resume has a model with parts that are not registered."""
    if not resume:
        check_free(config)
    else:
        check_registered(config)


def check_registered(config: TrainConfig) -> None:
    """Raise an error with the modules to import if the newest checkpoint of a run has a memory with parts that are not registered."""
    from ..models.required import check_required

    model = saved_model_config(config)
    if model is not None and isinstance(model.get("memory"), dict):
        check_required(model.get("requires_modules", []), model["memory"])


def saved_model_config(config: TrainConfig) -> dict[str, Any] | None:
    """The model's config in the newest checkpoint of the run, as a dict; None if there is none."""
    from ..models.folder import read_object

    if config.name is None:
        return None
    folder = Path(config.folder) / config.name / "checkpoints"
    steps = checkpoint_steps(folder)
    model = read_object(folder / f"step-{steps[-1]:06d}" / "state.json").get("model") if steps else None
    return model if isinstance(model, dict) else None


def load_model(run: str | os.PathLike, checkpoint: str = "best", average: bool = False, allow_missing: bool = False):
    """The model of a run's checkpoint, unsharded and in evaluation mode, for any number of processes that wrote it.

    average: load the average of the weights, for runs with optim.ema. allow_missing: initialise tensors that the checkpoint lacks as in
    a new model; without it, a checkpoint that is incomplete, not finite or inconsistent with its config raises a ValueError.
    """
    return _open(run, checkpoint, average, allow_missing)[1]


def _open(run: str | os.PathLike, checkpoint: str, average: bool, allow_missing: bool):
    """The kind of a run's model, and the model of a checkpoint."""
    from ..models.folder import read_object
    from .model_sources import saved_source

    path = find_checkpoint(run, checkpoint)
    state = read_object(path / "state.json")
    try:
        source, ema = saved_source(state["model"]), average and state["config"]["optim"]["ema"]
        described = source.describe(state)
    except (KeyError, TypeError, AttributeError) as wrong:
        raise ValueError(f"{path / 'state.json'} does not describe a model: {wrong!r}") from None
    if average and not ema:
        raise ValueError(f"{run} has no average of its weights: it was trained with optim.ema=0")
    prefix = "average" if average else "model"
    return source, source.load(Path(run), path, described, prefix, allow_missing)


def load_tokenizer(run: str | os.PathLike):
    """The tokenizer of a run."""
    from ..data import open_tokenizer

    return open_tokenizer(str(Path(run) / "tokenizer"))


def export(
    run: str | os.PathLike,
    out: str | os.PathLike,
    checkpoint: str = "best",
    average: bool = False,
    allow_missing: bool = False,
) -> Path:
    """Write a folder, atomically: config with use_cache, safetensors weights, tokenizer and model card, which transformers opens.

    Of a run with a base: the adapter and its card, without the base.
    """
    import uuid

    from .files import sync_folder

    out = Path(out)
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ValueError(f"{out} exists already and is not empty; choose another folder")
    source, model = _open(run, checkpoint, average, allow_missing)
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale_exports(out)
    part = out.with_name(f".{out.name}.{uuid.uuid4().hex[:16]}.part")
    try:
        part.mkdir()
        source.write(model, part, Path(run), find_checkpoint(run, checkpoint), average)
        sync_folder(part, files=True)
        if out.exists():
            out.rmdir()
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_folder(out.parent)
    return out


def _remove_stale_exports(out: Path) -> None:
    """Remove the remains of killed exports to this folder: our temporary names, older than an hour, without subfolders."""
    for part in out.parent.glob(f".{glob.escape(out.name)}.*.part"):
        if part_of(part.name) == out.name and part.is_dir() and not part.is_symlink():
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > STALE_EXPORT_SECONDS and all(
                    file.is_file() for file in part.iterdir()
                ):
                    shutil.rmtree(part)
