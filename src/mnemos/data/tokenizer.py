"""Tokenizers behind one small interface: bytes, `tokenizers` files, and any tokenizer of transformers.

Byte tokenizer: id = byte, vocabulary 256; byte 0 ends a document (readers remove NULs from text).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .files import read_json, require, write_json
from .panics import PanicError, panics_refused

SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
MAX_VOCAB = 2**24  # ids; a model has an embedding for each, used or not
ENDS = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
BEGINS = ("<bos>", "<s>", "<|begin_of_text|>", "[CLS]")


class Tokenizer(ABC):
    """Converts text to token ids and back. `bytes_per_token` is that of the corpus; bits per byte = loss / ln 2 / bytes_per_token."""

    name: str
    vocab_size: int
    eos_token_id: int
    bos_token_id: int | None
    pad_token_id: int
    bytes_per_token: float | None = None

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""

    @abstractmethod
    def save(self, folder: str | os.PathLike) -> None:
        """Write files that `open_tokenizer(folder)` and transformers' AutoTokenizer can open."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Equal for two tokenizers that produce the same ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self.encode_batch([text])[0].tolist()


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as tokens.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("hé"), tokenizer.decode([104, 195, 169, 0])
    ([104, 195, 169], 'hé')
    """

    name = "bytes"
    vocab_size = 256
    eos_token_id = bos_token_id = pad_token_id = 0
    bytes_per_token = 1.0

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(errors="replace").replace(b"\0", b""), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if i).decode(errors="replace")

    def save(self, folder: str | os.PathLike) -> None:
        from .byte_files import save_bytes

        save_bytes(Path(folder))

    def fingerprint(self) -> str:
        return "bytes"


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, which uses all cores. Special tokens inside a text are encoded as plain text."""

    def __init__(self, name: str, backend: Any, eos: int, bos: int | None, pad: int | None, config: dict | None = None):
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.name, self.backend, self.config = name, backend, config or {}
        self.eos_token_id, self.bos_token_id = eos, bos
        self.pad_token_id = eos if pad is None else pad
        self.vocab_size = _vocab_size(name, backend.get_vocab(with_added_tokens=True))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            with panics_refused(f"tokenizer {self.name!r} failed at a text"):
                encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as wrong:
            if type(wrong) is not Exception:  # the library raises plain Exception
                raise
            raise ValueError(f"tokenizer {self.name!r} cannot encode a text: {wrong}") from None
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        with panics_refused(f"tokenizer {self.name!r} failed at token ids"):
            return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder: str | os.PathLike) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "tokenizer.json", json.loads(self.backend.to_str()))
        tokens = {"eos_token": self.eos_token_id, "bos_token": self.bos_token_id, "pad_token": self.pad_token_id}
        named = {name: self.backend.id_to_token(i) for name, i in tokens.items() if i is not None}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_json(folder / "tokenizer_config.json", config | named | self.config)

    def fingerprint(self) -> str:
        content = f"{self.backend.to_str()}{self.eos_token_id},{self.bos_token_id}"
        return hashlib.sha256(content.encode()).hexdigest()[:24]


class SlowTokenizer(Tokenizer):
    """A tokenizer of transformers that is implemented in Python."""

    def __init__(self, name: str, inner: Any, eos: int):
        self.name, self.inner = name, inner
        self.eos_token_id, self.bos_token_id = eos, inner.bos_token_id
        self.pad_token_id = eos if inner.pad_token_id is None else inner.pad_token_id
        self.vocab_size = max(len(inner), _vocab_size(name, inner.get_vocab()))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self.inner.encode(text, add_special_tokens=False, verbose=False), np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder: str | os.PathLike) -> None:
        self.inner.save_pretrained(str(folder))

    def fingerprint(self) -> str:
        content = json.dumps([sorted(self.inner.get_vocab().items()), self.eos_token_id, self.bos_token_id])
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def open_tokenizer(name: str, eos_token: str | None = None) -> Tokenizer:
    """Open a tokenizer: `bytes`, a tokenizer.json, a folder, or a hub name. (`bpe:32000` must be trained first: see `train_bpe`.)

    >>> open_tokenizer("bytes").vocab_size
    256
    """
    if not isinstance(name, str | os.PathLike):
        raise ValueError(
            f"tokenizer is a {type(name).__name__}, but must be a name: bytes, a file, a folder or a hub name"
        )
    name = str(name)
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if os.path.isfile(path):  # unlike Path.is_file, no error for a name that is too long
        return _from_file(path, name, eos_token)
    if os.path.isdir(path) and name.strip():
        if not any(path.glob("*token*")) and not any(path.glob("vocab*")):
            raise ValueError(
                f"tokenizer {name!r} is a folder, but transformers cannot open it: there is no tokenizer.json"
            )
        config = read_json(path / "tokenizer_config.json")
        if isinstance(config, dict) and config.get("mnemos_tokenizer") == "bytes":
            return ByteTokenizer()
    elif name.startswith((".", "/", "~")) or name.endswith(".json") or not name.strip():
        raise ValueError(
            f"tokenizer {name!r} does not exist; it may be bytes, bpe:32000, a file, a folder or a hub name"
        )
    return _from_transformers(name, str(path) if os.path.isdir(path) else name, eos_token)


def _from_file(path: Path, name: str, eos_token: str | None) -> Tokenizer:
    library = require("tokenizers", "lm")
    try:
        with panics_refused(f"tokenizer {name!r} is damaged", quiet=True):
            backend = library.Tokenizer.from_file(str(path))
            _try_out(backend)
    except PanicError:
        raise
    except Exception as broken:  # the library raises plain Exception
        raise ValueError(f"tokenizer {name!r} is not a readable tokenizer.json: {broken}") from None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    first = lambda names: next((vocabulary[token] for token in names if token in vocabulary), None)  # noqa: E731
    eos = _end(name, first([eos_token] if eos_token else ENDS), eos_token)
    return FastTokenizer(name, backend, eos, first(BEGINS), first(["<pad>", "[PAD]"]))


def _from_transformers(name: str, path: str, eos_token: str | None) -> Tokenizer:
    library = require("transformers", "lm")
    try:
        try:
            with panics_refused(f"tokenizer {name!r} is damaged", quiet=True):
                inner = library.AutoTokenizer.from_pretrained(path, local_files_only=True)
                if inner.is_fast:
                    _try_out(inner.backend_tokenizer)
        except OSError:
            if os.path.isdir(path):
                raise
            require("huggingface_hub", "lm").HfApi().model_info(name, timeout=20)  # transformers would try for a minute
            inner = library.AutoTokenizer.from_pretrained(path)
    except PanicError:
        raise
    except Exception as wrong:
        reason = (str(wrong).strip().splitlines() or [type(wrong).__name__])[0]
        where = "is a folder, but transformers" if os.path.isdir(path) else "is not a file or folder, and the hub"
        raise ValueError(f"tokenizer {name!r} {where} cannot open it: {reason}") from None
    eos = inner.get_vocab().get(eos_token) if eos_token else inner.eos_token_id
    eos = _end(name, eos, eos_token)
    if not inner.is_fast:
        return SlowTokenizer(name, inner, eos)
    return FastTokenizer(name, inner.backend_tokenizer, eos, inner.bos_token_id, inner.pad_token_id)


def _try_out(backend: Any) -> None:
    """Encode and decode a text, so that a tokenizer that panics does so now; other errors appear in use."""
    with contextlib.suppress(Exception):
        backend.decode(backend.encode("A text, 1 é", add_special_tokens=False).ids)
        backend.decode(list(range(min(4, backend.get_vocab_size()))))


def _vocab_size(name: str, vocabulary: dict[str, int]) -> int:
    """One more than the largest id; raises an error for an id above the limit."""
    if not vocabulary:
        raise ValueError(f"tokenizer {name!r} has no token")
    token, largest = max(vocabulary.items(), key=lambda entry: entry[1])
    if largest >= MAX_VOCAB:
        raise ValueError(
            f"tokenizer {name!r} has the id {largest} for {token!r:.40}, but ids must be below {MAX_VOCAB:,}: its file is damaged"
        )
    return largest + 1


def _end(name: str, eos: int | None, eos_token: str | None) -> int:
    if eos is None and eos_token:
        raise ValueError(f"eos_token {eos_token!r} is not in the vocabulary of tokenizer {name!r}")
    if eos is None:
        raise ValueError(f"tokenizer {name!r} defines no end-of-document token: name it with eos_token")
    return eos


def check_vocabulary(vocab_size: int, model_vocab: int) -> None:
    """Raise a ValueError if the model has fewer embeddings than the tokenizer has tokens.

    >>> check_vocabulary(32000, 256)
    Traceback (most recent call last):
    ValueError: the tokenizer has 32000 tokens, but the model's vocab_size is 256: it must be at least 32000
    """
    if vocab_size > model_vocab:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens, but the model's vocab_size is {model_vocab}: it must be at least {vocab_size}"
        )
