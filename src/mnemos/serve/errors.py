"""Errors of requests: one sentence in the form of OpenAI's API."""

from __future__ import annotations

import json
import re
from typing import Any

from ..sessions import SessionChanged, StoreFull

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    411: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    507: "storage_full_error",
}
MAX_MESSAGE = 400  # characters
PATH = re.compile(r"\S*/([^/\s]+)\.safetensors")


class ApiError(Exception):
    """A request that cannot be answered. status: of HTTP. message: one sentence. code: a word for programs.

    >>> ApiError(404, "there is no session 'ann'", "session_not_found").body()["error"]["type"]
    'not_found_error'
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        message = " ".join(self.message.split())
        message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        found = {}
        if self.status in (429, 503):
            found["retry-after"] = "1"
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def encode(value: Any) -> bytes:
    """JSON in UTF-8; half surrogate pairs, which JSON can escape and UTF-8 cannot hold, are replaced.

    >>> encode({"a": "é"})
    b'{"a":"\\xc3\\xa9"}'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode(errors="replace")


def api_error(wrong: BaseException) -> ApiError:
    """The error of the API for an error of a file, a session or the engine. No path of this machine leaves the server."""
    if isinstance(wrong, ApiError):
        return wrong
    if isinstance(wrong, StoreFull):
        return ApiError(507, f"{wrong.strerror}", "storage_full")
    if isinstance(wrong, FileNotFoundError):
        return ApiError(404, f"{wrong.strerror}", "session_not_found")
    if isinstance(wrong, FileExistsError):
        return ApiError(409, f"{wrong.strerror}", "session_exists")
    if isinstance(wrong, SessionChanged):
        return ApiError(409, str(wrong), "session_changed")
    if isinstance(wrong, TimeoutError):
        return ApiError(503, "the time of the request is over: the server is busy", "timeout")
    if isinstance(wrong, ValueError):
        return ApiError(400, PATH.sub(r"session \1", str(wrong)))
    return ApiError(500, "the server could not answer; its log names the reason", "server_error")


def engine_error(wrong: Exception, continues: bool) -> ApiError:
    """The error of the API for a job that failed. continues: from a session's state, which may be an imported one that overflows."""
    if continues and isinstance(wrong, ValueError):
        sentence = "the model cannot continue from the state of this session: undo its last turn, or delete it"
        return ApiError(409, sentence, "session_unusable")
    if isinstance(wrong, TimeoutError):
        return api_error(wrong)
    if isinstance(wrong, RuntimeError) and "shutting down" in str(wrong):
        return ApiError(503, "the server is shutting down", "shutting_down")
    return ApiError(500, "the server could not answer; its log names the reason", "server_error")
