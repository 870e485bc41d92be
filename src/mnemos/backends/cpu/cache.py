"""Compiled libraries on disk: in a folder that no other user can change, loaded only if they are what was written.

A library's name ends in the checksum of its content, `<stem>-<checksum>.so`. One rename therefore publishes both, and no crash can
leave a file whose checksum belongs to another.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import stat
import time
import warnings
from pathlib import Path

CHECKSUM_BYTES = 16
MAX_LINKS = 40  # symbolic links on the way to a folder, as the kernel counts them
STALE_SECONDS = 3600  # a compiler is given five minutes


class Unavailable(Exception):
    """Why there is no compiled backend here, in one sentence."""


def kernel_folder() -> Path:
    """The user's folder of compiled libraries, made if need be; `Unavailable` if another user could change what is in it."""
    if os.name != "posix":
        raise Unavailable("compiled kernels need a system where files have owners (Linux or macOS)")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mnemos" / "kernels"
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)
    unsafe = unsafe_part(folder)
    if unsafe is None and (folder.stat().st_uid != os.geteuid() or folder.stat().st_mode & 0o022):
        unsafe = str(folder)
    if unsafe is not None:
        sentence = f"{unsafe} can be written to by others or belongs to another user"
        advice = (
            f"compiled kernels are off: {sentence}; run `chmod go-w` on it, or set XDG_CACHE_HOME to another folder"
        )
        warnings.warn(advice, RuntimeWarning, stacklevel=2)
        raise Unavailable(sentence)
    return folder


def unsafe_part(folder: str | os.PathLike) -> str | None:
    """The first folder or link on the way to `folder` that another user could exchange; None if there is none.

    Every one of them must belong to root or to this user, and be writable by no one else unless it is sticky, as /tmp is. Checked
    from the root down: once a folder is safe, its window_tokens stay what they are.

    >>> unsafe_part("/")
    """
    here, links = os.sep, 0
    todo = ["", *Path(os.getcwd(), folder).parts[1:]][::-1]
    while todo:
        name = todo.pop()
        if name == "..":
            here = os.path.dirname(here)
            continue
        path = os.path.join(here, name) if name else here
        found = os.lstat(path)
        if found.st_uid not in (0, os.geteuid()):
            return path
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > MAX_LINKS:
                return path
            target = Path(os.readlink(path))
            todo += target.parts[target.is_absolute() :][::-1]
            here = os.sep if target.is_absolute() else here
        elif _others_may_write(found):
            return path
        else:
            here = path
    return None


def _others_may_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_ISVTX:
        return False
    return bool(found.st_mode & 0o002 or (found.st_mode & 0o020 and not _is_private_group(found.st_gid)))


def _is_private_group(group: int) -> bool:
    """Whether a group is this user's alone: the one of the same name that many systems make with each user (and umask 002)."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and not {*found.gr_mem} - {user.pw_name}


def checksum(descriptor: int) -> str:
    """Of everything in an open file."""
    value, offset = hashlib.blake2b(digest_size=CHECKSUM_BYTES), 0
    while block := os.pread(descriptor, 2**20, offset):
        value.update(block)
        offset += len(block)
    return value.hexdigest()


def publish(made: str, folder: Path, stem: str) -> None:
    """Sync a finished file, close it to others, and give it the name that has its checksum."""
    descriptor = os.open(made, os.O_RDONLY)
    try:
        os.chmod(made, 0o700)  # linkers follow the umask
        os.fsync(descriptor)
        os.replace(made, folder / f"{stem}-{checksum(descriptor)}.so")
    finally:
        os.close(descriptor)


def load(folder: Path, stem: str) -> ctypes.CDLL | None:
    """The library of this stem; None if there is none whose content has its checksum. A damaged one is removed."""
    for name in sorted(os.listdir(folder)):
        match = re.fullmatch(rf"{re.escape(stem)}-([0-9a-f]{{{2 * CHECKSUM_BYTES}}})\.so", name)
        descriptor = _open_own(folder / name) if match else None
        if match is None or descriptor is None:
            continue
        if checksum(descriptor) == match[1]:
            with contextlib.suppress(OSError):  # of another system, perhaps: to be compiled anew
                return _load(descriptor, folder / name)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(folder / name)
    return None


def _open_own(path: Path) -> int | None:
    """A descriptor of a regular file that belongs to this user and that nobody else can write; None for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return descriptor
    os.close(descriptor)
    return None


def _load(descriptor: int, path: Path) -> ctypes.CDLL:
    """Load what the descriptor holds, not what the path has become.

    The descriptor stays open: the loader knows a library by its name, and /proc/self/fd/7 must not come to mean another.
    """
    held = f"/proc/self/fd/{descriptor}"
    return ctypes.CDLL(held if os.path.exists(held) else str(path))


def remove_stale(folder: Path) -> None:
    """Delete the files of compilers that were killed."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.lstat().st_mtime > STALE_SECONDS:
                part.unlink()
