"""`SessionStore`: a folder of session files, folder/<hash of the owner>/<name>.safetensors.

Several processes may use one folder: every change is made under a lock of its owner, and a file is complete or absent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock

from ..atomic_io import part_of, sync_folder
from .record import SessionInfo, SessionRecord, Turn, check_name, exported, read_info, read_turns, rewrite

SUFFIX = ".safetensors"
OWNER_FOLDER = re.compile("[0-9a-f]{32}")
MAX_INFOS = 2**17  # headers in memory
MARGIN_BYTES = 2**20  # of the disk, for other files
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Version: TypeAlias = tuple[int, int, int]
Infos: TypeAlias = list[SessionInfo]  # inside the class, `list` is its method
Turns: TypeAlias = list[Turn]
Names: TypeAlias = list[str]
Paths: TypeAlias = list[Path]


class StoreFull(OSError):
    """A session does not fit: the disk is full, or a quota is reached. The file that was there before stays as it is."""


class SessionChanged(ValueError):
    """Another process has written or deleted the session since it was opened."""


class SessionStore:
    """Sessions in a folder, by owner and name.

    folder: created if it does not exist. max_bytes, max_sessions: quota of each owner (None: no limit). ttl: seconds after which
    `sweep` deletes a session that was not saved again (None: never). Names are those of `check_name`; a missing session is a
    FileNotFoundError, an existing target of fork, rename and import_ a FileExistsError, a damaged file a ValueError.

    >>> import tempfile
    >>> store = SessionStore(tempfile.mkdtemp(), max_sessions=2)
    >>> store.save(SessionRecord("ann", title="first"))
    >>> store.fork("ann", "bob")
    >>> [info.name for info in store.list()]
    ['ann', 'bob']
    >>> store.save(SessionRecord("eve"))
    Traceback (most recent call last):
    mnemos.sessions.store.StoreFull: [Errno 122] the owner has 2 sessions, which is the quota: delete one first
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        max_bytes: int | None = None,
        max_sessions: int | None = None,
        ttl: float | None = None,
    ):
        for name, limit in (("max_bytes", max_bytes), ("max_sessions", max_sessions), ("ttl", ttl)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name}={limit!r:.40} must be None or > 0")
        self.folder, self.max_bytes, self.max_sessions, self.ttl = Path(folder), max_bytes, max_sessions, ttl
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file, but a folder is expected for sessions")
        self._infos: dict[Path, tuple[Version, SessionInfo]] = {}  # headers that were read, by file
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.remove_leftovers()

    def path(self, name: str, owner: str = "") -> Path:
        """The file of a session, whether it exists or not."""
        return self._home(owner) / f"{check_name(name)}{SUFFIX}"

    def __contains__(self, name: str) -> bool:
        return self.exists(name)

    def exists(self, name: str, owner: str = "") -> bool:
        """Whether the owner has a session of this name."""
        return _is_own_file(self.path(name, owner))

    def list(self, owner: str = "", skipped: Callable[[str], Any] | None = None) -> Infos:
        """The owner's sessions in the order of their names, from the headers of their files. skipped: called with a sentence about each
        damaged file, which is left out."""
        found = []
        for path in self._files(self._home(owner)):
            try:
                found.append(self._info(path))
            except FileNotFoundError:  # deleted since
                continue
            except ValueError as damaged:
                if skipped is not None:
                    skipped(str(damaged))
        return found

    def load(self, name: str, model: Any, owner: str = "") -> SessionRecord:
        """The session of this name, for the model that it was made with."""
        path = self._existing(name, owner)
        record = SessionRecord.load(path, model)
        if (record.name, record.owner) != (name, owner):
            raise ValueError(f"{path} holds the session {record.name!r} of another name or owner")
        return record

    def version(self, name: str, owner: str = "") -> Version | None:
        """A value that changes whenever the file of a session is written; None if there is no such session."""
        path = self.path(name, owner)
        return _version(path) if _is_own_file(path) else None

    def save(self, record: SessionRecord) -> None:
        """Write a session to disk; it replaces the one of its name and owner. Raises `StoreFull` and keeps the old file if it does not fit."""
        path = self.path(record.name, record.owner)
        with self._changing(record.owner):
            self._check_quota(path, 0 if self.max_bytes is None else record.file_bytes)
            record.save(path)

    def replace(self, record: SessionRecord, version: Version | None) -> Version:
        """`save`, if the file is still of this `version` (None: there is no file yet); returns the new one. Raises `SessionChanged`
        and writes nothing if somebody else has written or deleted the session since."""
        path = self.path(record.name, record.owner)
        with self._changing(record.owner):
            if self.version(record.name, record.owner) != version:
                raise SessionChanged(f"session {record.name!r} was changed by another process: send the turn again")
            self._check_quota(path, 0 if self.max_bytes is None else record.file_bytes)
            record.save(path)
            return _version(path)

    def delete(self, name: str, owner: str = "") -> None:
        """Delete a session."""
        with self._changing(owner):
            path = self._existing(name, owner)
            path.unlink()
            sync_folder(path.parent)

    def fork(self, name: str, new: str, owner: str = "") -> None:
        """Copy a session under a new name; each continues without the other."""
        with self._changing(owner):
            source, target = self._existing(name, owner), self._free(new, owner)
            self._check_quota(target, source.stat().st_size)
            now = time.time()
            rewrite(source, target, name=new, created=now, updated=now)

    def rename(self, name: str, new: str, owner: str = "", title: str | None = None) -> None:
        """Give a session another name. title: another title too; the session gets both or none."""
        with self._changing(owner):
            source, target = self._existing(name, owner), self._free(new, owner)
            rewrite(source, target, name=new, **({} if title is None else {"title": title}))
            source.unlink()
            sync_folder(source.parent)

    def retitle(self, name: str, title: str, owner: str = "") -> None:
        """Give a session another title."""
        with self._changing(owner):
            path = self._existing(name, owner)
            rewrite(path, path, title=title)

    def export(self, name: str, target: str | os.PathLike, owner: str = "") -> None:
        """Write a copy of a session to a file outside the store, without its owner."""
        with typed_errors():
            rewrite(self._existing(name, owner), target, owner="")

    def exported(self, name: str, owner: str = "") -> bytes:
        """The contents of the file that `export` writes."""
        return exported(self._existing(name, owner))

    def info(self, name: str, owner: str = "") -> SessionInfo:
        """The header of a session's file."""
        return self._info(self._existing(name, owner))

    def _info(self, path: Path) -> SessionInfo:
        """The header of a file, which is read once per version of the file."""
        version, known = _version(path), self._infos.get(path)
        if known is None or known[0] != version:
            if len(self._infos) >= MAX_INFOS:
                self._infos.clear()
            known = self._infos[path] = version, read_info(path)
        return known[1]

    def turns(self, name: str, owner: str = "") -> Turns:
        """The messages of a session, without its state."""
        return read_turns(self._existing(name, owner))

    def check_room(self, name: str, owner: str = "", added: int = 0) -> None:
        """Raise `StoreFull` if a session of about `added` bytes does not fit into the quota, or not twice onto the disk."""
        path = self.path(name, owner)
        if path.parent.is_dir():
            self._check_quota(path, added)
        free = shutil.disk_usage(self.folder).free
        if free < 2 * added + MARGIN_BYTES:
            raise StoreFull(errno.ENOSPC, f"the disk of the sessions has {free:,} bytes left, which is too little")

    def import_(self, source: str | os.PathLike, model: Any, name: str | None = None, owner: str = "") -> str:
        """Add a session file that `export` wrote, after all checks; returns its name. name: another name than that of the file."""
        record = SessionRecord.load(source, model)
        record.name, record.owner, record.updated = name or record.name, owner, time.time()
        with self._changing(owner):
            target = self._free(record.name, owner)
            self._check_quota(target, 0 if self.max_bytes is None else record.file_bytes)
            record.save(target)
        return record.name

    def sweep(self, now: float | None = None) -> Names:
        """Delete the sessions of all owners that are older than `ttl`; returns their names. Other files stay."""
        if self.ttl is None:
            return []
        oldest = (time.time() if now is None else now) - self.ttl
        deleted = []
        for home in self._homes():
            with self._locked(home):
                for path in self._files(home):
                    with contextlib.suppress(ValueError, FileNotFoundError):  # not a session, or gone
                        if self._info(path).updated < oldest:
                            path.unlink()
                            deleted.append(path.name.removesuffix(SUFFIX))
        return deleted

    def remove_leftovers(self) -> None:
        """Remove the temporary files that a killed process left. Writers hold the lock, so no file in use is removed."""
        for home in self._homes():
            with self._locked(home):
                for path in home.iterdir():
                    final = part_of(path.name)
                    if final is not None and _session_name(final) is not None and _is_own_file(path):
                        path.unlink(missing_ok=True)

    def usage(self, owner: str = "") -> tuple[int, int]:
        """The number of the owner's sessions and the bytes of their files."""
        sizes = []
        for path in self._files(self._home(owner)):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        return len(sizes), sum(sizes)

    def _home(self, owner: str) -> Path:
        if not isinstance(owner, str):
            raise ValueError(f"owner={owner!r:.40} must be a text")
        return self.folder / hashlib.sha256(owner.encode(errors="surrogatepass")).hexdigest()[:32]

    def _homes(self) -> Paths:
        found = [p for p in self.folder.iterdir() if OWNER_FOLDER.fullmatch(p.name)]
        return sorted(p for p in found if p.is_dir() and not p.is_symlink())

    def _files(self, home: Path) -> Paths:
        """The session files in an owner's folder, by name."""
        if home.is_symlink() or not home.is_dir():
            return []
        return sorted(p for p in home.iterdir() if _session_name(p.name) is not None and _is_own_file(p))

    def _existing(self, name: str, owner: str) -> Path:
        path = self.path(name, owner)
        if path.parent.is_symlink() or not _is_own_file(path):
            raise FileNotFoundError(errno.ENOENT, f"there is no session {name!r}", str(path))
        return path

    def _free(self, name: str, owner: str) -> Path:
        path = self.path(name, owner)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, f"session {name!r} exists already", str(path))
        return path

    def _check_quota(self, path: Path, added: int) -> None:
        """Raise `StoreFull` if a file of about `added` bytes at `path` exceeds the quota of its owner."""
        if self.max_bytes is None and self.max_sessions is None:
            return
        others = [p.stat().st_size for p in self._files(path.parent) if p != path]
        if self.max_sessions is not None and len(others) >= self.max_sessions:
            raise StoreFull(errno.EDQUOT, f"the owner has {len(others)} sessions, which is the quota: delete one first")
        if self.max_bytes is not None and sum(others) + added > self.max_bytes:
            raise StoreFull(
                errno.EDQUOT,
                f"the session needs {added:,} bytes beside {sum(others):,}, but the quota is {self.max_bytes:,}",
            )

    @contextlib.contextmanager
    def _changing(self, owner: str) -> Generator[None]:
        """The lock of an owner, whose folder is created; errors of a full disk are `StoreFull`."""
        home = self._home(owner)
        with typed_errors():
            if home.is_symlink():
                raise ValueError(f"{home} is a link, but a folder of the store is expected")
            if not home.is_dir():
                home.mkdir(exist_ok=True, mode=0o700)
                sync_folder(self.folder)
            with self._locked(home):
                yield

    @staticmethod
    def _locked(home: Path) -> FileLock:
        return FileLock(home / ".lock")


def _session_name(file_name: str) -> str | None:
    """The name of the session of a file; None for a file that is not a session's."""
    name = file_name.removesuffix(SUFFIX)
    if name == file_name:
        return None
    with contextlib.suppress(ValueError):
        return check_name(name)
    return None


def _version(path: Path) -> Version:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _is_own_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


@contextlib.contextmanager
def typed_errors() -> Generator[None]:
    """Errors of a full disk are raised as `StoreFull`."""
    try:
        yield
    except StoreFull:
        raise
    except OSError as wrong:
        if wrong.errno not in FULL:
            raise
        raise StoreFull(wrong.errno, f"the disk is full: {wrong.strerror}", wrong.filename) from wrong
