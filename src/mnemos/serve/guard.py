"""Middlewares without buffering: limits of bodies, checks of the browser's headers, and one line of log per request."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .errors import ApiError, encode
from .service import Service

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
IMPORT = "/v1/sessions/import"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of a header."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


class Guard:
    """The outermost application: no body is read beyond its limit, and each request is counted and logged.

    is_local: only requests to a name of this machine are answered, so that no page of the web reaches the server by its own name.
    """

    def __init__(self, app: App, service: Service, is_local: bool = True):
        self.app, self.service, self.is_local = app, service, is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        async def refuse(error: ApiError) -> None:
            if not status:
                await _answer(send_counted, error)

        try:
            body = _Body(receive, self._limit(scope), self.service.limits.body_seconds)
            self._check(scope, body.limit)
            await self.app(scope, body.receive, send_counted)
        except ApiError as error:
            await refuse(error)
        except (
            Exception
        ) as failed:  # not raised again: the traceback could have contents; an unfinished answer is cut off
            self.service.log.event("error", kind=type(failed).__name__, contents={"reason": str(failed)})
            await refuse(ApiError(500, "the server could not answer; its log names the reason", "server_error"))
        finally:
            self._log(scope, status, time.perf_counter() - started)

    def _limit(self, scope: Scope) -> int:
        limits = self.service.limits
        return limits.max_import_bytes if scope["path"] == IMPORT else limits.max_body_bytes

    def _check(self, scope: Scope, limit: int) -> None:
        """Raise an `ApiError` for a request that is refused by its headers alone."""
        length, origin, host = (header(scope, name) for name in (b"content-length", b"origin", b"host"))
        if self.is_local and (host is None or not LOCAL.fullmatch(host)):
            raise ApiError(
                403, "the server answers at localhost only, and the Host header names another one", "wrong_host"
            )
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(403, "the server does not answer pages of other sites", "wrong_origin")
        if length is not None and (not length.isdecimal() or int(length[:20]) > limit):
            raise ApiError(413, f"the body may have at most {limit:,} bytes", "body_too_large")

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        labels = {"route": route, "method": _method(scope["method"]), "status": str(status)}
        self.service.metrics.count("mnemos_requests_total", 1, **labels)
        contents = {"path": scope["path"]}
        self.service.log.event("request", **labels, ms=round(1e3 * seconds, 1), contents=contents)


class _Body:
    """The messages of a request's body, counted; it must arrive in time."""

    def __init__(self, receive: Receive, limit: int, seconds: float):
        self._receive, self.limit, self._size, self._is_whole = receive, limit, 0, False
        self._deadline = time.monotonic() + seconds

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._deadline - time.monotonic()))
        except asyncio.TimeoutError:
            raise ApiError(408, "the body did not arrive in time", "timeout") from None
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
            if self._size > self.limit:
                raise ApiError(413, f"the body may have at most {self.limit:,} bytes", "body_too_large")
        return message


def _method(method: str) -> str:
    return method if method in ("GET", "HEAD", "POST", "PATCH", "DELETE", "PUT", "OPTIONS") else "other"


async def _answer(send: Send, error: ApiError) -> None:
    body = encode(error.body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
    if error.status in (408, 413):  # the rest of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
