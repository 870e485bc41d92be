"""`TextStream`: the text of tokens that arrive one by one, in pieces of whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNKNOWN = "\ufffd"  # the replacement character: bytes that are no character, or not yet
MAX_OPEN = 3  # bytes of an unfinished character, each shown as one replacement character by some tokenizers
LONGEST = 64  # tokens that are decoded together
KEPT = 16  # tokens that are decoded again as context: the first token of a text may be decoded in another way


class TextStream:
    """Decodes tokens one by one. A piece never ends inside a character, and the joined pieces are the text of all tokens.

    decode: token ids -> text.

    >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    >>> [stream.push(byte) for byte in "né".encode()], stream.finish()
    (['n', '', 'é'], '')
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self.decode, self.ids, self.shown = decode, [], 0

    def push(self, token: int) -> str:
        """The text that can be shown after one more token, often one word, sometimes nothing."""
        self.ids.append(token)
        text = self.decode(self.ids)
        open_ = min(MAX_OPEN, len(text) - len(text.rstrip(UNKNOWN)))
        ready = text[: len(text) - open_]
        piece, self.shown = ready[self.shown :], max(self.shown, len(ready))
        if len(self.ids) > LONGEST and not open_:
            self.ids = self.ids[-KEPT:]
            self.shown = len(self.decode(self.ids))
        return piece

    def finish(self) -> str:
        """The rest: replacement characters for an unfinished character."""
        text = self.decode(self.ids)
        piece, self.shown = text[self.shown :], len(text)
        return piece
