"""Events on their way from the engine's thread to the event loop: in order, none lost, the loop woken seldom."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

from mnemos.serve.delivery import GROUP_SECONDS, Delivery
from mnemos.serve.jobs import Event


class Loop:
    """An event loop that runs what it is asked to only when a test says so."""

    def __init__(self) -> None:
        self.woken: list[Any] = []
        self.timers: list[Any] = []

    def call_soon_threadsafe(self, function) -> None:
        self.woken.append(function)

    def call_later(self, seconds: float, function) -> None:
        assert seconds == GROUP_SECONDS
        self.timers.append(function)

    def run(self, functions: list[Any]) -> None:
        found, functions[:] = functions[:], []
        for function in found:
            function()


def job(tokens: int = 1) -> Any:
    """A job with one answer of so many tokens, which keeps the texts that it is notified of."""
    seen: list[str] = []
    return SimpleNamespace(
        choices=[SimpleNamespace(generated=[0] * tokens)], seen=seen, notify=lambda event: seen.append(event.text)
    )


def test_the_loop_is_woken_for_the_first_and_the_last_token_and_looks_for_the_others():
    loop, one = Loop(), job()
    delivery = Delivery(loop)  # ty: ignore[invalid-argument-type]
    delivery.send([(one, Event(text="a"))])
    loop.run(loop.woken)
    assert one.seen == ["a"]
    one.choices[0].generated = [0] * 5
    for text in "bcd":
        delivery.send([(one, Event(text=text))])
    assert not loop.woken and one.seen == ["a"]
    loop.run(loop.timers)
    assert one.seen == list("abcd") and len(loop.timers) == 1
    delivery.send([(one, Event(text="e")), (one, Event(text="f", reason="stop"))])
    loop.run(loop.woken)
    assert one.seen == list("abcdef") and len(loop.timers) == 1


def test_a_token_that_comes_after_a_look_without_events_wakes_the_loop():
    loop, one = Loop(), job(tokens=9)
    delivery = Delivery(loop)  # ty: ignore[invalid-argument-type]
    delivery.send([(one, Event(text="a"))])
    loop.run(loop.woken)
    loop.run(loop.timers)
    assert not loop.timers  # nothing to look for
    delivery.send([(one, Event(text="b"))])
    loop.run(loop.woken)
    assert one.seen == ["a", "b"] and len(loop.timers) == 1


def test_events_of_a_thread_arrive_in_order_and_none_is_lost():
    draw, count = random.Random(0), 3000

    async def main() -> list[str]:
        one, done = job(tokens=9), asyncio.Event()
        delivery, seen = Delivery(asyncio.get_running_loop()), one.seen
        one.notify = lambda event: (seen.append(event.text), done.set() if len(seen) == count else None)

        def engine() -> None:
            for i in range(count):
                delivery.send([(one, Event(text=str(i)))])
                if draw.random() < 0.02:
                    time.sleep(draw.choice((0, 0.001, GROUP_SECONDS, 2 * GROUP_SECONDS)))

        thread = threading.Thread(target=engine)
        thread.start()
        await asyncio.wait_for(done.wait(), 60)
        thread.join()
        return seen

    assert asyncio.run(main()) == [str(i) for i in range(count)]
