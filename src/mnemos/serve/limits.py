"""`Limits`: all bounds of a server in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Bounds of a server.

    max_batch: answers that are generated at the same time. max_waiting: requests that wait for a place; more are refused with 429.
    max_per_owner: running and waiting requests of one owner. max_traces: of these, turns that are read again to inspect them.
    max_choices: answers to one request. max_tokens: of one answer.
    max_prompt_tokens: new tokens of one request. max_body_bytes: of a JSON body. max_import_bytes: of an imported session.
    request_seconds: longest time of one answer, which ends then. body_seconds: longest time until a body has arrived.
    warm_bytes: states that are kept in memory between turns; others are read from disk. undo_depth: turns of a warm session that can be
    taken back. prefill_tokens: largest piece of a prompt that is read at once. prefill_budget: time between two tokens of an answer
    that may go to the prompts of others, in decoding steps. grace_seconds: time for running answers at shutdown.

    >>> Limits(max_batch=0)
    Traceback (most recent call last):
    ValueError: max_batch=0 must be a number of at least 1
    """

    max_batch: int = 16
    max_waiting: int = 256
    max_per_owner: int = 64
    max_traces: int = 2
    max_choices: int = 8
    max_tokens: int = 4096
    max_prompt_tokens: int = 262144
    max_body_bytes: int = 8 * 2**20
    max_import_bytes: int = 512 * 2**20
    request_seconds: float = 900.0
    body_seconds: float = 60.0
    warm_bytes: int = 2**30
    undo_depth: int = 4
    prefill_tokens: int = 256
    prefill_budget: float = 1.5
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("warm_bytes", "undo_depth", "max_waiting", "grace_seconds") else 1
            least = 0.1 if field.name in ("prefill_budget", "request_seconds", "body_seconds") else least
            kinds = (int, float) if field.type == "float" else (int,)
            if type(value) not in kinds or not math.isfinite(value) or value < least:
                raise ValueError(f"{field.name}={value!r:.40} must be a number of at least {least}")
