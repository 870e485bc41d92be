"""`AnswerText`: the pieces of an answer that can be shown, up to a stop text."""

from __future__ import annotations

from .text_stream import TextStream


class AnswerText:
    """The text of an answer in pieces, cut off at the first stop text.

    stream: of the tokens. stop: texts that end the answer.

    >>> answer = AnswerText(TextStream(lambda ids: bytes(ids).decode()), stop=("lo",))
    >>> [answer.push(byte) for byte in b"hello"], answer.is_stopped
    (['h', 'e', '', 'l', ''], True)
    """

    def __init__(self, stream: TextStream, stop: tuple[str, ...]):
        self.stream, self.stop, self.held, self.is_stopped = stream, stop, "", False

    def push(self, token: int) -> str:
        """The text that can be shown after one more token."""
        return self._cut(self.held + self.stream.push(token))

    def end(self, token: int, is_end_token: bool) -> str:
        """The last piece: nothing is held back after it."""
        text = self.held + ("" if is_end_token else self.stream.push(token)) + self.stream.finish()
        found = self._cut(text)
        rest, self.held = self.held, ""
        return found if self.is_stopped else found + rest

    def _cut(self, text: str) -> str:
        """The text that can be shown: not the beginning of a stop text at its end."""
        ends = [at for at in (text.find(word) for word in self.stop) if at >= 0]
        if ends:
            self.held, self.is_stopped = "", True
            return text[: min(ends)]
        held = max((n for word in self.stop for n in range(len(word)) if text.endswith(word[:n])), default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]
