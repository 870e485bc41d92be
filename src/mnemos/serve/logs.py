"""Structured logs: one JSON object per line on standard error. They hold no texts and no names of sessions unless that is asked for."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any, TextIO


class Log:
    """Writes events. contents: also write prompts, answers and names of sessions.

    >>> import io
    >>> out = io.StringIO()
    >>> Log(out).event("started", port=8000, contents={"prompt": "hi"})
    >>> json.loads(out.getvalue())["event"], "hi" in out.getvalue()
    ('started', False)
    """

    def __init__(self, file: TextIO | None = None, contents: bool = False):
        self.file, self.contents, self._lock = file, contents, threading.Lock()
        self.failed = 0

    def event(self, event: str, *, contents: dict[str, Any] | None = None, **fields: Any) -> None:
        """Write one event. contents: fields that are written only if contents are logged."""
        line = {"time": round(time.time(), 3), "event": event} | fields
        if self.contents and contents:
            line |= contents
        text = json.dumps(line, default=str)  # ASCII, so that no control character reaches a terminal
        try:
            with self._lock:
                print(text, file=self.file or sys.stderr, flush=True)
        except (OSError, ValueError):  # a closed pipe, or a full disk: answers go on
            self.failed += 1
