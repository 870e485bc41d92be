"""Runs Python with the kernels compiled under the address and undefined-behaviour sanitizers.

`python tests/fuzz/sanitized.py tests/kernels` is `pytest tests/kernels` with them; `sanitized.py run.py ...` is `run.py` with them.
The first process only finds the sanitizers' libraries and starts a second one that has them loaded from its beginning.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
SANITIZE = [
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
]


def unavailable_reason() -> str | None:
    """Why there are no sanitizers here, in one sentence; None where there are."""
    if sys.platform != "linux":
        return "the sanitizers are loaded before Python on Linux only"
    return None if _libraries() else "the C++ compiler has no libasan.so"


def _libraries() -> list[str]:
    """libasan must be the first library of the process; libstdc++ beside it lets it see torch's exceptions."""
    from mnemos.backends.cpu import build

    try:
        compiler = build.compiler()[0]
    except build.Unavailable:
        return []
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(path):
            return []
        found.append(os.path.realpath(path))
    return found


def environment(cache: Path) -> dict[str, str]:
    """The environment of a sanitized child; compiled kernels go to `cache`."""
    own = dict(os.environ)
    own |= {
        "LD_PRELOAD": ":".join(_libraries()),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:handle_segv=1:max_allocation_size_mb=8192",
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
        "XDG_CACHE_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
        "MNEMOS_SANITIZED_CHILD": "1",
    }
    own["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "src"), str(HERE), *filter(None, [own.get("PYTHONPATH")])])
    return own


def child(arguments: list[str]) -> int:
    """Change the flags before any kernel is compiled, then run what was asked for."""
    from mnemos.backends.cpu import build

    kept = [flag for flag in build.FLAGS if not flag.startswith("-O")]
    build.FLAGS, build.COMPILE_SECONDS = [*kept, *SANITIZE], 3600
    kernels = [path.stem for path in Path(build.__file__).parent.glob("*.cpp")]
    reason = build.unavailable_reason(*kernels)
    if reason is not None:  # else tests of kernels would be skipped
        print(f"the kernels were not compiled under the sanitizers: {reason}", file=sys.stderr)
        return 2
    if arguments[0] == "run.py":
        sys.argv = arguments
        runpy.run_path(str(HERE / "run.py"), run_name="__main__")
        return 0
    import pytest

    return int(pytest.main(["-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", *arguments]))


def main() -> int:
    if os.environ.get("MNEMOS_SANITIZED_CHILD"):
        return child(sys.argv[1:])
    reason = unavailable_reason()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mnemos-sanitized"
    return subprocess.run([sys.executable, *sys.argv], env=environment(cache)).returncode


if __name__ == "__main__":
    sys.exit(main())
