"""Sources become shards: once, in several processes, and a build that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ..whole import remove_parts
from .files import read_json, write_json
from .parts import Item, parts_of
from .readers import Rules, modules_of, read
from .report import Report
from .shards import FORMAT, ShardWriter, Store, dtype_of, whole_shard
from .sources import Source
from .tokenizer import Tokenizer

FLUSH = 2**22  # characters tokenised at a time
WORTH_PROCESSES = 2**25  # bytes of files below which starting processes costs more than it saves


@dataclass
class Progress:
    """What a build tells whoever watches: bytes of the files done, and text and tokens made of them."""

    file_bytes: int = 0
    text_bytes: int = 0
    tokens: int = 0


OnProgress = Callable[[Progress], None]


def encode_part(
    items: Sequence[Item],
    number: int,
    folder: Path,
    tokenizer: Tokenizer,
    rules: Rules,
    add_bos: bool = False,
    on_progress: OnProgress = lambda p: None,
) -> dict:
    """Read items, tokenise, write shard `number`; what its .json says."""
    report = Report()
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
            on_progress(Progress(done, shard.bytes - before[0], shard.tokens - before[1]))
            pending, chars, done = [], 0, 0

        for item in items:
            for piece in read(item, rules, report, on_bytes):
                pending.append((piece.text, piece.last))
                chars += len(piece.text)
                if chars >= FLUSH:
                    flush()
        flush()
    return shard.finish(report)


def build(
    source: Source,
    tokenizer: Tokenizer,
    rules: Rules,
    cache: Path,
    add_bos: bool = False,
    workers: int = 1,
    on_progress: OnProgress = lambda p: None,
) -> Store:
    """The shards of a source, made if they are not there yet. Processes that ask for the same wait for the first."""
    if add_bos and tokenizer.bos_token_id is None:
        raise ValueError(f"add_bos needs a token that begins a document, but tokenizer {tokenizer.name!r} has none")
    identity = {"format": FORMAT, "source_hash": source.fingerprint(rules), "add_bos": add_bos}
    identity |= {"tokenizer_hash": tokenizer.fingerprint(), "eos_token_id": tokenizer.eos_token_id}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    label = re.sub(r"[^A-Za-z0-9.]+", "-", source.name)[-40:].strip("-") or "source"
    folder = cache / "shards" / f"{label}-{key}"
    parts = parts_of(source.items)
    if not _is_whole(folder, len(parts)):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not _is_whole(folder, len(parts)):
                try:
                    _build(folder, parts, source, tokenizer, rules, add_bos, workers, on_progress)
                except OSError as wrong:  # a disk that is full; what is whole stays
                    raise ValueError(f"shards cannot be written in {folder}: {wrong.strerror or wrong}") from None
                shards = [whole_shard(folder, number) for number in range(len(parts))]
                report = Report()
                for shard in shards:
                    assert shard is not None
                    report.add(Report.from_counts(shard["report"]))
                about: dict[str, Any] = {
                    "source": source.name,
                    "tokenizer": tokenizer.name,
                    "vocab_size": tokenizer.vocab_size,
                }
                about |= {"dtype": dtype_of(tokenizer.vocab_size).name, "shards": len(parts), "report": report.counts()}
                write_json(folder / "index.json", identity | about)
    report = Report.from_counts(read_json(folder / "index.json")["report"])
    if not report.documents:
        why = report.why_skipped()
        raise ValueError(f"source {source.name!r} holds no document" + (f": skipped {why}" if why else ""))
    return Store(folder)


def _is_whole(folder: Path, parts: int) -> bool:
    index = read_json(folder / "index.json")
    return bool(index) and index["shards"] == parts and all(whole_shard(folder, n) for n in range(parts))


def _build(
    folder: Path,
    parts: list[list[Item]],
    source: Source,
    tokenizer: Tokenizer,
    rules: Rules,
    add_bos: bool,
    workers: int,
    on_progress: OnProgress,
) -> None:
    remove_parts(folder)
    remove_parts(folder / "tokenizer")
    todo = []
    for number, part in enumerate(parts):
        if whole_shard(folder, number):
            on_progress(Progress(file_bytes=sum(item.size for item in part)))
        else:
            todo.append(number)
    items = [item for number in todo for item in parts[number]]
    importable = None not in modules_of(items)  # a reader of a script or a notebook is not
    if importable and min(workers, len(todo)) > 1 and sum(item.size for item in items) >= WORTH_PROCESSES:
        from .processes import encode_in_processes

        jobs = [(number, parts[number]) for number in todo]
        encode_in_processes(jobs, folder, tokenizer, rules, add_bos, min(workers, len(todo)), on_progress)
        return
    for number in todo:
        encode_part(parts[number], number, folder, tokenizer, rules, add_bos, on_progress)
