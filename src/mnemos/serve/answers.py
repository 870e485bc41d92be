"""`Answer`: one request in progress, from the tokens it reads to the last event, which is sent after its turn is saved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from ..sessions import OpenTurn, Session
from ..sessions.store import Version
from .errors import ApiError
from .jobs import Choice, Event, Job


@dataclass(eq=False)
class Answer:
    """A request that was admitted.

    job: its work. cached: tokens that were not read, because they are in the state. session, turn, version: of a request with a
    session. name: of the session, under which it is saved; None: it is not saved. note: why something was read again.
    """

    job: Job
    loop: asyncio.AbstractEventLoop
    cached: int = 0
    session: Session | None = None
    turn: OpenTurn | None = None
    version: Version | None = None
    is_saved: bool = False
    note: str | None = None
    keeps_part: bool = False  # of a cancelled answer
    info: dict[str, Any] | None = None  # of the session, once it is saved
    error: ApiError | None = None
    on_event: Callable[[Event], object] | None = None  # of a request that is not streamed
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    created: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the answer, those in the state included."""
        return self.cached + len(self.job.ids)

    @property
    def generated(self) -> int:
        return sum(len(choice.generated) for choice in self.job.choices)

    @property
    def choices(self) -> list[Choice]:
        return list(self.job.choices)

    async def stream(self) -> AsyncIterator[Event]:
        """All events but the last one. Raises an `ApiError` if the request failed, and its turn with it."""
        while True:
            event = await self.events.get()
            if event.is_last:
                if self.error is not None:
                    raise self.error
                return
            yield event

    async def finished(self) -> None:
        """Wait for the end. Raises an `ApiError` if the request failed."""
        async for event in self.stream():
            if self.on_event is not None:
                self.on_event(event)
