"""`Pace`: how many tokens of a prompt are read between two decoding steps.

Nobody shall wait for somebody else's long prompt: while others are answering, the time of a piece is at most `budget` decoding steps.
The times are estimated from those measured so far. A model that decodes a token in less time than any piece takes reads prompts token
by token then.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST = 4  # tokens of a piece
UNUSUAL = 16  # tokens of a piece that is read in another way, while others are answering
SHORT = 32  # tokens: a prompt as short as this is read at once, and its time is given back to the others afterwards
RECENT = 0.2  # weight of the last measurement
HOPE = 0.99  # an estimate that forbids a size shrinks by this factor per round, so that the size is tried again


@dataclass(frozen=True)
class Piece:
    """tokens: how many to read. is_single: one by one."""

    tokens: int
    is_single: bool = False


class Pace:
    """Sizes of pieces. largest: tokens of a piece. budget: decoding steps.

    >>> pace = Pace(largest=256, budget=2.0)
    >>> pace.piece(1000, is_busy=False)
    Piece(tokens=256, is_single=False)
    >>> pace.stepped(1, 0.010); pace.read(Piece(16), 0.015); pace.read(Piece(64), 0.030)
    >>> pace.stepped(1, 0.010)
    >>> pace.piece(1000, is_busy=True)
    Piece(tokens=16, is_single=False)
    """

    def __init__(self, largest: int, budget: float):
        self.largest, self.budget = largest, budget
        self.step: float | None = None  # seconds of a decoding step of all rows
        self.single: float | None = None  # seconds of a token that is read alone
        self.pieces: dict[int, float] = {}  # seconds of a piece, by its size
        self.debt = 0.0  # seconds beyond the budget
        self.used = 0.0  # seconds of pieces since the last step

    def stepped(self, rows: int, seconds: float) -> None:
        """A decoding step of so many rows took this time."""
        self.used = 0.0
        self.step = _mean(self.step, seconds)
        if rows == 1:
            self.single = _mean(self.single, seconds)

    def read(self, piece: Piece, seconds: float) -> None:
        """A piece took this time."""
        self.used += seconds
        if piece.is_single:
            self.single = _mean(self.single, seconds / piece.tokens)
        else:
            size = _size_class(piece.tokens)
            self.pieces[size] = max(seconds, _mean(self.pieces.get(size), seconds))

    def piece(self, left: int, is_busy: bool) -> Piece | None:
        """The next piece of a prompt that has `left` more tokens; None if none may be read before the next step.
        is_busy: others are answering. After a first piece, short prompts may be read in the rest of its time."""
        if not is_busy or self.step is None:
            self.debt = self.used = 0.0
            return Piece(min(left, self.largest))
        allowed = self.budget * self.step - self.used
        if self.used:
            return Piece(left) if left <= SHORT and self._seconds(left) <= allowed else None
        if self.debt > 0:
            self.debt -= allowed
            return None
        if left <= SHORT:
            self.debt = max(0.0, self._seconds(left) - allowed)
            return Piece(left)
        fitting = SMALLEST // 2
        for size in _sizes(self.largest):
            if self._seconds(size) > allowed:
                self.pieces[size] = HOPE * self._seconds(size)
                break
            fitting = size
        if fitting >= SMALLEST:
            return Piece(min(left, fitting))
        single = self._seconds(1) if self.single is None else self.single
        return Piece(min(left, SMALLEST, max(1, int(allowed / single))), is_single=True)

    def unusual_piece(self, left: int, is_busy: bool) -> Piece | None:
        """The next piece of tokens that are read in another way than prompts: a small one, whose time `spent` gives back."""
        if not is_busy or self.step is None:
            self.debt = 0.0
            return Piece(min(left, SHORT))
        if self.used:
            return None
        if self.debt > 0:
            self.debt -= self.budget * self.step
            return None
        return Piece(min(left, UNUSUAL))

    def spent(self, seconds: float) -> None:
        """An unusual piece took this time; the others get it back."""
        self.used += seconds
        self.debt = max(0.0, seconds - self.budget * (self.step or 0.0))

    def _seconds(self, tokens: int) -> float:
        """The estimated time of a piece: that of its size, or in proportion to the nearest smaller or larger size."""
        size = _size_class(tokens)
        if size in self.pieces:
            return self.pieces[size]
        smaller = [known for known in self.pieces if known < size]
        if smaller:
            return self.pieces[max(smaller)] * size / max(smaller)
        if self.pieces:
            return self.pieces[min(self.pieces)]
        return self.step or 0.0


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + RECENT * (now - before)


def _size_class(tokens: int) -> int:
    """The next power of two, at least `SMALLEST`."""
    return max(SMALLEST, 1 << max(0, tokens - 1).bit_length())


def _sizes(largest: int) -> list[int]:
    found = [SMALLEST]
    while found[-1] * 2 <= largest:
        found.append(found[-1] * 2)
    return found
