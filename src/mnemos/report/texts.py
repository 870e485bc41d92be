"""Displayable texts of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_TOKENS_PER_CHARACTER = 4  # the bytes of one UTF-8 character
SPAN = 24  # tokens decoded together: covers the effects of neighbours on decoding


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds. A token inside a character, or without text, is shown as its id.

    >>> from mnemos.data import open_tokenizer
    >>> token_texts(open_tokenizer("bytes"), list("hé".encode()))
    ['h', '⟨195⟩', 'é']
    """
    texts: list[str] = []
    start, shown, waiting = 0, "", 0
    for i, token in enumerate(ids):
        text = tokenizer.decode(ids[start : i + 1])
        if text.endswith("\ufffd") and waiting < MAX_TOKENS_PER_CHARACTER - 1:
            texts.append(f"⟨{token}⟩")
            waiting += 1
            continue
        new = text[len(shown) :] if text.startswith(shown) else tokenizer.decode([token])
        texts.append(new or f"⟨{token}⟩")
        waiting = 0
        if i - start < SPAN:
            shown = text
        else:
            start, shown = i, tokenizer.decode([token])
    return texts


def read_text(path: str | Path, tokens: int) -> tuple[str, bool]:
    """The beginning of a file, with more than `tokens` tokens, and whether the file is longer."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"text={str(path)!r} is not a file; give a file with text in UTF-8")
    room = 2**16 + 64 * tokens
    with open(path, "rb") as file:
        raw = file.read(room + 1)
    return raw[:room].decode("utf-8", errors="replace"), len(raw) > room
