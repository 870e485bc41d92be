"""`Session`: a conversation with a model whose state is kept between turns.

Shapes: T new tokens, V vocabulary.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from .answer_text import AnswerText
from .dialogue import Dialogue
from .identity import model_hash
from .reading import read_tokens
from .record import MAX_TITLE, SessionRecord, Turn, check_name, copied
from .sampling import Sampling
from .store import SessionStore
from .text_stream import TextStream
from .turn import Memory, Moment, OpenTurn

MEMORIES = ("write", "read", "off")
PIECE = 2048  # tokens of a prompt that are read in one call
UNDO_DEPTH = 8


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
        self._earlier: deque[Moment] = deque(maxlen=undo_depth)
        self._busy = False
        self.last_turn: tuple[Any, list[int]] | None = None  # the state before the last turn, and its tokens
        self.last_answer = 0  # how many of these tokens are the answer

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
            raise ValueError(f"memory is {self.memory!r}, so nothing can be stored: set memory = 'write' first")
        turn = self.open_turn([text], answer=False)
        try:
            _, cache = self._read(turn.cache, turn.ids)
        except BaseException:
            self.close_turn(turn)
            raise
        self.close_turn(turn, cache)

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
        turn = self.open_turn([text])
        generated: list[int] = []
        shown: list[str] = []
        cache = None
        try:
            pieces, generator = AnswerText(TextStream(self.dialogue.decode), chosen.stop), chosen.generator()
            logits, cache = self._read(turn.cache, turn.ids)
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
        except GeneratorExit:  # closed by the caller after a token: the state is whole
            pass
        except BaseException:
            cache = None
            raise
        finally:
            self.close_turn(turn, cache if generated else None, generated, "".join(shown))

    def open_turn(self, texts: Sequence[str], answer: bool = True, is_plain: bool = False) -> OpenTurn:
        """Begin a turn whose tokens somebody else reads and generates; `close_turn` ends it, and nothing else can be done before.

        texts: of the user; all but the last are read without an answer. answer: an answer follows. is_plain: without chat template.

        >>> from mnemos.data import open_tokenizer
        >>> from mnemos.models import MnemosForCausalLM, presets
        >>> model = MnemosForCausalLM(presets.config("deltanet", "nano")).eval()
        >>> session = Session(model, open_tokenizer("bytes"))
        >>> turn = session.open_turn(["hello"])
        >>> cache = model.state(torch.tensor([turn.ids]), turn.cache)
        >>> session.close_turn(turn, cache, [33], "!")
        >>> session.tokens_read, session.pending
        (5, [33])
        """
        self._check_idle()
        before, is_off = self._now(), self.memory == "off"
        said: list[tuple[str, str, int]] = []
        ids: list[int] = [] if is_off else [*self.pending]
        roles = [] if is_off else [turn["role"] for turn in self.turns if turn["role"] != "system"]
        for i, text in enumerate(texts):
            new = self._tokens(text, roles, answer and i == len(texts) - 1, is_plain)
            roles.append("user")
            said.append(("user", text, len(new)))
            ids += new
        if not ids:
            raise ValueError(f"text {texts[0]!r:.40} has no token: give at least one character")
        self._busy = True
        cache, read = (None, 0) if is_off else (before.cache, before.tokens_read)
        return OpenTurn(self.memory, cache, ids, read, before, said, answer)

    def close_turn(self, turn: OpenTurn, cache: Any = None, generated: Sequence[int] = (), text: str = "") -> None:
        """End a turn. cache: the state after `turn.ids` and all but the last of the generated tokens; None: the turn is undone.
        text: the answer. Nothing else holds the cache."""
        self._busy = False
        if cache is None:
            return
        mode, self.last_turn = turn.memory, (turn.cache, [*turn.ids, *generated])
        self.last_answer = len(generated)
        if mode != "write":
            return
        record, now = self.record, time.time()
        said = [*turn.said, ("assistant", text, len(generated))] if turn.answer else turn.said
        self._earlier.append(turn.before)
        record.cache, record.pending = cache, [*generated[-1:]]
        record.tokens_read, record.updated = turn.read + len(turn.ids) + max(0, len(generated) - 1), now
        record.turns += [Turn(role=role, content=content, tokens=n, created=now) for role, content, n in said]
        if not record.title:
            record.title = " ".join(said[0][1].split())[:MAX_TITLE]

    def take_back(self, turn: OpenTurn) -> None:
        """Restore the state before a turn that was closed last: it could not be saved."""
        self._check_idle()
        if self._earlier and self._earlier[-1] is turn.before:
            self._earlier.pop()
        self._restore(turn.before)

    @property
    def undo_bytes(self) -> int:
        """Bytes of the states that are kept for `undo`."""
        return sum(moment.cache.nbytes for moment in self._earlier if moment.cache is not None)

    @property
    def can_undo(self) -> bool:
        return bool(self._earlier)

    def undo(self) -> None:
        """Restore the state before the last turn exactly."""
        self._check_idle()
        if not self._earlier:
            raise ValueError("there is no turn to undo: only the last turns since the session was opened can be undone")
        self._restore(self._earlier.pop())
        self.record.updated = time.time()

    def _restore(self, moment: Moment) -> None:
        record = self.record
        record.cache, record.pending, record.tokens_read = moment.cache, list(moment.pending), moment.tokens_read
        record.title, record.updated = moment.title, moment.updated
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

    def _now(self) -> Moment:
        record = self.record
        return Moment(
            record.cache,
            tuple(record.pending),
            record.tokens_read,
            tuple(record.turns),
            record.title,
            record.updated,
        )

    def _tokens(self, text: str, roles: list[str], answer: bool, is_plain: bool) -> list[int]:
        """The new tokens of a text after messages of these roles."""
        if not isinstance(text, str):
            raise ValueError(f"text is a {type(text).__name__}, but must be a str")
        if is_plain:
            return self.dialogue.plain(text, is_first=not roles)
        if not roles:
            return self.dialogue.first(text, self.system, answer)
        last = self.pending[-1] if self.pending else None
        return self.dialogue.next(text, roles[-1], last, answer)

    def _read(self, cache: Any, ids: list[int], is_own: bool = False) -> tuple[Tensor, Any]:
        """Logits (V,) after new tokens, and the new cache. is_own: no other object holds the cache, so it may be changed."""
        logits = None
        for start in range(0, len(ids), PIECE):
            piece = torch.tensor([ids[start : start + PIECE]], device=self.model.device)
            logits, cache = read_tokens(self.model, cache, piece, is_own or start > 0)
        assert logits is not None
        return logits[0], cache
