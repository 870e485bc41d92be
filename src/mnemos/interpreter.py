"""Command lines of Python subprocesses with the module search path of this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(module: str) -> list[str]:
    """The command that calls `module.main()` in a subprocess.

    `python -m` and `python -c` put the working folder first on the path, so a numpy.py in it would run. This command sets the path of
    this process instead, before anything is imported. (Python's own switch for this, -P, needs Python 3.11.)

    >>> command("mnemos.data.processes")[-1].endswith("from mnemos.data.processes import main; main()")
    True
    """
    paths = [os.path.abspath(path) for path in sys.path if path]  # "" is the working folder
    package = str(Path(__file__).parents[1])
    paths += [] if package in paths else [package]
    code = f"import sys; sys.path[:] = {paths!r}; from {module} import main; main()"
    flags = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    return [sys.executable, *(flag for flag, is_set in flags.items() if is_set), "-c", code]
