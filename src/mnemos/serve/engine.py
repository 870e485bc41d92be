"""`Engine`: the thread that owns the model. It reads prompts in pieces and decodes all running answers as one batch.

One round: take new and cancelled jobs, read a piece of a prompt or some short prompts, decode one token of every answer.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sessions.reading import read_tokens
from .jobs import Choice, Event, Job, greedy_tokens
from .limits import Limits
from .pace import Pace, Piece
from .rows import Rows

Observer = Callable[[str, float, int], None]  # "step" or "piece", seconds, rows or tokens
WARM_UP = (4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Busy(Exception):
    """There is no place for another job."""


class Engine(threading.Thread):
    """Runs jobs on a model. limits: `max_batch`, `max_waiting`, `prefill_tokens` and `prefill_budget` are used.

    observe: called after each step and piece. deliver: called once per round with the events of all jobs; by default each job is
    notified in the engine's thread.

    >>> from mnemos.data import open_tokenizer
    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> from mnemos.sessions import Dialogue, Sampling
    >>> _ = torch.manual_seed(0)
    >>> model = MnemosForCausalLM(presets.config("deltanet", "nano")).eval()
    >>> dialogue, done = Dialogue(open_tokenizer("bytes")), queue.Queue()
    >>> engine = Engine(model, Limits())
    >>> engine.start()
    >>> choice = Choice(0, Sampling(max_new_tokens=3), dialogue)
    >>> engine.submit(Job(dialogue.encode("hello"), None, [choice], lambda event: None, done.put))
    >>> len(done.get(timeout=60).choices[0].generated)
    3
    >>> engine.stop()
    """

    def __init__(
        self,
        model: Any,
        limits: Limits,
        observe: Observer = lambda kind, seconds, count: None,
        deliver: Callable[[Sequence[tuple[Job, Event]]], None] | None = None,
    ):
        super().__init__(name="mnemos-engine", daemon=True)
        self.model, self.limits, self.observe = model, limits, observe
        self.deliver = deliver or _notify_all
        self.pace = Pace(limits.prefill_tokens, limits.prefill_budget)
        self.rows = Rows(model)
        self.waiting: deque[Job] = deque()
        self.reading: deque[Job] = deque()
        self._joining: list[tuple[tuple[Job, Choice], Any]] = []
        self._events: list[tuple[Job, Event]] = []
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0  # jobs that were submitted and have not ended
        self._is_stopping = False
        self.failure: BaseException | None = None

    # Called from other threads

    def submit(self, job: Job) -> None:
        """Run a job. Raises `Busy` if too many wait, a RuntimeError after `stop`."""
        with self._lock:
            if self._is_stopping or self.failure is not None:
                raise RuntimeError("the engine has stopped")
            if self._open >= self.limits.max_batch + self.limits.max_waiting:
                raise Busy
            self._open += 1
        self._inbox.put(lambda: self.waiting.append(job))

    def cancel(self, job: Job) -> None:
        """End a job before its next token; nothing happens if it has ended."""
        job.is_cancelled = True
        self._inbox.put(lambda: None)  # wakes the engine

    def call(self, function: Callable[[], None]) -> None:
        """Run a short function in the engine's thread, between two steps."""
        self._inbox.put(function)

    def stop(self) -> None:
        """End all jobs after the current step, and the thread."""
        with self._lock:
            self._is_stopping = True
        self._inbox.put(None)
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    @property
    def open_jobs(self) -> int:
        """Jobs that run or wait."""
        return self._open

    @property
    def is_healthy(self) -> bool:
        return self.is_alive() and self.failure is None

    # In the engine's thread

    def run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as failed:
            self.failure = failed
            raise
        finally:
            self._end_all(RuntimeError("the server is shutting down"))

    def _round(self) -> bool:
        """One round; False after `stop`."""
        if not self._take(is_idle=not (self.waiting or self.reading or self.rows or self._joining)):
            return False
        self._end_overdue()
        taken = sum(_places(job) for job in self.reading) + len(self.rows)
        while self.waiting and (not taken or taken + _places(self.waiting[0]) <= self.limits.max_batch):
            taken += _places(self.waiting[0])
            self.reading.append(self.waiting.popleft())
        while self._read_piece():
            pass
        self._step()
        self._send()
        return True

    def _take(self, is_idle: bool) -> bool:
        """Run what other threads have sent. is_idle: wait for something."""
        for _ in range(max(int(is_idle), self._inbox.qsize())):  # not those that these functions send
            message = self._inbox.get()
            if message is None:
                return False
            message()
        return True

    def _end_overdue(self) -> None:
        """End jobs that were cancelled, or whose time is over."""
        now = time.monotonic()
        for pending in (self.waiting, self.reading):
            for job in [job for job in pending if job.is_cancelled or job.deadline < now]:
                pending.remove(job)
                self._end(job, None if job.is_cancelled else TimeoutError("the time of the request is over"))
        for job, choice in [key for key, _ in self._joining] + self.rows.keys:  # ty: ignore[not-iterable]
            if choice.reason is None and (job.is_cancelled or job.deadline < now):
                self._add(job, choice.end_now())

    def _read_piece(self) -> bool:
        """Read a piece of a prompt; whether another one may follow before the next step."""
        if not self.reading:
            return False
        job = self.reading[0]
        size = self.pace.piece if job.read is None else self.pace.unusual_piece
        piece = size(len(job.ids) - job.at, is_busy=bool(self.rows))
        if piece is None:
            return False
        self.reading.rotate(-1)
        started = time.perf_counter()
        try:
            logits = self._read(job, piece)
        except Exception as failed:
            self.reading.remove(job)
            self._end(job, failed)
            return False
        seconds = time.perf_counter() - started
        if job.read is None:
            self.pace.read(piece, seconds)
        else:
            self.pace.spent(seconds)
        self.observe("piece", seconds, piece.tokens)
        if job.is_read:
            self.reading.remove(job)
            self._begin_answers(job, logits)
        return job.is_read and bool(self.rows)

    def _read(self, job: Job, piece: Piece) -> Tensor:
        """Logits (1, V) after the next piece of a prompt."""
        assert piece.tokens > 0
        sizes = [1] * piece.tokens if piece.is_single else [piece.tokens]
        logits = None
        for size in sizes:
            ids = torch.tensor([job.ids[job.at : job.at + size]], device=self.model.device)
            cache, is_own = (job.cache, False) if job.at == 0 else (job.state, True)
            logits, job.state = (
                job.read(ids, cache, is_own) if job.read else read_tokens(self.model, cache, ids, is_own)
            )
            job.at += size
        assert logits is not None
        return logits

    def _begin_answers(self, job: Job, logits: Tensor) -> None:
        """The first token of every answer."""
        if not job.choices:
            self._end(job)
            return
        job.first_token = time.perf_counter()
        [likeliest] = greedy_tokens(logits)
        for i, choice in enumerate(job.choices):
            cache = job.state if i == 0 else job.state.clone()  # made before row 0 is decoded
            self._choose(job, choice, logits, 0, likeliest)
            if choice.reason is None:
                self._joining.append(((job, choice), cache))
            else:
                choice.cache = cache
        job.state = None
        if not job.running:
            self._end(job)

    def _step(self) -> None:
        """One more token of every answer."""
        leaving = [key for key in self.rows.keys if key[1].reason is not None]  # ty: ignore[not-subscriptable]
        joining = [(key, cache) for key, cache in self._joining if key[1].reason is None]
        for (_, choice), cache in self._joining:
            if choice.reason is not None:  # cancelled before its second token
                choice.cache = cache
        ended = {key[0] for key, _ in self._joining if not key[0].running}
        self._joining = []
        try:
            for key, cache in self.rows.change(leaving, joining).items():
                key[1].cache = cache  # ty: ignore[not-subscriptable]
            ended |= {key[0] for key in leaving if not key[0].running}  # ty: ignore[not-subscriptable]
            for job in ended:
                self._end(job)
            if not self.rows:
                return
            keys: list[Any] = self.rows.keys
            started = time.perf_counter()
            logits = self.rows.step([choice.generated[-1] for _, choice in keys])
            likeliest = greedy_tokens(logits)
            for i, (job, choice) in enumerate(keys):
                self._choose(job, choice, logits, i, likeliest[i])
            seconds = time.perf_counter() - started
        except Exception as failed:  # out of memory, for example: these answers end, and the server goes on
            jobs = {key[0] for key in self.rows.keys} | {key[0] for key, _ in joining}  # ty: ignore[not-subscriptable]
            self.rows.clear()
            for job in jobs:
                self._end(job, failed)
            return
        self.pace.stepped(len(keys), seconds)
        self.observe("step", seconds, len(keys))

    def _choose(self, job: Job, choice: Choice, logits: Tensor, row: int, likeliest: int) -> None:
        """One more token of an answer. An error, as of logits that are not finite, ends this job alone."""
        if choice.reason is not None:
            return
        try:
            self._add(job, choice.choose(logits, row, likeliest))
        except Exception as failed:
            job.error = failed
            for other in job.running:
                other.reason = "error"

    def _add(self, job: Job, event: Event) -> None:
        self._events.append((job, event))

    def _end(self, job: Job, error: Exception | None = None) -> None:
        if job.is_ended:
            return
        job.is_ended, job.error = True, error or job.error
        if job.error is not None:
            job.state = None
        elif job.choices:
            job.state = job.choices[0].cache
        with self._lock:
            self._open -= 1
        self._send()  # before whatever `on_end` sends
        try:
            job.on_end(job)
        except Exception:
            logging.getLogger(__name__).exception("the end of a job failed")

    def _send(self) -> None:
        if self._events:
            events, self._events = self._events, []
            with contextlib.suppress(RuntimeError):  # an event loop that is closed already
                self.deliver(events)

    def _end_all(self, error: Exception) -> None:
        with self._lock:
            self._is_stopping = True
        jobs: dict[Job, None] = dict.fromkeys([*self.waiting, *self.reading])
        jobs |= dict.fromkeys(key[0] for key, _ in self._joining)
        jobs |= dict.fromkeys(key[0] for key in self.rows.keys)  # ty: ignore[not-subscriptable]
        for job in jobs:
            self._end(job, error)
        while not self._inbox.empty():  # jobs that were submitted since
            message = self._inbox.get()
            if message is not None:
                self.waiting.clear()
                message()
                for job in self.waiting:
                    self._end(job, error)
        self.rows.clear()

    @torch.no_grad()
    def warm_up(self) -> None:
        """Measure a decoding step and pieces of all sizes, before the thread starts."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        _, cache = read_tokens(self.model, None, ids)
        for _ in range(5):
            started = time.perf_counter()
            _, cache = read_tokens(self.model, cache, ids, is_own=True)
            self.pace.stepped(1, time.perf_counter() - started)
        for size in [size for size in WARM_UP if size <= self.limits.prefill_tokens]:
            seconds = []
            for _ in range(2):  # the first one may load or compile something
                started = time.perf_counter()
                read_tokens(self.model, cache, ids.expand(1, size), is_own=False)
                seconds.append(time.perf_counter() - started)
            self.pace.read(Piece(size), min(seconds))


def _places(job: Job) -> int:
    return max(1, len(job.choices))


def _notify_all(events: Sequence[tuple[Job, Event]]) -> None:
    for job, event in events:
        job.notify(event)
