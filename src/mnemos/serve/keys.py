"""`Keys`: who may use the server. One key per line of a file: `NAME KEY`, or a key alone."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from pathlib import Path

OPERATOR = "metrics"  # the name whose key reads /metrics, and nothing else
NAME = re.compile("[A-Za-z0-9_.-]{1,64}")
LEAST_KEY, MOST_KEY = 16, 256  # characters
MAX_FILE_BYTES = 2**20


class Keys:
    """API keys and the owner that each belongs to. Keys are kept as hashes, and all are compared in constant time.

    keys: key -> name of the owner. Without keys everybody is the owner "".

    >>> keys = Keys({"secret-key-of-ann": "ann"})
    >>> keys.owner("Bearer secret-key-of-ann"), keys.owner("Bearer wrong"), Keys({}).owner(None)
    ('ann', None, '')
    """

    def __init__(self, keys: dict[str, str]):
        self._owners = [(hashlib.sha256(key.encode()).digest(), name) for key, name in keys.items()]

    def __bool__(self) -> bool:
        return bool(self._owners)

    @property
    def has_operator(self) -> bool:
        return any(name == OPERATOR for _, name in self._owners)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Keys:
        """Read a file of keys: `NAME KEY` or `KEY` per line; # begins a comment. A file that everybody can read is refused."""
        file = Path(path)
        try:
            found = file.stat()
            if os.name == "posix" and found.st_mode & 0o007:
                raise ValueError(f"{path} can be read by everybody on this machine: chmod 600 {path}")
            if found.st_size > MAX_FILE_BYTES:
                raise ValueError(f"{path} has {found.st_size:,} bytes, which is too much for a file of keys")
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as wrong:
            raise ValueError(f"{path} cannot be read as a file of keys: {type(wrong).__name__}") from None
        keys: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            key = words[-1]
            name = words[0] if len(words) == 2 else f"key-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
            if len(words) > 2 or not NAME.fullmatch(name) or not LEAST_KEY <= len(key) <= MOST_KEY or not key.isascii():
                raise ValueError(
                    f"{path}, line {number}: a line is NAME KEY or KEY, the key {LEAST_KEY} to {MOST_KEY} ASCII characters"
                )
            if key in keys:
                raise ValueError(f"{path}, line {number}: the key is there twice")
            keys[key] = name
        if not keys:
            raise ValueError(f"{path} has no key: write one line NAME KEY per user")
        return cls(keys)

    def owner(self, header: str | None) -> str | None:
        """The owner of an Authorization header; None if it has no valid key."""
        if not self._owners:
            return ""
        scheme, _, key = (header or "").partition(" ")
        given = hashlib.sha256(key.strip().encode(errors="replace")).digest()
        owner = None
        for digest, name in self._owners:
            if hmac.compare_digest(digest, given):
                owner = name
        return owner if scheme.lower() == "bearer" else None
