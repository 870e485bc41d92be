"""The byte tokenizer as files of the `tokenizers` library: the same ids in any program that reads tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from .files import require, write_json

END = "<eos>"


def save_bytes(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: one token for each byte, no merges, byte 0 is `<eos>`."""
    library = require("tokenizers", "lm")
    letters = byte_letters()
    vocabulary = {END: 0} | {letters[byte]: byte for byte in range(1, 256)}
    backend = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = library.decoders.ByteLevel()
    backend.add_special_tokens([END])
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer.json", json.loads(backend.to_str()))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names = dict.fromkeys(("eos_token", "bos_token", "pad_token"), END)
    write_json(folder / "tokenizer_config.json", config | names | {"mnemos_tokenizer": "bytes"})


def byte_letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's alphabet: printable ones for themselves, the others from U+0100 on.

    >>> byte_letters()[0], byte_letters()[65]
    ('Ā', 'A')
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
