"""The command line, `mnemos <command>`: one module per command, each imported only when it runs.

Errors of the user are one sentence on stderr and exit status 2.
"""

from __future__ import annotations

import errno
import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import __version__
from .commands import COMMANDS, find_command
from .commands import Command as Command
from .commands import register_command as register_command
from .help import DESCRIPTION, print_help
from .imports import import_all, take_imports

UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
ALL_OPTIONS = "(mnemos --help lists all options)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except ValueError as wrong:
        print(f"mnemos: {wrong}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mnemos: interrupted", file=sys.stderr)
        return 130  # as shells report a process that SIGINT ended
    except BrokenPipeError:  # the reader of our output closed it
        sys.stdout = None
        return 0
    except OSError as wrong:  # a full disk, or a folder without permission
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


def _run(arguments: list[str]) -> int:
    arguments, modules = take_imports(arguments)
    import_all(modules)
    if not arguments:
        raise ValueError(f"a command is missing: choose one of {', '.join(COMMANDS)} {ALL_OPTIONS}")
    first, *rest = arguments
    if first == "--version" and not rest:
        print(f"mnemos {__version__}")
    elif first in ("-h", "--help"):
        print_help()
        raise SystemExit(0)
    elif first.startswith("--tyro-"):  # completion for shells
        _parse_all(arguments)
    elif first.startswith("-"):
        raise ValueError(f"there is no option {first} {ALL_OPTIONS}")
    else:
        command = find_command(first)
        if command.parses_arguments:
            return command.load()(rest)
        status = _parse(command, rest)()
        return status if type(status) is int else 0
    return 0


def _named(filename: object) -> str:
    """The name that the user gave, for a temporary file that is renamed to it."""
    return re.sub(r"\.([^/]+)\.[0-9a-f]{8,}\.part$", r"\1", str(filename or "a file"))[:200]


def _parse(command: Command, arguments: Sequence[str]) -> Callable[[], Any]:
    """The command bound to its options, to be called once all are read."""
    import tyro

    from .usage import parsed

    function, name = _later(command.load()), f"mnemos {command.name}"
    return parsed(lambda: tyro.cli(function, prog=name, args=arguments), name)


def _parse_all(arguments: Sequence[str]) -> None:
    """Handle tyro's own options, which apply to all commands."""
    import tyro

    from .usage import parsed

    def nothing() -> None: ...

    functions = {
        name: nothing if command.parses_arguments else _later(command.load()) for name, command in COMMANDS.items()
    }
    parsed(
        lambda: tyro.extras.subcommand_cli_from_dict(functions, prog="mnemos", args=arguments, description=DESCRIPTION),
        "mnemos",
    )


def _later(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bound(*args, **kwargs):
        return functools.partial(function, *args, **kwargs)

    return bound
