"""Checkpoints: folders of safetensors and JSON, complete or absent. A run of any number of processes can resume from them.

    checkpoints/step-000500/
        tensors/*.safetensors    weights, optimiser, average of the weights: one shard per process (torch.distributed.checkpoint)
        state.json               step, counters, data position, configs of the run and of the model
        rank-0.json, …           random state of each process
        carried-0.safetensors    the memory state that each process carries between batches, if any
      manifest.json            size and checksum of every file: written last

No pickle is written or read. A folder is written under a temporary name, synced, and renamed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .distributed import World
from .files import sync_folder, write_json
from .ownership import CHECKPOINT, MANIFEST, PART, checkpoint_folders, old_checkpoints, remove_checkpoint
from .records import read_best

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process may save alone


@dataclass
class Contents:
    """Contents of a checkpoint besides the tensors. own: this process's part; files: name -> function that writes the file."""

    step: int
    state: dict[str, Any]
    own: dict[str, Any]
    files: dict[str, Callable[[Path], None]] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run. `say` is called with one sentence when something fails."""

    def __init__(self, folder: Path, world: World, keep_last: int, asynchronous: bool, say: Callable[[str], None]):
        self.folder, self.world, self.keep_last, self.say = folder, world, keep_last, say
        self.asynchronous = asynchronous
        # the writing thread communicates while the processes train, so it needs a process group of its own
        self._group = dist.new_group(backend="gloo") if world.size > 1 and asynchronous else None
        self._pending: tuple[Any, Path, Path, threading.Thread | None, list] | None = None
        if world.first:
            folder.mkdir(parents=True, exist_ok=True)
            self._clear_away()
        world.barrier()

    def _clear_away(self) -> None:
        """Remove incomplete, half-removed and abandoned checkpoints; rename those that were complete but not yet renamed."""
        self._name_parts()
        for old in old_checkpoints(self.folder):
            target = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
            if problem_of(target) and not problem_of(old):
                remove_checkpoint(target)
                with contextlib.suppress(OSError):  # files of others have that name
                    old.rename(target)
            else:
                _remove_old(old, target)
        for path in checkpoint_folders(self.folder):
            if not (path / MANIFEST).exists():
                remove_checkpoint(path)
        self._remove_abandoned()

    def _name_parts(self) -> None:
        for part in checkpoint_folders(self.folder):
            match = PART.fullmatch(part.name)
            if match is None:
                continue
            target = part.with_name(match[1])
            if not problem_of(part) and problem_of(target):
                remove_checkpoint(target)
                with contextlib.suppress(OSError):  # files of others have that name
                    part.rename(target)
            if problem_of(part) or not problem_of(target):
                remove_checkpoint(part)

    def save(
        self, tensors: dict[str, Tensor], contents: Contents, best: float | None = None, wait: bool = False
    ) -> bool:
        """Write a checkpoint; on failure report one sentence and return False. best: its validation loss, if it is the best checkpoint."""
        self.finish()
        target = self.path(contents.step)
        if best is None and self.world.broadcast(self.best() or {}).get("step") == contents.step:
            return True  # a run that went back past its best checkpoint: the same step is no better now
        part = target.with_name(f".{target.name}.part")
        problem = ""
        try:
            if self.world.first:
                remove_checkpoint(part)
                (part / "tensors").mkdir(parents=True)
                write_json(part / "state.json", contents.state | {"step": contents.step})
            self.world.barrier()
            write_json(part / f"rank-{self.world.rank}.json", contents.own)
            for name, write in contents.files.items():
                write(part / name)
        except OSError as error:
            problem = str(error)
        if self.world.any(bool(problem)):
            self._give_up(part, contents.step, problem or "another process could not write its shard")
            return False
        asynchronous = self.asynchronous and not wait
        try:
            writer = dcp.HuggingFaceStorageWriter(str(part / "tensors"), save_distributed=True)
            save: Callable = dcp.async_save if asynchronous else dcp.save
            future = save(tensors, storage_writer=writer, process_group=self._group)
        except (OSError, RuntimeError, CheckpointException) as error:
            self._give_up(part, contents.step, _short(error))
            return False
        if not asynchronous:
            return self._complete(part, target, contents.step, best)
        outcome: list = []
        thread = threading.Thread(target=lambda: outcome.append(self._after(future, part, target, contents.step, best)))
        thread.start()
        self._pending = (future, part, target, thread, outcome)
        return True

    def finish(self) -> bool:
        """Wait for the checkpoint in progress; returns whether it was written."""
        if self._pending is None:
            return True
        _, _, _, thread, outcome = self._pending
        self._pending = None
        if thread is not None:
            thread.join()
        return bool(outcome and outcome[0])

    def _after(self, future, part: Path, target: Path, step: int, best: float | None) -> bool:
        try:
            future.result()
        except BaseException as error:
            self._give_up(part, step, _short(error))
            return False
        return self._complete(part, target, step, best)

    def _complete(self, part: Path, target: Path, step: int, best: float | None) -> bool:
        """Finish a checkpoint whose parts are complete: write the manifest, sync, rename."""
        if not self.world.first:
            return True
        try:
            files = sorted(p for p in part.rglob("*") if p.is_file())
            write_json(part / MANIFEST, {str(p.relative_to(part)): [p.stat().st_size, _checksum(p)] for p in files})
            sync_folder(part, files=True)
            _put_in_place(part, target)
            sync_folder(self.folder)
            self._set_abandoned(self._abandoned() - {step})
            if best is not None and best < (self.best() or {"val_loss": math.inf})["val_loss"]:
                write_json(self.folder.parent / "best.json", {"step": step, "val_loss": best})
        except OSError as error:
            self._give_up(part, step, str(error))
            return False
        self._prune()
        return True

    def _give_up(self, part: Path, step: int, why: str) -> None:
        if self.world.first:
            remove_checkpoint(part)
            self.say(f"no checkpoint of step {step}: {why}; earlier ones are kept, and training continues")

    def _prune(self) -> None:
        kept = {*self.live_steps()[-self.keep_last :], (self.best() or {}).get("step")}
        for step in self.steps():
            if step not in kept:
                remove_checkpoint(self.path(step))

    def forget_after(self, step: int) -> None:
        """After a rollback to `step`: remove the later checkpoints, except the best, from which no run resumes.

        They are named in abandoned.json first: from then on, a kill at any moment leaves a run that resumes from `step` or before.
        """
        if self.world.first:
            self._set_abandoned(self._abandoned() | {later for later in self.steps() if later > step})
            self._remove_abandoned()
        self.world.barrier()

    def _remove_abandoned(self) -> None:
        """Remove abandoned checkpoints, the newest first."""
        abandoned = self._abandoned()
        for step in sorted(abandoned - {(self.best() or {}).get("step")}, reverse=True):
            remove_checkpoint(self.path(step))
        self._set_abandoned(abandoned & {*self.steps()})

    def _abandoned(self) -> set[int]:
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            return {int(step) for step in json.loads((self.folder.parent / "abandoned.json").read_text())}
        return set()

    def _set_abandoned(self, steps: set[int]) -> None:
        if steps != self._abandoned():
            write_json(self.folder.parent / "abandoned.json", sorted(steps))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        return checkpoint_steps(self.folder)

    def live_steps(self) -> list[int]:
        """The steps from which a run may resume."""
        return sorted({*self.steps()} - self._abandoned())

    def best(self) -> dict[str, Any] | None:
        """Step and validation loss of the best checkpoint."""
        return read_best(self.folder.parent)

    def load(
        self, tensors: Callable[[], dict[str, Tensor]], step: int | None = None
    ) -> tuple[Path, dict[str, Any]] | None:
        """Load the newest complete checkpoint (of `step` or before) into live tensors; incomplete ones are reported."""
        self.finish()
        steps = [s for s in self.world.broadcast(self.live_steps()) if step is None or s <= step]
        for candidate in reversed(steps):
            path = self.path(candidate)
            wrong = self.world.broadcast(problem_of(path) if self.world.first else "")
            if wrong:
                if self.world.first:
                    self.say(f"{path} cannot be used: {wrong}; trying the previous one")
                continue
            read_tensors_into(path, tensors())
            return path, json.loads((path / "state.json").read_text())
        return None


def _put_in_place(part: Path, target: Path) -> None:
    """Rename a finished checkpoint to its final name. An existing one is moved aside first, and moved back if this fails."""
    old = target.with_name(f".{target.name}.old")
    had_one = target.is_dir()
    if had_one:
        _remove_old(old, target)
        target.rename(old)
    try:
        part.rename(target)
    except OSError:
        if had_one:
            old.rename(target)
        raise
    if had_one:
        _remove_old(old, target)


def _remove_old(old: Path, target: Path) -> None:
    """Remove our files of a checkpoint that was replaced; move other files to the new one."""
    remove_checkpoint(old)
    if old.is_dir() and target.is_dir():
        with contextlib.suppress(OSError):
            for left in old.iterdir():
                if not os.path.lexists(target / left.name):
                    left.rename(target / left.name)
            old.rmdir()


def read_tensors_into(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill live tensors, sharded or not, from a checkpoint."""
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path / "tensors")))


def tensor_shapes(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Full shape and safetensors dtype of every tensor of a checkpoint, for any number of processes that wrote it."""
    from ..models.folder import dtype_name

    try:
        metadata = dcp.HuggingFaceStorageReader(str(path / "tensors")).read_metadata().state_dict_metadata
        tensors = {name: x for name, x in metadata.items() if isinstance(x, TensorStorageMetadata)}
        return {name: (tuple(x.size), dtype_name(x.properties.dtype)) for name, x in tensors.items()}
    except Exception as broken:  # files with the right checksums that hold no tensors of ours
        raise ValueError(f"{path} cannot be used: its tensors cannot be read ({_short(broken)})") from None


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints of a folder."""
    named = ((CHECKPOINT.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match, path in named if match and (path / MANIFEST).exists())


def problem_of(path: Path) -> str:
    """The problem with a checkpoint's files; "" if there is none."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, (size, checksum) in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if _checksum(file) != checksum:
                return f"{name} is damaged (its checksum differs)"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"its manifest cannot be read ({error})"
    return ""


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def _short(error: BaseException) -> str:
    """The innermost sentence of an error that torch.distributed.checkpoint has wrapped."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
