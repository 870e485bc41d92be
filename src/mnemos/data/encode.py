"""Reads one part of a source, tokenises it and writes it as a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .readers import ReadRules, read
from .report import ReadReport
from .sharding import Item
from .shards import ShardWriter, dtype_of
from .tokenizer import Tokenizer

FLUSH = 2**22  # characters tokenised at a time


@dataclass
class TokenizeProgress:
    """Progress since the last call: bytes read from files, bytes of text, and tokens."""

    file_bytes: int = 0
    text_bytes: int = 0
    tokens: int = 0


OnProgress = Callable[[TokenizeProgress], None]


def encode_part(
    items: Sequence[Item],
    number: int,
    folder: Path,
    tokenizer: Tokenizer,
    rules: ReadRules,
    add_bos: bool = False,
    on_progress: OnProgress = lambda p: None,
) -> dict:
    """Read items, tokenise them, write shard `number`. Returns the content of its .json file."""
    report = ReadReport()
    done = 0

    def on_bytes(n: int) -> None:
        nonlocal done
        done += n

    with ShardWriter(folder, number, dtype_of(tokenizer.vocab_size)) as shard:
        pending: list[tuple[str, bool]] = []
        chars = 0
        fresh = True

        def flush() -> None:
            nonlocal pending, chars, fresh, done
            before = shard.bytes, shard.tokens
            for (text, last), ids in zip(pending, tokenizer.encode_batch([text for text, _ in pending])):
                if fresh and add_bos:
                    shard.write(np.array([tokenizer.bos_token_id]))
                shard.add_text(text)
                shard.write(ids)
                fresh = last
                if last:
                    shard.write(np.array([tokenizer.eos_token_id]))
                    shard.end_document()
            on_progress(TokenizeProgress(done, shard.bytes - before[0], shard.tokens - before[1]))
            pending, chars, done = [], 0, 0

        for item in items:
            for piece in read(item, rules, report, on_bytes):
                pending.append((piece.text, piece.last))
                chars += len(piece.text)
                if chars >= FLUSH:
                    flush()
        flush()
    return shard.finish(report)
