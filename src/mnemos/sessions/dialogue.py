"""`Dialogue`: the tokens of a turn, by the chat template of a tokenizer, or as plain text without one.

A session reads only new tokens, so a template is rendered with placeholders for earlier turns, and the text behind them is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FIRST, LAST = "mnemosfirstturn", "mnemoslastturn"  # placeholders for the contents of earlier turns
NEAR = 4  # tokens behind an answer among which a template may repeat its end token
NOTED = "Noted."  # read as an answer after a told turn, if a template does not allow two turns of a user in a row


class Dialogue:
    """Tokens of the turns of a conversation.

    tokenizer: of transformers, or of `mnemos.data`. ends: token ids that end an answer.

    >>> from mnemos.data import open_tokenizer
    >>> dialogue = Dialogue(open_tokenizer("bytes"))
    >>> dialogue.has_template, dialogue.first("hi")
    (False, [104, 105])
    """

    def __init__(self, tokenizer: Any, model: Any = None):
        if not callable(getattr(tokenizer, "encode", None)) or not callable(getattr(tokenizer, "decode", None)):
            raise ValueError(
                f"tokenizer is a {type(tokenizer).__name__}, but encode and decode are needed for a session"
            )
        self.tokenizer = tokenizer
        self.is_foreign = hasattr(tokenizer, "apply_chat_template")  # a tokenizer of transformers
        self.has_template = self.is_foreign and bool(getattr(tokenizer, "chat_template", None))
        self.ends = _end_tokens(tokenizer, model)

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens but those that the text itself has."""
        options = {"add_special_tokens": False} if self.is_foreign else {}
        return [int(i) for i in self.tokenizer.encode(text, **options)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False} if self.is_foreign else {}
        return self.tokenizer.decode(list(ids), **options)

    def first(self, text: str, system: str = "", answer: bool = True) -> list[int]:
        """Tokens of the first turn, with the system prompt and the beginning of the answer, if there is one to come."""
        if not self.has_template:
            return self._begin() + self.encode(f"{system}\n\n{text}" if system else text)
        messages = [_message("system", system)] if system else []
        return self.encode(self._render([*messages, _message("user", text)], answer))

    def plain(self, text: str, is_first: bool) -> list[int]:
        """Tokens of a text as it is, without template."""
        return (self._begin() if is_first else []) + self.encode(text)

    def next(self, text: str, after: str, last_token: int | None = None, answer: bool = True) -> list[int]:
        """Tokens of a turn after others. after: role of the turn before. last_token: the last token of the conversation, which the
        template may repeat behind an answer: it is not read twice."""
        if not self.has_template:
            return self.encode(text)
        if after != "assistant":
            return self.encode(self._after_told(text, answer))
        turns = [_message("user", FIRST), _message("assistant", LAST), _message("user", text)]
        ids = self.encode(_behind(self._render(turns, answer), LAST))
        if last_token in self.ends and last_token in ids[:NEAR]:
            return ids[ids.index(last_token) + 1 :]
        return ids

    def whole(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of a whole conversation, role and text of each message, up to the beginning of the next answer.

        >>> from mnemos.data import open_tokenizer
        >>> Dialogue(open_tokenizer("bytes")).whole([("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c")])
        [83, 10, 10, 97, 98, 99]
        """
        if self.has_template:
            return self.encode(self._render([_message(role, text) for role, text in messages], True))
        ids, heading = self._begin(), ""
        for i, (role, text) in enumerate(messages):
            if role == "system" and i + 1 < len(messages):
                heading += f"{text}\n\n"
            else:
                ids += self.encode(heading + text)
                heading = ""
        return ids

    def _after_told(self, text: str, answer: bool) -> str:
        """The text after a turn without an answer, which has been read to its end."""
        told, new = _message("user", FIRST), _message("user", text)
        read = _behind(self._render([told], False), FIRST)
        try:
            whole = _behind(self._render([told, new], answer), FIRST)
        except ValueError:
            whole = _behind(self._render([told, _message("assistant", NOTED), new], answer), FIRST)
        return whole.removeprefix(read)

    def _render(self, messages: list[dict[str, str]], answer: bool) -> str:
        try:
            found = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
        except Exception as wrong:  # a template is a program, and can raise anything
            reason = " ".join(str(wrong).split())[:200]
            raise ValueError(
                f"the chat template of the tokenizer does not accept the conversation: {reason}"
            ) from wrong
        return str(found)

    def _begin(self) -> list[int]:
        """The special token at the beginning of every text, if the tokenizer adds one."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return [bos] if self.is_foreign and bos is not None and bos in self.tokenizer.encode("") else []


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _behind(text: str, placeholder: str) -> str:
    _, found, rest = text.partition(placeholder)
    if not found:
        raise ValueError("the chat template of the tokenizer leaves out an earlier turn, so no turn can follow it")
    return rest


def _end_tokens(tokenizer: Any, model: Any) -> frozenset[int]:
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = [getattr(tokenizer, "eos_token_id", None), *(own if isinstance(own, list | tuple) else [own])]
    return frozenset(int(token) for token in found if token is not None)
