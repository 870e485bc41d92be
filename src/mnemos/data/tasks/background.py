"""Text to hide things in: tokenised once, sentence by sentence, and repeated for as long as need be.

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
    """A text as token ids (M,) with the places where its sentences begin. Positions may lie beyond M: the text repeats.

    text: a string, or several. drop: sentences to leave out, for instance those that would give an answer away.

    >>> from mnemos.data.tasks import ByteTokenizer
    >>> noise = Background(NOISE, ByteTokenizer())
    >>> ByteTokenizer().decode(np.concatenate(list(noise.take(90, 110))))
    'The grass is green. '
    """

    def __init__(self, text: str | Iterable[str], tokenizer: Any, drop: Callable[[str], bool] | None = None):
        parts = [text] if isinstance(text, str) else list(text)
        kept = [s for part in parts for s in sentences(part) if drop is None or not drop(s)]
        if not kept:
            raise ValueError("the background text has no sentence that may be used; give a longer one")
        self.text = " ".join(kept)
        pieces = [np.asarray(encode(tokenizer, sentence + " "), dtype=np.int64) for sentence in kept]
        self.ids = np.concatenate(pieces).astype(np.int32)  # M
        self.starts = np.concatenate([[0], np.cumsum([len(p) for p in pieces])[:-1]])

    @classmethod
    def from_path(
        cls, path: str | os.PathLike, tokenizer: Any, drop: Callable[[str], bool] | None = None
    ) -> Background:
        """A text file, or every .txt and .md below a folder in the order of their names."""
        return cls(read_texts(path), tokenizer, drop)

    def __len__(self) -> int:
        return len(self.ids)

    def next_start(self, position: int) -> int:
        """The first place at or after `position` where a sentence begins."""
        rounds, rest = divmod(position, len(self.ids))
        i = np.searchsorted(self.starts, rest)
        return rounds * len(self.ids) + (len(self.ids) if i == len(self.starts) else int(self.starts[i]))

    def take(self, start: int, stop: int, block: int = 1 << 16) -> Iterator[np.ndarray]:
        """The tokens [start, stop), in pieces of at most `block`; nothing longer is ever made."""
        while start < stop:
            inside = start % len(self.ids)
            piece = self.ids[inside : inside + min(block, stop - start)]
            yield piece
            start += len(piece)

    def stretch(self, length: int, rng: np.random.Generator | None = None) -> tuple[int, int]:
        """[start, stop) of so many tokens, which ends where a sentence does: any, or the text's last. What is cut, is cut in front."""
        stop = len(self.ids) + (0 if rng is None else int(rng.choice(self.starts)))
        while stop < length:
            stop += len(self.ids)
        return stop - length, stop

    def place(self, position: int, start: int) -> int:
        """Where something may be hidden: in front of the next sentence, or of everything that begins at `start`."""
        return start if position <= start else self.next_start(position)


def text_files(folder: Path) -> list[Path]:
    """Every .txt and .md file below a folder, in the order of their names."""
    return sorted(p for p in folder.rglob("*") if p.suffix in (".txt", ".md") and p.is_file())


def is_text(place: str | os.PathLike) -> bool:
    """Whether a string is a text itself, not the name of a file: it has several lines, or is longer than a name may be.

    >>> is_text("notes.txt"), is_text("First line.\\nSecond line.")
    (False, True)
    """
    if not isinstance(place, str) or os.path.exists(place):
        return False
    return "\n" in place or (len(place) > MAX_NAME and " " in place)


def read_texts(path: str | os.PathLike) -> list[str]:
    """The text of a file, or of every .txt and .md file below a folder, in the order of their names; a text itself is returned."""
    if is_text(path):
        return [str(path)]
    path = Path(path)
    if os.path.isdir(path):  # unlike Path.is_dir, not an error for a name that is too long
        files = text_files(path)
        if not files:
            raise ValueError(f"{path} has no .txt or .md file")
        return [p.read_text(encoding="utf-8", errors="replace") for p in files]
    if not os.path.isfile(path):
        shown = str(path) if len(str(path)) <= MAX_NAME else f"{str(path)[:60]}…"
        raise ValueError(f"{shown} is neither a file nor a folder; a text itself has more than one line")
    return [path.read_text(encoding="utf-8", errors="replace")]
