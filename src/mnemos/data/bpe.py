"""Trains a byte-level BPE tokenizer on a corpus, with the `tokenizers` library."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..atomic_io import whole_file
from .files import require
from .readers import ReadRules, read
from .report import ReadReport
from .sources import Source
from .tokenizer import MAX_VOCAB, SPECIAL, FastTokenizer


def train_bpe(
    texts: Iterator[str] | Sequence[str], vocab_size: int = 32_000, name: str | None = None, progress: bool = False
) -> FastTokenizer:
    """Train a byte-level BPE tokenizer with `<pad> <unk> <bos> <eos>` as tokens 0 to 3; it encodes any text.

    The vocabulary is smaller than `vocab_size` if a small corpus has too few pairs.

    >>> tokenizer = train_bpe(["to be or not to be"] * 9, vocab_size=270)
    >>> tokenizer.decode(tokenizer.encode("to be — or not")), tokenizer.eos_token_id
    ('to be — or not', 3)
    """
    least = 256 + len(SPECIAL)
    if not isinstance(vocab_size, int) or vocab_size < least:
        raise ValueError(f"vocab_size must be at least {least} (bytes and special tokens), but is {vocab_size!r}")
    if vocab_size > MAX_VOCAB:  # the library would allocate that much memory and abort
        raise ValueError(f"vocab_size must be at most {MAX_VOCAB:,}, but is {vocab_size:,}")
    library = require("tokenizers", "lm")
    backend = library.Tokenizer(library.models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    backend.train_from_iterator(texts, trainer)
    return FastTokenizer(name or f"bpe:{vocab_size}", backend, eos=3, bos=2, pad=0, config={"unk_token": "<unk>"})


def sample_texts(
    sources: Sequence[Source],
    rules: ReadRules,
    target_chars: int,
    seed: int = 0,
    on_chars: Callable[[int], None] = lambda n: None,
) -> Iterator[str]:
    """About `target_chars` characters of the sources: shares by weight, from many files, reproducible for a seed."""
    if target_chars < 1:
        raise ValueError(f"target_chars must be at least 1, but is {target_chars}")
    sizes = [source.weight or max(1.0, float(sum(item.size for item in source.items))) for source in sources]
    order, found = random.Random(seed), False
    for source, size in zip(sources, sizes):
        wanted = target_chars * size / sum(sizes)
        items = list(source.items)
        order.shuffle(items)
        for i, item in enumerate(items):
            share = wanted / (len(items) - i)  # the remaining files make up for a short one
            for piece in read(item, rules, ReadReport()):
                text = piece.text[: max(1, int(share))]
                found = True
                yield text
                on_chars(len(text))
                wanted, share = wanted - len(text), share - len(text)
                if share < 1:
                    break
            if wanted < 1:
                break
    if not found:
        raise ValueError(f"{', '.join(source.name for source in sources)} holds no text to train a tokenizer on")


def kept(texts: Iterator[str], path: str | Path) -> Iterator[str]:
    """Yield the texts, and write them to a file, atomically."""
    with whole_file(path) as file:
        for text in texts:
            file.write(text.encode(errors="replace") + b"\n")
            yield text
