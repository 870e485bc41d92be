"""Background text in which tasks hide facts: tokenised once, sentence by sentence, and repeated to any length.

Shapes: M tokens of the text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .text import encode, sentences

MAX_NAME = 255  # characters of a file's name
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Background:
    """A text as token ids (M,) with the positions where its sentences begin. Positions may lie beyond M: the text repeats.

    text: one string, or several. drop: returns True for sentences to leave out, such as those that contain an answer.

    >>> from mnemos.data.tasks import ByteTokenizer
    >>> noise = Background(NOISE, ByteTokenizer())
    >>> ByteTokenizer().decode(np.concatenate(list(noise.take(90, 110))))
    'The grass is green. '
    """

    def __init__(self, text: str | Iterable[str], tokenizer: Any, drop: Callable[[str], bool] | None = None):
        parts = [text] if isinstance(text, str) else list(text)
        kept = [s for part in parts for s in sentences(part) if drop is None or not drop(s)]
        if not kept:
            raise ValueError("the background text has no usable sentence; give a longer text")
        self.text = " ".join(kept)
        pieces = [np.asarray(encode(tokenizer, sentence + " "), dtype=np.int64) for sentence in kept]
        self.ids = np.concatenate(pieces).astype(np.int32)  # M
        self.starts = np.concatenate([[0], np.cumsum([len(p) for p in pieces])[:-1]])

    @classmethod
    def from_path(
        cls, path: str | os.PathLike, tokenizer: Any, drop: Callable[[str], bool] | None = None
    ) -> Background:
        """A text file, or all .txt and .md files below a folder, sorted by name."""
        return cls(read_texts(path), tokenizer, drop)

    def __len__(self) -> int:
        return len(self.ids)

    def next_start(self, position: int) -> int:
        """The first position at or after `position` where a sentence begins."""
        rounds, rest = divmod(position, len(self.ids))
        i = np.searchsorted(self.starts, rest)
        return rounds * len(self.ids) + (len(self.ids) if i == len(self.starts) else int(self.starts[i]))

    def take(self, start: int, stop: int, block: int = 1 << 16) -> Iterator[np.ndarray]:
        """The tokens [start, stop), in pieces of at most `block` tokens."""
        while start < stop:
            inside = start % len(self.ids)
            piece = self.ids[inside : inside + min(block, stop - start)]
            yield piece
            start += len(piece)

    def stretch(self, length: int, rng: np.random.Generator | None = None) -> tuple[int, int]:
        """A range [start, stop) of `length` tokens that ends with a sentence: a random one, or without rng the last one of the text."""
        stop = len(self.ids) + (0 if rng is None else int(rng.choice(self.starts)))
        while stop < length:
            stop += len(self.ids)
        return stop - length, stop

    def place(self, position: int, start: int) -> int:
        """A position at which to insert a fact: in front of the next sentence, or `start` if the range begins there."""
        return start if position <= start else self.next_start(position)


def text_files(folder: Path) -> list[Path]:
    """All .txt and .md files below a folder, sorted by name."""
    return sorted(p for p in folder.rglob("*") if p.suffix in (".txt", ".md") and p.is_file())


def is_text(place: str | os.PathLike) -> bool:
    """Whether a string is a text, not the name of a file: it has several lines, or is longer than a file name can be.

    >>> is_text("notes.txt"), is_text("First line.\\nSecond line.")
    (False, True)
    """
    if not isinstance(place, str) or os.path.exists(place):
        return False
    return "\n" in place or (len(place) > MAX_NAME and " " in place)


def read_texts(path: str | os.PathLike) -> list[str]:
    """The text of a file, or of all .txt and .md files below a folder, sorted by name; a text is returned unchanged."""
    if is_text(path):
        return [str(path)]
    path = Path(path)
    if os.path.isdir(path):  # unlike Path.is_dir, no error for a name that is too long
        files = text_files(path)
        if not files:
            raise ValueError(f"{path} has no .txt or .md file")
        return [p.read_text(encoding="utf-8", errors="replace") for p in files]
    if not os.path.isfile(path):
        shown = str(path) if len(str(path)) <= MAX_NAME else f"{str(path)[:60]}…"
        raise ValueError(f"{shown} is neither a file nor a folder; a text given directly must have more than one line")
    return [path.read_text(encoding="utf-8", errors="replace")]
