"""`mnemos train`: trains a model. Settings: defaults, then recipes, then a config file, then flags."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

SHORT_FLAGS = {
    "--base": "--base.model",
    "--preset": "--model.preset",
    "--size": "--model.size",
    "--data": "--data.sources",
    "--tokenizer": "--data.tokenizer",
    "--seq-len": "--data.seq-len",
    "--batch-size": "--data.batch-size",
    "--carry-state": "--data.carry-state",
    "--no-carry-state": "--data.no-carry-state",
    "--lr": "--optim.lr",
    "--optimizer": "--optim.name",
    "--max-steps": "--steps",
    "--gradient-accumulation-steps": "--accumulate",
    "--track": "--watch.trackers",
    "--strategy": "--parallel.strategy",
}


def run_train(arguments: Sequence[str]) -> int:
    """Train. Returns the exit status: 0 for a run that finished, or was stopped and saved; 1 for one that failed."""
    arguments, processes = _dry(arguments)
    if processes is not None:
        return _dry_run(arguments, processes)
    with uncollected():
        from ..train.trainer import Trainer, TrainingFailed

    config, resume = read_arguments(arguments)
    trainer = Trainer(config, resume=resume, display=True)
    try:
        result = trainer.train()
    except TrainingFailed as failed:
        if trainer.world.first:
            print(f"mnemos: {failed}", file=sys.stderr)
        return 1
    finally:
        trainer.world.close()
    if result.saved and not result.stopped and trainer.world.first:
        validated = "" if result.val_loss is None else f", validation loss {result.val_loss:.4f}"
        print(f"{result.path}: {result.step} steps{validated}. Next: mnemos generate {result.path} --prompt 'The '")
    return 0 if result.saved else 1


def _dry(arguments: Sequence[str]) -> tuple[list[str], int | None]:
    """The arguments without --dry-run, and its number of processes; None without --dry-run."""
    rest, processes, items = [], None, list(arguments)
    while items:
        flag, equals, value = items.pop(0).partition("=")
        if flag != "--dry-run":
            rest.append(flag + equals + value)
            continue
        value = value if equals else items.pop(0) if items and not items[0].startswith("-") else "1"
        if not value.isdigit() or value == "0":
            raise ValueError(f"--dry-run {value}: the number of processes must be a whole number >= 1")
        processes = int(value)
    return rest, processes


def _dry_run(arguments: Sequence[str], processes: int) -> int:
    """Print the requirements of the run, without starting it."""
    from rich.console import Console
    from rich.table import Table

    from ..train.advice import short_rows
    from ..train.estimate import estimate

    config, _ = read_arguments(arguments)
    if config.base.model is not None:
        raise ValueError(
            "--dry-run measures models of presets: with --base, train with --steps 1 to see what a step needs"
        )
    table = Table(title=f"{config.model.preset} {config.model.size} on {processes} device(s)", show_header=False)
    found = estimate(config, processes)
    for name, value in found.rows():
        table.add_row(name, value)
    Console().print(table, highlight=False)
    short = short_rows(config, found.config)
    if short:
        print(f"mnemos: {short}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Garbage collection off, for imports: nearly all their objects stay, and collecting takes a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def read_arguments(arguments: Sequence[str]):
    """The config of the flags, and whether to resume."""
    import tyro

    from ..train.config import EXCLUSIVE_LENGTHS, TrainConfig, merge
    from ..train.ownership import check_name
    from ..train.recipes import RECIPES, recipe
    from ..train.runs import new_name
    from ..train.telemetry import check_trackers
    from .usage import parsed

    rest, chosen, resume = _take(arguments)
    config = TrainConfig()
    for name in chosen["--recipe"]:
        config = recipe(config, name)
    for path in chosen["--config"]:
        config = merge(config, _fields(path))
    if resume is not None:
        if chosen["--attach"]:
            raise ValueError("--resume uses the memories of the run: leave out --attach")
        if any(chosen.values()):
            raise ValueError("--resume uses the settings of the run: leave out --recipe, --config and --match-size")
        path = Path(resume) if resume else _newest(rest, config.folder)
        path = path.absolute() if path.name == "" else path.resolve() if path.name == ".." else path
        if not (path / "config.yaml").exists():
            raise ValueError(f"--resume {path}: there is no {path}/config.yaml")
        config = TrainConfig.load(path / "config.yaml")
        config.name, config.folder = path.name, str(path.parent)
    for path in chosen["--attach"]:
        config.base.attach = _mapping(path)
    before = dataclasses.replace(config.model)
    flags = {item.partition("=")[0] for item in rest}
    for name, other in EXCLUSIVE_LENGTHS.items():
        if f"--{name}" in flags:
            setattr(config, other, None)
    about = (
        "Train a model. Later settings win: defaults, --recipe, --config FILE, flags.\n\n"
        "  mnemos train --preset titans-mag --recipe quick --name first\n"
        "  mnemos train --preset titans-mag --recipe quick --data my-notes/\n"
        "  mnemos train --base FOLDER --attach FILE --data my-notes/\n"
        "  mnemos train --resume runs/first\n\n"
        "Recipes (--recipe NAME, repeatable):\n"
        + "\n".join(f"  {name}: {text}" for name, (text, _) in RECIPES.items())
        + "\n\n--resume [RUN] continues a run; by default the newest.\n"
        + "--dry-run [N] starts no run: it builds one block of each kind, and prints parameters, steps and memory on N devices.\n\n"
        + "--match-size OTHER sets the width of the feed-forward layers so that the model has as many parameters as OTHER: a preset\n"
        + "(transformer, or transformer:tiny), a run, a model's folder, or a number (10M).\n\n"
        + "--base FOLDER trains memories attached to a pretrained model; --attach FILE holds the fields of AttachConfig in YAML.\n\n"
        + "Short forms: "
        + ", ".join(f"{short} for {full}" for short, full in SHORT_FLAGS.items())
        + ".\n\n--output-dir RUN is the folder of the run, --folder and --name in one (with --name: the parent folder)."
    )
    try:
        config = parsed(
            lambda: tyro.cli(TrainConfig, prog="mnemos train", description=about, default=config, args=rest),
            "mnemos train",
        )
    except ValueError as wrong:
        raise ValueError(_in_short(str(wrong), arguments)) from None
    if resume is not None and config.model != before:
        raise ValueError(
            f"--resume uses the model of the run, {before.preset} {before.size}: leave out --preset, --size and --model.set"
        )
    if chosen["--match-size"] and config.base.model is not None:
        raise ValueError("--match-size sets the size of a model of presets: leave it out with --base")
    for target in chosen["--match-size"][-1:]:
        config.model = _matched(config, target)
    check_trackers(config.watch.trackers)
    if config.name is not None:
        check_name(config.name)
    if chosen["--config"] and config.name and "--name" not in flags:
        config.name = new_name(Path(config.folder), config.name)  # the same settings again, but not the same folder
    return config, resume is not None


def _matched(config, target: str):
    """The choices of the model for --match-size."""
    from ..train.estimate import vocabulary_size
    from ..train.match_size import match_size

    model, wanted = match_size(config.model, target, vocabulary_size(config.data.tokenizer))
    print(f"--match-size {target}: {wanted:,} parameters, with --model.set {model.set[-1]}", file=sys.stderr)
    return model


def _mapping(path: str) -> dict:
    """The names and values of a YAML file for --attach."""
    from ..parsing import parse_yaml

    try:
        fields = parse_yaml(Path(path).read_text(encoding="utf-8"), "it")
    except (OSError, ValueError) as broken:
        raise ValueError(f"--attach {path} cannot be read: {getattr(broken, 'strerror', None) or broken}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--attach {path} must hold fields of AttachConfig, such as window: 256")
    return fields


def _fields(path: str) -> dict:
    """The fields of a config file only; fields that it lacks keep their values."""
    import yaml

    from ..train.config import TrainConfig

    TrainConfig.load(path)  # raises an error for an invalid file
    return yaml.safe_load(Path(path).read_text(encoding="utf-8"))


def _take(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]], str | None]:
    """The arguments with long flags; the values of --recipe, --config, --attach and --match-size; the value of --resume ("" for none given)."""
    rest: list[str] = []
    chosen: dict[str, list[str]] = {"--recipe": [], "--config": [], "--attach": [], "--match-size": []}
    resume, items, place = None, list(arguments), None
    while items:
        flag, equals, value = items.pop(0).partition("=")
        if flag in (*chosen, "--output-dir"):
            if not equals and not items:
                raise ValueError(f"{flag} needs a value")
            value = value if equals else items.pop(0)
            if flag in chosen:
                chosen[flag].append(value)
            else:
                place = value
        elif flag == "--resume":
            resume = value if equals else items.pop(0) if items and not items[0].startswith("-") else ""
        else:
            rest.append(SHORT_FLAGS.get(flag, flag) + equals + value)
    return rest + _place(place, {item.partition("=")[0] for item in rest}), chosen, resume


def _place(output_dir: str | None, flags: set[str]) -> list[str]:
    """--output-dir as --folder and --name: the folder of the run, or with --name its parent.

    >>> _place("runs/x", set()), _place("runs", {"--name"})
    (['--folder', 'runs', '--name', 'x'], ['--folder', 'runs'])
    """
    if output_dir is None:
        return []
    if "--name" in flags:
        return ["--folder", output_dir]
    path = Path(output_dir)
    path = path if path.name not in ("", "..") else path.resolve()
    if not output_dir or not path.name:
        raise ValueError(f"--output-dir {output_dir!r} must name the folder of the run, such as runs/first")
    return ["--folder", str(path.parent), "--name", path.name]


def _in_short(text: str, arguments: Sequence[str]) -> str:
    """An error message with the short flags that the user wrote."""
    given = {item.partition("=")[0] for item in arguments}
    for short, full in SHORT_FLAGS.items():
        text = re.sub(rf"{re.escape(full)}(?![\w.-])", short, text) if short in given else text
    return text


def _newest(rest: list[str], folder: str) -> Path:
    """The run of a --resume without a value: the one given by --name, or the newest with a config."""
    for flag, value in zip(rest, rest[1:]):
        folder = value if flag == "--folder" else folder
    for flag, value in zip(rest, rest[1:]):
        if flag == "--name":
            return Path(folder) / value
    found = sorted(Path(folder).glob("*/config.yaml"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ValueError(f"--resume: {folder} holds no run")
    return found[-1].parent
