"""The command line, `mnemos <command>`: one module per command, each imported only when it runs.

What a user got wrong is one sentence and exit status 2.
"""

from __future__ import annotations

import errno
import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from .. import __version__
from ..choices import unknown
from .ablate import ablate
from .analyze import analyze
from .data import data
from .demo import demo
from .eval import evaluate
from .export import export
from .generate import generate
from .inspect import inspect
from .presets import presets
from .runs import runs
from .tokenizer import tokenizer
from .train import run_train, train
from .usage import parsed

COMMANDS: dict[str, Callable[..., Any]] = {
    "ablate": ablate,
    "analyze": analyze,
    "data": data,
    "demo": demo,
    "eval": evaluate,
    "export": export,
    "generate": generate,
    "inspect": inspect,
    "presets": presets,
    "runs": runs,
    "tokenizer": tokenizer,
    "train": train,
}
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
OWN_ARGUMENTS = {"train": run_train}  # commands whose flags are known only once their modules are imported


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"mnemos {__version__}")
        return 0
    try:
        if arguments and arguments[0] in OWN_ARGUMENTS:
            return OWN_ARGUMENTS[arguments[0]](arguments[1:])
        if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            raise unknown("command", arguments[0], COMMANDS)
        _parse(arguments)()
    except ValueError as wrong:
        print(f"mnemos: {wrong}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = None
        return 0
    except OSError as wrong:  # a disk that is full, a folder that is someone else's
        if wrong.errno in UNWRITABLE:
            print(f"mnemos: {_named(wrong.filename)} cannot be written: {wrong.strerror}", file=sys.stderr)
        elif wrong.filename is not None:
            print(f"mnemos: {_named(wrong.filename)} cannot be used: {wrong.strerror}", file=sys.stderr)
        else:
            raise
        return 1
    except (MemoryError, RuntimeError) as wrong:
        if not isinstance(wrong, MemoryError) and not any(words in str(wrong) for words in OUT_OF_MEMORY):
            raise
        print("mnemos: out of memory: choose a smaller model, batch or length", file=sys.stderr)
        return 1
    except ImportError as missing:
        if (missing.name or "").split(".")[0] != "transformers":
            raise
        print("mnemos: this command needs the extra lm: pip install 'mnemos[lm]'", file=sys.stderr)
        return 2
    return 0


def _named(filename: object) -> str:
    """A file as the user named it, not as the temporary one that takes its place at the end."""
    return re.sub(r"\.([^/]+)\.[0-9a-f]{8,}\.part$", r"\1", str(filename or "a file"))[:200]


def _parse(arguments: Sequence[str]) -> Callable[[], Any]:
    """The command that the arguments ask for, to be called once they are read."""

    def later(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def bound(*args, **kwargs):
            return functools.partial(command, *args, **kwargs)

        return bound

    return parsed(
        lambda: tyro.extras.subcommand_cli_from_dict(
            {name: later(command) for name, command in COMMANDS.items()},
            prog="mnemos",
            args=arguments,
            description="Sequence models whose memory learns at test time. Each command has --help; --version prints which this is.",
        ),
        f"mnemos {arguments[0]}" if arguments and arguments[0] in COMMANDS else "mnemos",
    )
