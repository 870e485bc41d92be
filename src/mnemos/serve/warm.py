"""`WarmSessions`: the sessions whose state is in memory between turns; all others are files.

Functions here read and write files: they are called in threads for that, never in the engine's or the event loop's.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from ..sessions import Session, SessionStore
from ..sessions.store import Version
from .errors import ApiError

Key = tuple[str, str]  # owner and name


class Claims:
    """Names of sessions that are being changed; nobody else changes them meanwhile.

    >>> claims = Claims()
    >>> with claims.hold("", ["ann"]):
    ...     ("", "ann") in claims.taken
    True
    """

    def __init__(self) -> None:
        self.taken: set[Key] = set()
        self._lock = threading.Lock()

    def take(self, owner: str, names: Iterable[str]) -> None:
        keys = {(owner, name) for name in names}
        with self._lock:
            busy = keys & self.taken
            if busy:
                name = sorted(busy)[0][1]
                raise ApiError(409, f"session {name!r} is busy with another request: try again", "session_busy")
            self.taken |= keys

    def free(self, owner: str, names: Iterable[str]) -> None:
        with self._lock:
            self.taken -= {(owner, name) for name in names}

    @contextmanager
    def hold(self, owner: str, names: Iterable[str]) -> Generator[None]:
        names = list(names)
        self.take(owner, names)
        try:
            yield
        finally:
            self.free(owner, names)


@dataclasses.dataclass
class _Warm:
    session: Session
    version: Version
    size: int


class WarmSessions:
    """Sessions by owner and name: the most recent ones up to `warm_bytes` in memory, and all in the store.

    A warm session is used only if its file is still the one that this process wrote last: another process may share the store.
    """

    def __init__(self, model: Any, tokenizer: Any, store: SessionStore, warm_bytes: int, undo_depth: int):
        self.model, self.tokenizer, self.store = model, tokenizer, store
        self.warm_bytes, self.undo_depth = warm_bytes, undo_depth
        self._warm: OrderedDict[Key, _Warm] = OrderedDict()
        self._lock = threading.Lock()
        self.size = 0  # bytes

    def __len__(self) -> int:
        return len(self._warm)

    def warm(self, owner: str, name: str) -> tuple[Session, Version] | None:
        """The session and the version of its file, if it is in memory and nobody else has changed its file."""
        with self._lock:
            found = self._warm.get((owner, name))
        if found is None:
            return None
        if self.store.version(name, owner) != found.version:
            self.drop(owner, name)
            return None
        with self._lock:
            if (owner, name) in self._warm:
                self._warm.move_to_end((owner, name))
        return found.session, found.version

    def open(self, owner: str, name: str) -> tuple[Session, Version]:
        """The session and the version of its file. Raises a FileNotFoundError if there is none."""
        found = self.warm(owner, name)
        if found is not None:
            return found
        version = self.store.version(name, owner)
        try:
            session = Session.load(
                self.model, self.tokenizer, self.store, name, owner=owner, undo_depth=self.undo_depth
            )
        except ValueError as wrong:
            reason = str(wrong).replace(str(self.store.path(name, owner)), f"session {name!r}")
            raise ApiError(409, reason, "session_unusable") from None
        if version is None or self.store.version(name, owner) != version:
            raise ApiError(409, f"session {name!r} is being changed by another process: try again", "session_changed")
        return session, version

    def new(self, owner: str, name: str, system: str = "", title: str = "") -> Session:
        """A session that is not in the store yet."""
        return Session(
            self.model, self.tokenizer, None, name, owner=owner, system=system, title=title, undo_depth=self.undo_depth
        )

    def branch(self, owner: str, name: str, new: str) -> Session:
        """A session that continues another one under a new name; the other one stays as it is."""
        record = self.open(owner, name)[0].record
        copied = dataclasses.replace(
            record, name=new, turns=list(record.turns), pending=list(record.pending), created=time.time()
        )
        return Session.from_record(self.model, self.tokenizer, copied, None, undo_depth=self.undo_depth)

    def save(self, session: Session, version: Version | None) -> None:
        """Write a session to disk, if its file is still of this version, and keep it warm."""
        from ..sessions import model_hash

        session.record.model_hash = model_hash(self.model)
        self.put(session, self.store.replace(session.record, version))

    def put(self, session: Session, version: Version) -> None:
        """Keep a session in memory; the ones that were used longest ago leave."""
        key = (session.record.owner, session.name)
        size = session.state_bytes + session.undo_bytes
        with self._lock:
            self._remove(key)
            if size > self.warm_bytes:
                return
            self._warm[key] = _Warm(session, version, size)
            self.size += size
            while self.size > self.warm_bytes:
                self._remove(next(iter(self._warm)))

    def drop(self, owner: str, name: str) -> None:
        """Forget the state in memory; the file stays."""
        with self._lock:
            self._remove((owner, name))

    def _remove(self, key: Key) -> None:
        found = self._warm.pop(key, None)
        if found is not None:
            self.size -= found.size
