"""`Session`: a conversation with a model whose state is kept between turns.

Shapes: T new tokens, V vocabulary.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .dialogue import Dialogue
from .identity import model_hash
from .record import MAX_TITLE, SessionRecord, Turn, check_name, copied
from .sampling import Sampling
from .store import SessionStore
from .text_stream import TextStream

Memory = Literal["write", "read", "off"]
MEMORIES = ("write", "read", "off")
PIECE = 2048  # tokens of a prompt that are read in one call
UNDO_DEPTH = 8


@dataclass(frozen=True)
class _Moment:
    """The state between two turns. A cache is never changed once it is here."""

    cache: Any
    pending: tuple[int, ...]
    tokens_read: int
    turns: tuple[Turn, ...]
    title: str


class Session:
    """A conversation with a model. Only new tokens are read: the state keeps the rest.

    model: a `MnemosForCausalLM` or an attached model, in evaluation mode. tokenizer: of transformers or of `mnemos.data`; its chat
    template is used if it has one. store: where `save` writes (None: nowhere). name: of the session; one that the store has already is
    opened by `Session.load`. system: a system prompt, read once before the first turn.
    memory: "write" keeps what is read; "read" answers from the state and leaves it as it was; "off" answers from an empty state.
    undo_depth: number of turns that can be undone; each keeps one state in memory.

    >>> import tempfile
    >>> from mnemos.data import open_tokenizer
    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model, tokenizer = MnemosForCausalLM(presets.config("titans-mag", "nano")).eval(), open_tokenizer("bytes")
    >>> store = SessionStore(tempfile.mkdtemp())
    >>> session = Session(model, tokenizer, store, "ann")
    >>> session.tell("The key is under the mat. ")
    >>> answer = session.ask("Where is the key?", max_new_tokens=4)
    >>> session.tokens_read, len(session.pending)
    (46, 1)
    >>> session.save()
    >>> Session.load(model, tokenizer, store, "ann").tokens_read
    46
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        store: SessionStore | None = None,
        name: str = "default",
        *,
        owner: str = "",
        system: str = "",
        title: str = "",
        memory: Memory = "write",
        undo_depth: int = UNDO_DEPTH,
    ):
        if store is not None and store.exists(name, owner):
            raise ValueError(
                f"the store has a session {name!r} already: open it by Session.load, or choose another name"
            )
        self._open(model, tokenizer, store, SessionRecord(check_name(name), title, owner=owner), memory, undo_depth)
        self.system = system
        if system:
            self.record.turns.append(Turn(role="system", content=system, tokens=0, created=time.time()))
        self.record.check()

    def _open(self, model, tokenizer, store, record: SessionRecord, memory: Memory, undo_depth: int) -> None:
        if getattr(model, "training", False):
            raise ValueError("the model is in training mode: call model.eval() before a session")
        if type(undo_depth) is not int or undo_depth < 0:
            raise ValueError(f"undo_depth={undo_depth!r:.40} must be a whole number of at least 0")
        if store is not None and not isinstance(store, SessionStore):
            raise ValueError(f"store is a {type(store).__name__}, but must be a SessionStore or None")
        self.model, self.tokenizer, self.store, self.record = model, tokenizer, store, record
        self.dialogue = Dialogue(tokenizer, model)
        self.memory = memory
        self.system = next((turn["content"] for turn in record.turns if turn["role"] == "system"), "")
        self._earlier: deque[_Moment] = deque(maxlen=undo_depth)
        self._busy = False
        self.last_turn: tuple[Any, list[int]] | None = None  # the state before the last turn, and its tokens

    @classmethod
    def from_record(
        cls,
        model: Any,
        tokenizer: Any,
        record: SessionRecord,
        store: SessionStore | None = None,
        *,
        memory: Memory = "write",
        undo_depth: int = UNDO_DEPTH,
    ) -> Session:
        """Continue a record, which then belongs to the session."""
        session = cls.__new__(cls)
        session._open(model, tokenizer, store, record, memory, undo_depth)
        return session

    @classmethod
    def load(
        cls, model: Any, tokenizer: Any, store: SessionStore, name: str, *, owner: str = "", **options: Any
    ) -> Session:
        """Open a saved session. It continues bit by bit as one that was never closed. options: memory, undo_depth."""
        return cls.from_record(model, tokenizer, store.load(name, model, owner), store, **options)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def turns(self) -> list[Turn]:
        """The messages so far."""
        return self.record.turns

    @property
    def pending(self) -> list[int]:
        """Token ids of the conversation that the next turn reads first."""
        return self.record.pending

    @property
    def tokens_read(self) -> int:
        """Tokens in the state."""
        return self.record.tokens_read

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        return self.record.state_bytes

    @property
    def memory(self) -> Memory:
        """ "write", "read" or "off"."""
        return self._memory

    @memory.setter
    def memory(self, mode: Memory) -> None:
        if mode not in MEMORIES:
            raise ValueError(f"memory={mode!r:.40} is unknown; choose one of {', '.join(MEMORIES)}")
        self._memory: Memory = mode

    def tell(self, text: str) -> None:
        """Read a text without an answer."""
        if self.memory != "write":
            raise ValueError(f"memory is {self.memory!r}, so nothing can be told: set memory = 'write' first")
        self._check_idle()
        before, new = self._now(), self._tokens(text, answer=False)
        ids = [*self.pending, *new]
        _, cache = self._read(before.cache, ids)
        self._keep(before, cache, before.tokens_read + len(ids), [], [("user", text, len(new))])
        self.last_turn = before.cache, ids

    def ask(self, text: str, **sampling: Any) -> str:
        """The answer to a text. sampling: the fields of `mnemos.sessions.Sampling`."""
        return "".join(self.stream(text, **sampling))

    def stream(self, text: str, **sampling: Any) -> Generator[str]:
        """The answer to a text, in pieces of whole characters as they are generated.

        If the iterator is closed early, the answer ends there and the turn counts; if the model raises an error, the turn is undone.
        """
        self._check_idle()
        return self._stream(text, Sampling(**sampling))

    def _stream(self, text: str, chosen: Sampling) -> Generator[str]:
        self._check_idle()
        before, mode = self._now(), self.memory
        is_off = mode == "off"
        new = self.dialogue.first(text, self.system) if is_off else self._tokens(text, answer=True)
        prompt = new if is_off else [*self.pending, *new]
        generated: list[int] = []
        shown: list[str] = []
        self._busy = True
        cache, read = (None, 0) if is_off else (before.cache, before.tokens_read)
        try:
            pieces, generator = _Pieces(TextStream(self.dialogue.decode), chosen.stop), chosen.generator()
            logits, cache = self._read(cache, prompt)
            read += len(prompt)
            while True:
                token = chosen.choose(logits, generator)
                generated.append(token)
                is_last = token in self.dialogue.ends or len(generated) == chosen.max_new_tokens
                piece = pieces.end(token, token in self.dialogue.ends) if is_last else pieces.push(token)
                if piece:
                    shown.append(piece)
                    yield piece
                if is_last or pieces.is_stopped:
                    break
                logits, cache = self._read(cache, [token], is_own=True)
                read += 1
        except GeneratorExit:  # closed by the caller after a token: the state is whole
            pass
        except BaseException:
            generated.clear()
            raise
        finally:
            self._busy = False
            if generated:
                self.last_turn = (None if is_off else before.cache), [*prompt, *generated]
                if mode == "write":
                    answer = ("assistant", "".join(shown), len(generated))
                    self._keep(before, cache, read, [generated[-1]], [("user", text, len(new)), answer])

    def undo(self) -> None:
        """Restore the state before the last turn exactly."""
        self._check_idle()
        if not self._earlier:
            raise ValueError("there is no turn to undo: only the last turns since the session was opened can be undone")
        moment = self._earlier.pop()
        record = self.record
        record.cache, record.pending, record.tokens_read = moment.cache, list(moment.pending), moment.tokens_read
        record.title, record.updated = moment.title, time.time()
        record.turns = list(moment.turns)
        self.last_turn = None

    def reset(self) -> None:
        """Forget everything: an empty state and no turns but the system prompt. `undo` brings it back."""
        self._check_idle()
        self._earlier.append(self._now())
        record = self.record
        record.turns = [turn for turn in self.turns if turn["role"] == "system"]
        record.cache, record.pending, record.tokens_read, record.updated = None, [], 0, time.time()
        self.last_turn = None

    def fork(self, name: str) -> Session:
        """A copy under another name; each continues without the other."""
        self._check_idle()
        if self.store is not None and self.store.exists(name, self.record.owner):
            raise ValueError(f"the store has a session {name!r} already: choose another name")
        now = time.time()
        record = copied(self.record, name=check_name(name), created=now, updated=now)
        depth = self._earlier.maxlen or 0
        return type(self).from_record(
            self.model, self.tokenizer, record, self.store, memory=self.memory, undo_depth=depth
        )

    def save(self, path: str | os.PathLike | None = None) -> None:
        """Write the session to its store, or to a file."""
        self._check_idle()
        self.record.model_hash = model_hash(self.model)
        if path is not None:
            self.record.save(path)
        elif self.store is not None:
            self.store.save(self.record)
        else:
            raise ValueError("the session has no store: give a path, or open it with a SessionStore")

    def _check_idle(self) -> None:
        if self._busy:
            raise ValueError("an answer is being streamed: read it to its end, or close its iterator, first")

    def _now(self) -> _Moment:
        record = self.record
        return _Moment(record.cache, tuple(record.pending), record.tokens_read, tuple(record.turns), record.title)

    def _tokens(self, text: str, answer: bool) -> list[int]:
        """The new tokens of a turn."""
        spoken = [turn for turn in self.turns if turn["role"] != "system"]
        if not isinstance(text, str):
            raise ValueError(f"text is a {type(text).__name__}, but must be a str")
        if not spoken:
            new = self.dialogue.first(text, self.system, answer)
        else:
            last = self.pending[-1] if self.pending else None
            new = self.dialogue.next(text, spoken[-1]["role"], last, answer)
        if not new and not self.pending:
            raise ValueError(f"text {text!r:.40} has no token: give at least one character")
        return new

    @torch.no_grad()
    def _read(self, cache: Any, ids: list[int], is_own: bool = False) -> tuple[Tensor, Any]:
        """Logits (V,) after new tokens, and the new cache. is_own: no other object holds the cache, so it may be changed."""
        in_place = getattr(cache, "advances_in_place", False)
        if cache is not None and in_place and not is_own:
            cache = cache.clone()
        logits = None
        for start in range(0, len(ids), PIECE):
            if cache is not None and not in_place:
                cache.inplace = is_own or start > 0
            piece = torch.tensor([ids[start : start + PIECE]], device=self.model.device)
            found = self.model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits, cache = found.logits[0, -1], found.past_key_values
        assert logits is not None
        return logits, cache

    def _keep(
        self, before: _Moment, cache: Any, read: int, pending: list[int], said: list[tuple[str, str, int]]
    ) -> None:
        """End a turn that writes to the memory."""
        record, now = self.record, time.time()
        self._earlier.append(before)
        record.cache, record.tokens_read, record.pending, record.updated = cache, read, pending, now
        record.turns += [Turn(role=role, content=text, tokens=tokens, created=now) for role, text, tokens in said]
        if not record.title:
            record.title = " ".join(said[0][1].split())[:MAX_TITLE]


class _Pieces:
    """The pieces of an answer, cut off at the first stop text."""

    def __init__(self, stream: TextStream, stop: tuple[str, ...]):
        self.stream, self.stop, self.held, self.is_stopped = stream, stop, "", False

    def push(self, token: int) -> str:
        return self._cut(self.held + self.stream.push(token))

    def end(self, token: int, is_end_token: bool) -> str:
        """The last piece: nothing is held back after it."""
        text = self.held + ("" if is_end_token else self.stream.push(token)) + self.stream.finish()
        found = self._cut(text)
        rest, self.held = self.held, ""
        return found if self.is_stopped else found + rest

    def _cut(self, text: str) -> str:
        """The text that can be shown: not the beginning of a stop text at its end."""
        ends = [at for at in (text.find(word) for word in self.stop) if at >= 0]
        if ends:
            self.held, self.is_stopped = "", True
            return text[: min(ends)]
        held = max((n for word in self.stop for n in range(len(word)) if text.endswith(word[:n])), default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]
