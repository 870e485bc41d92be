"""The command line, `mnemos <command>`: one module per command, each imported only when it runs.

What a user got wrong is one sentence and exit status 2.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from .. import __version__
from .ablate import ablate
from .analyze import analyze
from .data import data
from .demo import demo
from .eval import evaluate
from .export import export
from .generate import generate
from .inspect import inspect
from .presets import presets
from .reproduce import reproduce
from .runs import runs
from .tokenizer import tokenizer
from .train import run_train, train

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
    "reproduce": reproduce,
    "runs": runs,
    "tokenizer": tokenizer,
    "train": train,
}
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
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
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="mnemos",
            args=arguments,
            description="Sequence models whose memory learns at test time. Each command has --help; --version prints which this is.",
        )
    except ValueError as wrong:
        print(f"mnemos: {wrong}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = None
        return 0
    except OSError as wrong:  # a disk that is full, a folder that is someone else's
        if wrong.errno not in UNWRITABLE:
            raise
        print(f"mnemos: {wrong.filename or 'a file'} cannot be written: {wrong.strerror}", file=sys.stderr)
        return 1
    except ImportError as missing:
        if (missing.name or "").split(".")[0] != "transformers":
            raise
        print("mnemos: this command needs the extra lm: pip install 'mnemos[lm]'", file=sys.stderr)
        return 2
    return 0
