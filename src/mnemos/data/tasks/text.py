"""The tokenizer interface of the tasks, and splitting text into sentences."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@runtime_checkable
class TokenizerLike(Protocol):
    """The interface of a tokenizer, which those of `mnemos.data` and of transformers implement."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def vocab_size(self) -> int: ...


def encode(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text without special tokens, for use in the middle of other text.

    >>> from mnemos.data import ByteTokenizer
    >>> encode(ByteTokenizer(), "ab")
    [97, 98]
    """
    check_tokenizer(tokenizer)
    if hasattr(tokenizer, "all_special_ids") or _takes_special(tokenizer):
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode(text))


def check_tokenizer(tokenizer: Any) -> None:
    """Raise a ValueError for an object that cannot encode and decode, such as the name of a tokenizer.

    >>> check_tokenizer("bytes")
    Traceback (most recent call last):
    ValueError: tokenizer is the string 'bytes', but must be a tokenizer: mnemos.data.open_tokenizer('bytes')
    """
    if isinstance(tokenizer, str | os.PathLike):
        name = str(tokenizer)
        raise ValueError(
            f"tokenizer is the string {name!r:.80}, but must be a tokenizer: mnemos.data.open_tokenizer({name!r:.80})"
        )
    if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}, but must have encode(text) and decode(ids)")


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
