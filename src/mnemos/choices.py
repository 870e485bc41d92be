"""Error messages for unknown names, with the nearest valid name and the list of all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.7  # of difflib's ratio; above the similarity of qa5 and qa6


def nearest(name: object, known: Iterable[object]) -> str | None:
    """The known name most similar to `name`, ignoring case; None if none is similar.

    >>> nearest("titan-mag", ["titans-mag", "atlas"]), nearest("gpt", ["titans-mag", "atlas"])
    ('titans-mag', None)
    """
    folded = {str(option).lower(): str(option) for option in known}
    close = difflib.get_close_matches(str(name).lower(), folded, 1, CUTOFF)
    return folded[close[0]] if close else None


def unknown(what: str, name: object, known: Iterable[object]) -> ValueError:
    """A ValueError for an unknown name. what: a noun, or `argument=`.

    >>> str(unknown("size", "nanoo", ["nano", "micro"]))
    "size 'nanoo' is unknown; did you mean nano? Choose one of nano, micro"
    """
    known = [str(option) for option in known]
    close = nearest(name, known)
    hint = f"did you mean {close}? Choose" if close else "choose"
    blank = "" if what.endswith("=") else " "
    return ValueError(f"{what}{blank}{name!r:.80} is unknown; {hint} one of {', '.join(known)}")
