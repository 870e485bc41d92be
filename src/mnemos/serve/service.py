"""`Service`: a model, its sessions and the engine, without HTTP. Everything that a route does goes through here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..memory import NeuralMemory
from ..sessions import Dialogue, Sampling, SessionStore, check_name
from ..sessions.turn import Memory
from .answers import Answer
from .delivery import Delivery
from .engine import Busy, Engine
from .errors import ApiError, api_error, engine_error
from .jobs import Choice, Event, Job
from .keys import Keys
from .limits import Limits
from .logs import Log
from .metrics import Metrics, resident_bytes
from .warm import Claims, WarmSessions

T = TypeVar("T")
RESPONSE = "resp_"  # names of the sessions behind stored responses begin with it
FILE_THREADS = 4
ESTIMATE = 1.1  # size of a file relative to its state
SWEEP_SECONDS = 60.0


class Service:
    """Answers requests with a model.

    model: in evaluation mode. tokenizer: of transformers or of `mnemos.data`. store: of the sessions. name: of the model, for clients.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        store: SessionStore,
        *,
        name: str = "mnemos",
        limits: Limits | None = None,
        keys: Keys | None = None,
        log: Log | None = None,
    ):
        self.model, self.tokenizer, self.store, self.name = model, tokenizer, store, name
        self.limits, self.keys, self.log = limits or Limits(), keys or Keys({}), log or Log()
        self.created = int(time.time())
        self.dialogue = Dialogue(tokenizer, model)
        self.metrics, self.claims = Metrics(), Claims()
        self.warm = WarmSessions(model, tokenizer, store, self.limits.warm_bytes, self.limits.undo_depth)
        self.files = ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="mnemos-files")
        self.engine = Engine(model, self.limits, self._observe, self._deliver)
        self.delivery: Delivery | None = None
        self.is_draining = False
        self._per_owner: dict[str, int] = {}
        self._answers: dict[Job, Answer] = {}
        self._sweeper: asyncio.Task | None = None
        for gauge, read in (
            ("mnemos_answering", lambda: len(self.engine.rows)),
            ("mnemos_reading", lambda: len(self.engine.reading)),
            ("mnemos_waiting", lambda: len(self.engine.waiting)),
            ("mnemos_warm_sessions", lambda: len(self.warm)),
            ("mnemos_warm_bytes", lambda: self.warm.size),
            ("mnemos_resident_bytes", resident_bytes),
        ):
            self.metrics.gauge(gauge, read)

    @property
    def has_memory(self) -> bool:
        """Whether the model has memories that learn at test time."""
        return any(isinstance(module, NeuralMemory) for module in self.model.modules())

    async def start(self) -> None:
        """Start the engine. Called in the event loop."""
        self.delivery = Delivery(asyncio.get_running_loop())
        self.engine.start()
        if self.store.ttl is not None:
            self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """End all answers, wait until finished turns are saved, and stop the engine."""
        self.is_draining = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.to_thread(self.engine.stop)
        await asyncio.to_thread(self.files.shutdown)

    async def _sweep(self) -> None:
        """Delete expired sessions, now and then."""
        while True:
            with contextlib.suppress(ApiError):  # logged; the next sweep tries again
                deleted = await self.in_files(self.store.sweep)
                if deleted:
                    self.log.event("expired", sessions=len(deleted))
            await asyncio.sleep(min(SWEEP_SECONDS, self.store.ttl or SWEEP_SECONDS))

    async def in_files(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function that reads or writes files in a thread; its errors become those of the API."""
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self.files, functools.partial(function, *args, **kwargs)
            )
        except ApiError:
            raise
        except Exception as wrong:
            raise self._known(wrong) from wrong

    def _known(self, wrong: Exception) -> ApiError:
        """The error of the API, and a line of log if it does not name the reason."""
        error = api_error(wrong)
        if error.status == 500:
            self.log.event("error", kind=type(wrong).__name__, contents={"reason": str(wrong)})
        return error

    def check_name(self, name: Any) -> str:
        """A name that a client may use for a session."""
        try:
            check_name(name)
        except ValueError as wrong:
            raise ApiError(400, str(wrong), "bad_session_name", "session") from None
        if name.startswith(RESPONSE):
            raise ApiError(400, f"names that begin with {RESPONSE} belong to responses", "bad_session_name", "session")
        return name

    # Answers

    def sampling(self, options: dict[str, Any]) -> Sampling:
        """The options of one answer, after their checks."""
        if options.get("max_new_tokens", 1) > self.limits.max_tokens:
            raise ApiError(
                400,
                f"the largest number of tokens of an answer is {self.limits.max_tokens}, but {options['max_new_tokens']} are asked for",
                "too_many_tokens",
                "max_tokens",
            )
        try:
            return Sampling(**options)
        except ValueError as wrong:
            raise ApiError(400, str(wrong)) from None

    def make_choices(self, options: dict[str, Any], n: int, logprobs: int | None) -> list[Choice]:
        """n answers; each has a seed of its own if one is given. None are made if no token is asked for."""
        if options.get("max_new_tokens") == 0:
            return []
        first, found = self.sampling(options), []
        for i in range(n):
            seed = None if first.seed is None else (first.seed + i) % 2**63
            found.append(Choice(i, self.sampling(options | {"seed": seed}), self.dialogue, logprobs))
        return found

    async def answer(self, owner: str, ids: list[int], choices: list[Choice]) -> Answer:
        """Begin to answer without a session."""
        return self._submit(owner, ids, None, choices)

    async def answer_in_session(
        self,
        owner: str,
        name: str,
        texts: Sequence[str],
        choices: list[Choice],
        *,
        memory: Memory = "write",
        system: str | None = None,
        source: str | None = None,
        is_plain: bool = False,
        is_stored: bool = True,
    ) -> Answer:
        """Begin a turn of a session, which is created if there is none. source: name of the session that a new one continues.

        The last event comes after the turn is on disk. is_stored: else the session is forgotten after the answer.
        """
        self.claims.take(owner, [name])
        opened = None
        try:
            opened = session, version, turn = await self.in_files(
                self._open_turn, owner, name, texts, memory, system, source, is_plain, bool(choices)
            )
            is_off = memory == "off" and bool(session.system)
            return self._submit(
                owner,
                turn.ids,
                turn.cache,
                choices,
                cached=turn.read,
                session=session,
                turn=turn,
                version=version,
                is_saved=is_stored and memory == "write",
                note="memory is off, so the system prompt was read again" if is_off else None,
            )
        except BaseException:
            if opened is not None:
                opened[0].close_turn(opened[2])
            self.claims.free(owner, [name])
            raise

    def _open_turn(self, owner, name, texts, memory: Memory, system: str | None, source, is_plain, is_answered):
        """In a file thread: the session, the version of its file, and the open turn."""
        version = None
        if source is not None:
            session = self.warm.branch(owner, source, name)
        elif name.startswith(RESPONSE) or not self.store.exists(name, owner):
            session = self.warm.new(owner, name, system or "")
        else:
            session, version = self.warm.open(owner, name)
        if system and session.system != system:
            raise ApiError(
                400,
                "the system prompt of a session is read once, at its beginning: begin a new session",
                "system_prompt",
            )
        if memory == "write":
            self.store.check_room(name, owner, int(ESTIMATE * session.state_bytes))
        session.memory = memory
        return session, version, session.open_turn(texts, is_answered, is_plain)

    def inspect(self, owner: str, ids: list[int], cache: Any, read: Callable) -> Answer:
        """Begin to read a turn again by `read`, as `Job.read`, from the state before it."""
        running = sum(job.read is not None and job.owner == owner for job in self._answers)
        if running >= self.limits.max_traces:
            raise ApiError(429, f"{running} turns of this key are being inspected: wait for one", "too_many")
        return self._submit(owner, ids, cache, [], read)

    def _submit(
        self, owner: str, ids: list[int], cache: Any, choices: list[Choice], read: Callable | None = None, **fields: Any
    ) -> Answer:
        """Hand a job to the engine. read: of the job. fields: of its `Answer`."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", "shutting_down")
        if self._per_owner.get(owner, 0) >= self.limits.max_per_owner:
            raise ApiError(
                429, f"{self.limits.max_per_owner} requests of this key are running: wait for one", "too_many"
            )
        if len(ids) > self.limits.max_prompt_tokens:
            most = self.limits.max_prompt_tokens
            raise ApiError(
                400,
                f"the new text has {len(ids):,} tokens, but at most {most:,} are read in one request",
                "prompt_too_long",
            )
        self._check_positions(int(fields.get("cached", 0)) + len(ids), choices)
        job = Job(ids, cache, choices, lambda event: None, self._on_end, owner, read)
        job.deadline = time.monotonic() + self.limits.request_seconds
        answer = Answer(job, asyncio.get_running_loop(), **fields)
        job.notify = answer.events.put_nowait
        self._answers[job] = answer
        try:
            self.engine.submit(job)
        except (Busy, RuntimeError) as refused:
            del self._answers[job]
            if isinstance(refused, Busy):
                raise ApiError(429, "too many requests are waiting: try again later", "too_many") from None
            raise ApiError(503, "the server is shutting down", "shutting_down") from None
        self._per_owner[owner] = self._per_owner.get(owner, 0) + 1
        return answer

    def _check_positions(self, read: int, choices: list[Choice]) -> None:
        """Raise an `ApiError` if a base model with full attention would be used beyond the positions that it was trained with."""
        attached = getattr(self.model, "attach_config", None)
        most = None if attached is None else getattr(self.model.base.config, "max_position_embeddings", None)
        if attached is None or most is None or attached.window is not None:
            return
        last = read + max((choice.sampling.max_new_tokens for choice in choices), default=0)
        if last > most:
            raise ApiError(
                400,
                f"the conversation would have {last:,} tokens, but the attention of the model reaches {most:,}",
                "context_length_exceeded",
            )

    def cancel(self, answer: Answer, keeps_part: bool) -> None:
        """The client has left. keeps_part: the turn stays, with the part of the answer that was sent."""
        if not answer.job.is_ended:
            self.metrics.count("mnemos_cancelled_total")
        answer.keeps_part = keeps_part
        self.engine.cancel(answer.job)

    # In the engine's thread

    def _observe(self, kind: str, seconds: float, count: int) -> None:
        self.metrics.observe(f"mnemos_{kind}_seconds", seconds)

    def _deliver(self, events: Sequence[tuple[Job, Event]]) -> None:
        assert self.delivery is not None
        self.delivery.send(events)

    def _on_end(self, job: Job) -> None:
        try:
            self.files.submit(self._finish, job)
        except RuntimeError:  # the pool is closed
            self._finish(job)

    # In a file thread

    def _finish(self, job: Job) -> None:
        """Save the turn, then send the last event."""
        answer = self._answers[job]
        try:
            if job.error is not None:
                answer.error = engine_error(job.error, continues=answer.cached > 0)
            if answer.turn is not None:
                self._close(answer)
        except Exception as failed:
            answer.error = self._known(failed)
        finally:
            self.metrics.count("mnemos_tokens_total", job.at, kind="prompt" if job.read is None else "inspected")
            self.metrics.count("mnemos_tokens_total", answer.cached, kind="cached")
            self.metrics.count("mnemos_tokens_total", answer.generated, kind="generated")
            if job.first_token is not None:
                self.metrics.observe("mnemos_first_token_seconds", job.first_token - job.arrived)
            if job.error is not None and answer.error is not None and answer.error.status == 500:
                self.log.event("error", kind=type(job.error).__name__, contents={"reason": str(job.error)})
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                answer.loop.call_soon_threadsafe(self._ended, answer)

    def _close(self, answer: Answer) -> None:
        session, turn, job = answer.session, answer.turn, answer.job
        assert session is not None and turn is not None
        text = "" if not job.choices else job.choices[0].text
        generated = job.choices[0].generated if job.choices else []
        is_kept = job.state is not None and (not job.is_cancelled or (answer.keeps_part and bool(text)))
        session.close_turn(turn, job.state if is_kept else None, generated, text)
        session.memory = "write"
        job.state = None
        if is_kept and answer.is_saved:
            started = time.perf_counter()
            try:
                self.warm.save(session, answer.version)
            except Exception:
                session.take_back(turn)
                self.metrics.count("mnemos_save_errors_total")
                raise
            self.metrics.observe("mnemos_save_seconds", time.perf_counter() - started)
            self.metrics.count("mnemos_turns_total")
        elif answer.version is not None:
            self.warm.put(session, answer.version)
        answer.info = {
            "id": session.name,
            "tokens_read": session.tokens_read,
            "state_bytes": session.state_bytes,
            "cached": answer.note,
        }

    # In the event loop

    def _ended(self, answer: Answer) -> None:
        assert self.delivery is not None
        self.delivery.deliver()  # what came before the last event
        self._answers.pop(answer.job, None)
        owner = answer.job.owner
        left = self._per_owner.get(owner, 1) - 1
        if left:
            self._per_owner[owner] = left
        else:
            self._per_owner.pop(owner, None)
        if answer.session is not None:
            self.claims.free(owner, [answer.session.name])
        answer.events.put_nowait(Event(is_last=True))


def new_response_name() -> str:
    """The id of a response, which is also the name of the session behind it."""
    return f"{RESPONSE}{uuid.uuid4().hex}"
