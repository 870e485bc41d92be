"""Models whose score is known: one that answers right, one that finds everything alike."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from mnemos.data.tasks import ByteTokenizer

BYTES = ByteTokenizer()


class History(list):
    """The state of such a model: what each row has read."""

    def fork(self, copies: int) -> History:
        return History(list(row) for row in self for _ in range(copies))


class Scripted:
    """A model that, after what it has read, is sure of the token `next_token(ids)`; None: finds all alike."""

    def __init__(self, next_token: Callable[[list[int]], int | None], vocab_size: int = 256):
        self.next_token = next_token
        self.config = SimpleNamespace(vocab_size=vocab_size, model_type="mnemos")
        self.calls: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, past_key_values: History | None = None, use_cache: bool = True):
        rows = History([] for _ in input_ids) if past_key_values is None else past_key_values.fork(1)
        assert len(rows) == len(input_ids)
        self.calls.append(tuple(input_ids.shape))
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for b, ids in enumerate(input_ids.tolist()):
            for t, token in enumerate(ids):
                rows[b].append(token)
                sure = self.next_token(rows[b])
                if sure is not None:
                    logits[b, t, sure] = 50.0
        return SimpleNamespace(logits=logits, past_key_values=rows)


def uniform(vocab_size: int = 256) -> Scripted:
    return Scripted(lambda ids: None, vocab_size)


def answering(answer_of: Callable[[str], tuple[str, str] | None]) -> Scripted:
    """answer_of(text): (what the text ends with before the answer, the answer), of the text read so far; it then says the answer, a
    full stop, and nothing in particular."""

    def next_token(ids: list[int]) -> int | None:
        text = BYTES.decode(ids)
        found = answer_of(text)
        if found is None:
            return None
        before, answer = found
        said, full = text[text.rindex(before) + len(before) :], f" {answer}."
        return ord(full[len(said)]) if full.startswith(said) and len(said) < len(full) else None

    return Scripted(next_token)
