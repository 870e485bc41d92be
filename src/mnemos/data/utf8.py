"""Decodes and repairs UTF-8, detects binary data, and finds positions to cut at."""

from __future__ import annotations

JUNK = 0.1  # share of invalid or control characters above which a document is not text


def decode(raw: bytes) -> tuple[str, bool]:
    """Decode UTF-8. Returns the text and whether it needed repair: invalid bytes become U+FFFD, NULs are removed.

    >>> decode(b"caf\\xe9")
    ('caf\ufffd', True)
    """
    try:
        text, damaged = raw.decode(), False
    except UnicodeDecodeError:
        text, damaged = raw.decode(errors="replace"), True
    text, holes = repair(text)
    return text, damaged or holes


def repair(text: str) -> tuple[str, bool]:
    """Replace characters that UTF-8 cannot encode, and remove NULs (the byte tokenizer's end of a document). Returns the text and whether it changed.

    >>> repair("a\\0b")
    ('ab', True)
    """
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON can spell it
        return text.encode(errors="replace").decode().replace("\0", ""), True
    return (text.replace("\0", ""), True) if "\0" in text else (text, False)


def is_junk(raw: bytes) -> bool:
    """Whether bytes are not text: too many are invalid UTF-8 or control characters.

    >>> is_junk(bytes(range(256)) * 9), is_junk("naïve text".encode())
    (True, False)
    """
    text = raw.decode(errors="replace")
    strange = text.count("\ufffd") + sum(text.count(chr(c)) for c in range(32) if chr(c) not in "\t\n\r\f\x1b")
    return strange > JUNK * len(text)


def last_break(text: str) -> int:
    """The last position where white space begins, so that no word or run of white space is cut; the end if there is none.

    >>> last_break("one two  three")
    7
    """
    for i in range(len(text) - 1, max(len(text) - 10_000, 0), -1):
        if text[i].isspace() and not text[i - 1].isspace():
            return i
    return len(text)


def unfinished(raw: bytes) -> int:
    """The number of bytes at the end that may be the beginning of a character.

    >>> unfinished("é".encode()), unfinished("é".encode()[:1])
    (0, 1)
    """
    for n in range(1, min(4, len(raw) + 1)):
        byte = raw[-n]
        if byte & 0xC0 != 0x80:
            return n if byte >= 0xC0 and n < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
    return 0
