"""The little that a task asks of a tokenizer, and bytes as the tokenizer that is always there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@runtime_checkable
class Tokenizer(Protocol):
    """What a tokenizer has: those of `mnemos.data` and of transformers do."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def vocab_size(self) -> int: ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token, and byte 0, which no text has, stands at its ends.

    >>> ByteTokenizer().decode(ByteTokenizer().encode("aé"))
    'aé'
    """

    vocab_size = 256
    eos_token_id: int | None = 0
    bos_token_id: int | None = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace").replace(b"\0", b""))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if 0 < i < 256).decode("utf-8", errors="replace")


def encode(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text in the middle of others: transformers' tokenizers are kept from adding their special tokens.

    >>> encode(ByteTokenizer(), "ab")
    [97, 98]
    """
    if hasattr(tokenizer, "all_special_ids") or _takes_special(tokenizer):
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode(text))


def _takes_special(tokenizer: Any) -> bool:
    try:
        return "add_special_tokens" in inspect.signature(tokenizer.encode).parameters
    except (TypeError, ValueError):
        return False


def sentences(text: str) -> list[str]:
    """Split after . ! or ? and white space; runs of white space become one blank.

    >>> sentences("One two. Three!  Four")
    ['One two.', 'Three!', 'Four']
    """
    return [part for part in SENTENCE_END.split(" ".join(text.split())) if part]
