"""Answers over HTTP: server-sent events, and the client's leaving."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from .answers import Answer
from .errors import ApiError, encode
from .jobs import Event
from .service import Service

T = TypeVar("T")
BEAT_SECONDS = 15.0  # a comment is sent after this time without an event, so that no proxy closes the connection
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def data(value: Any) -> bytes:
    """One event with a JSON value.

    >>> data({"a": 1})
    b'data: {"a":1}\\n\\n'
    """
    return b"data: " + encode(value) + b"\n\n"


def named(value: dict[str, Any]) -> bytes:
    """One event with the name of its "type"."""
    return b"event: " + value["type"].encode() + b"\n" + data(value)


async def until_saved(events: AsyncIterator[Event], hold: list[Event]) -> AsyncIterator[Event]:
    """The events; those that end an answer come when the turn is on disk. hold: an empty list."""
    async for event in events:
        if event.reason is None:
            yield event
        else:
            hold.append(event)
    for event in hold:
        yield event


class EventStream(Response):
    """Sends the pieces of `pieces(answer)`, and cancels the answer if the client leaves.

    If the client leaves after the first piece of text, the turn of a session stays, with the text that was generated.
    """

    def __init__(self, service: Service, answer: Answer, pieces: Callable[[Answer], AsyncIterator[bytes]]):
        super().__init__()
        self.service, self.answer, self.pieces = service, answer, pieces
        self._sent = 0.0
        self._has_text = False

    async def __call__(self, scope, receive, send) -> None:
        tasks = [asyncio.create_task(_left(receive)), asyncio.create_task(self._pump(send))]
        beat = asyncio.create_task(self._beat(send))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not tasks[1].done() or tasks[1].cancelled():
                self.service.cancel(self.answer, keeps_part=self._has_text)
            for task in (*tasks, beat):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await tasks[1]

    async def _pump(self, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            async for piece in self.pieces(self.answer):
                self._sent = time.monotonic()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                self._has_text = bool(self.answer.job.first_token)
        except ApiError as error:
            await send({"type": "http.response.body", "body": data(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _beat(self, send) -> None:
        self._sent = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if time.monotonic() - self._sent >= BEAT_SECONDS:
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})


async def unless_left(request: Request, service: Service, answer: Answer) -> None:
    """Wait for the end of an answer. If the client leaves before it, the answer is cancelled and its turn undone."""
    tasks = [asyncio.create_task(_left(request.receive)), asyncio.create_task(answer.finished())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[1].done():
            raise ApiError(499, "the client has left", "client_left")
        tasks[1].result()
    finally:
        if not tasks[1].done() or tasks[1].cancelled():
            service.cancel(answer, keeps_part=False)
        for task in tasks:
            task.cancel()


async def _left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
