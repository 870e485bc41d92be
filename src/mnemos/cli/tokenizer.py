"""`mnemos tokenizer train` trains a BPE tokenizer on a corpus; `mnemos tokenizer show` prints how a tokenizer splits a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass
class TrainTokenizer:
    """Train a byte-level BPE tokenizer with <pad> <unk> <bos> <eos> on a sample of the sources, and write it to a folder."""

    data: Annotated[tuple[str, ...], tyro.conf.Positional] = ("embedded",)
    """Files, folders, named sources or hub datasets; append `:0.4` for a weight."""
    output: str = "tokenizer"
    """Folder to write, for `--tokenizer FOLDER` and transformers' AutoTokenizer."""
    vocab_size: int = 32_000
    """Vocabulary size, including special tokens; smaller for a small corpus."""
    target_chars: int = 50_000_000
    """Largest number of characters to train on."""
    keep_corpus: bool = False
    """Keep the sampled text."""
    corpus_path: str | None = None
    """File of the sampled text; by default corpus.txt in the output folder; implies --keep-corpus."""
    seed: int = 42
    """Seed of the order in which files are sampled."""
    text_column: str = "text"
    """Column or key that holds a document."""


@dataclass
class ShowTokenizer:
    """Print a tokenizer's size and special tokens, and its tokens of a text."""

    name: Annotated[str, tyro.conf.Positional] = "bytes"
    """bytes, a tokenizer.json, a folder, or a hub name."""
    text: str = "The quick brown fox jumps over the lazy dog."
    """Text to tokenise."""
    eos_token: str | None = None
    """The end-of-document token, if the tokenizer defines none."""


def tokenizer(
    command: Annotated[
        Annotated[TrainTokenizer, tyro.conf.subcommand("train")]
        | Annotated[ShowTokenizer, tyro.conf.subcommand("show")],
        tyro.conf.arg(name=""),
    ],
) -> None:
    """Train or show tokenizers."""
    _train(command) if isinstance(command, TrainTokenizer) else _show(command)


def _train(command: TrainTokenizer) -> None:
    from ..data.bpe import kept, sample_texts, train_bpe
    from ..data.display import training_tokenizer
    from ..data.readers import ReadRules
    from ..data.sources import resolve

    rules = ReadRules(column=command.text_column)
    sources = resolve(command.data, rules)
    folder = Path(command.output)
    if (folder / "tokenizer.json").exists():
        raise ValueError(f"{folder} holds a tokenizer already: choose another --output, or remove that one first")
    folder.mkdir(parents=True, exist_ok=True)
    with training_tokenizer(None) as on_chars:
        texts = sample_texts(sources, rules, command.target_chars, command.seed, on_chars)
        if command.keep_corpus or command.corpus_path:
            texts = kept(texts, command.corpus_path or folder / "corpus.txt")
        made = train_bpe(texts, command.vocab_size)
    made.save(folder)
    print(f"{made.vocab_size} tokens in {folder}")
    if made.vocab_size < command.vocab_size:
        print(f"The corpus has too few pairs for the {command.vocab_size} tokens asked for.")


def _show(command: ShowTokenizer) -> None:
    from ..data.tokenizer import open_tokenizer

    opened = open_tokenizer(command.name, command.eos_token)
    ids = opened.encode(command.text)
    size = len(command.text.encode())
    print(f"{opened.name}: {opened.vocab_size} tokens, end {opened.eos_token_id}, begin {opened.bos_token_id}")
    print(f"{len(ids)} tokens for {size} bytes ({size / max(1, len(ids)):.2f} bytes a token):", *ids)
