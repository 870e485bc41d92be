"""`Job`: one request as the engine sees it: tokens to read from a state on, and the answers to generate.

Shapes: V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..sessions import AnswerText, Dialogue, Sampling, TextStream


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token: its log-probability, and those of the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Event:
    """What happened to a job. choice: number of the answer. text: a piece of it. reason: why it ended, "stop" or "length".
    is_last: the job has ended, and nothing follows."""

    choice: int = 0
    text: str = ""
    logprob: TokenLogprob | None = None
    reason: str | None = None
    is_last: bool = False


class Choice:
    """One answer. logprobs: number of likeliest tokens to report with each token; None: nothing is reported."""

    def __init__(self, index: int, sampling: Sampling, dialogue: Dialogue, logprobs: int | None = None):
        self.index, self.sampling, self.logprobs = index, sampling, logprobs
        self.ends, self.is_greedy = dialogue.ends, sampling.temperature < 1e-6
        self.generator = sampling.generator()
        self.answer = AnswerText(TextStream(dialogue.decode), sampling.stop)
        self.generated: list[int] = []
        self.shown: list[str] = []
        self.reason: str | None = None
        self.cache: Any = None  # after all but the last of the generated tokens, once the answer has ended

    @property
    def text(self) -> str:
        return "".join(self.shown)

    def choose(self, logits: Tensor, row: int, likeliest: int) -> Event:
        """Choose a token by its row of the logits (R, V), of which `likeliest` has the largest."""
        token = likeliest if self.is_greedy else self.sampling.choose(logits[row], self.generator)
        self.generated.append(token)
        is_end = token in self.ends
        is_last = is_end or len(self.generated) >= self.sampling.max_new_tokens
        piece = self.answer.end(token, is_end) if is_last else self.answer.push(token)
        if piece:
            self.shown.append(piece)
        if is_end or self.answer.is_stopped:
            self.reason = "stop"
        elif is_last:
            self.reason = "length"
        found = None if self.logprobs is None or is_end else _logprob(token, logits[row], self.logprobs)
        return Event(self.index, piece, found, self.reason)

    def end_now(self) -> Event:
        """End the answer after the last token: its time is over."""
        rest = self.answer.held + self.answer.stream.finish()
        self.shown.append(rest)
        self.reason = "length"
        return Event(self.index, rest, None, self.reason)


def _logprob(token: int, logits: Tensor, count: int) -> TokenLogprob:
    values = logits.float().log_softmax(-1)
    best, tokens = values.topk(min(count, len(values))) if count else (values[:0], values[:0])
    return TokenLogprob(token, float(values[token]), tuple(zip(map(int, tokens.tolist()), best.tolist())))


@dataclass(eq=False)
class Job:
    """One request. ids: tokens to read. cache: the state before them, which is not changed; None: an empty one.

    choices: the answers; none if the tokens are only read. notify: called with the events, in the engine's thread or that of whoever
    delivers them. on_end: called in the engine's thread once, when nothing is computed for the job any more; state: the cache after
    the tokens of `ids` and all but the last generated token of the first choice, None if `error` is set or nothing was read.
    read: reads a piece in place of the model: ids (1, T), cache, whether it may be changed -> logits (1, V), new cache.
    """

    ids: list[int]
    cache: Any
    choices: Sequence[Choice]
    notify: Callable[[Event], None]
    on_end: Callable[[Job], None]
    owner: str = ""
    read: Callable[[Tensor, Any, bool], tuple[Tensor, Any]] | None = None
    deadline: float = float("inf")
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    at: int = 0
    state: Any = None
    error: Exception | None = None
    is_cancelled: bool = False
    is_ended: bool = False

    @property
    def is_read(self) -> bool:
        return self.at == len(self.ids)

    @property
    def running(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.reason is None]


def greedy_tokens(logits: Tensor) -> list[int]:
    """The likeliest token of every row, (R, V) -> R numbers."""
    return torch.argmax(logits.float(), dim=-1).tolist()
