"""`Delivery`: the events of the engine's thread on their way to the event loop.

Waking the loop for every token of a small model would cost more than the token: both threads wait for the interpreter's lock in turn.
So the loop is woken at once when an answer begins or ends, and else looks for events once every few milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from .jobs import Event, Job

GROUP_SECONDS = 0.004  # a token may wait this long for the next look


class Delivery:
    """Notifies jobs of their events in the event loop, in order. loop: the running one."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._events: deque[tuple[Job, Event]] = deque()
        self._looks_again = False  # the loop comes back by itself

    def send(self, events: Sequence[tuple[Job, Event]]) -> None:
        """Pass events on. Called in the engine's thread. Raises a RuntimeError if the loop is closed."""
        self._events.extend(events)  # before the flag is read: `_look` looks once more after it has changed it
        if not self._looks_again or any(_is_urgent(job, event) for job, event in events):
            self.loop.call_soon_threadsafe(self._begin)

    def deliver(self) -> bool:
        """Notify the jobs of all events so far; whether there were some. Called in the event loop."""
        found = bool(self._events)
        while self._events:
            job, event = self._events.popleft()
            job.notify(event)
        return found

    def _begin(self) -> None:
        self.deliver()
        if not self._looks_again:
            self._looks_again = True
            self.loop.call_later(GROUP_SECONDS, self._look)

    def _look(self) -> None:
        self._looks_again = self.deliver()
        if self._looks_again or self._events:
            self._looks_again = True
            self.loop.call_later(GROUP_SECONDS, self._look)


def _is_urgent(job: Job, event: Event) -> bool:
    """Whether an event is the first or the last of an answer."""
    return event.reason is not None or len(job.choices[event.choice].generated) <= 1
