"""Tokenises sources into shards: once, in several processes, and resumable."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..atomic_io import remove_parts
from .encode import OnProgress, TokenizeProgress, encode_part
from .files import read_json, write_json
from .processes import encode_in_processes
from .readers import ReadRules, modules_of
from .report import ReadReport
from .sharding import Item, parts_of
from .shards import SHARD_FORMAT, Store, dtype_of, whole_shard
from .sources import Source
from .tokenizer import Tokenizer

MIN_BYTES_FOR_PROCESSES = 2**25  # below this size, starting processes costs more than it saves


def build(
    source: Source,
    tokenizer: Tokenizer,
    rules: ReadRules,
    cache: Path,
    add_bos: bool = False,
    workers: int = 1,
    on_progress: OnProgress = lambda p: None,
) -> Store:
    """The shards of a source, built if they do not exist. Other processes that need the same shards wait for the first one."""
    if add_bos and tokenizer.bos_token_id is None:
        raise ValueError(f"add_bos needs a token that begins a document, but tokenizer {tokenizer.name!r} has none")
    folder, identity = _place(source, tokenizer, rules, cache, add_bos)
    parts = parts_of(source.items)
    if not _is_whole(folder, len(parts)):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not _is_whole(folder, len(parts)):
                try:
                    _build(folder, parts, source, tokenizer, rules, add_bos, workers, on_progress)
                except OSError as wrong:  # a full disk, for instance; finished shards stay
                    raise ValueError(f"shards cannot be written in {folder}: {wrong.strerror or wrong}") from None
                shards = [whole_shard(folder, number) for number in range(len(parts))]
                report = ReadReport()
                for shard in shards:
                    assert shard is not None
                    report.add(ReadReport.from_counts(shard["report"]))
                about: dict[str, Any] = {
                    "source": source.name,
                    "tokenizer": tokenizer.name,
                    "vocab_size": tokenizer.vocab_size,
                }
                about |= {"dtype": dtype_of(tokenizer.vocab_size).name, "shards": len(parts), "report": report.counts()}
                write_json(folder / "index.json", identity | about)
    report = ReadReport.from_counts(read_json(folder / "index.json")["report"])
    if not report.documents:
        why = report.why_skipped()
        raise ValueError(f"source {source.name!r} holds no document" + (f": skipped {why}" if why else ""))
    return Store(folder)


def built(source: Source, tokenizer: Tokenizer, rules: ReadRules, cache: Path, add_bos: bool = False) -> Path | None:
    """The folder of a source's shards; None if they are not built."""
    folder, _ = _place(source, tokenizer, rules, cache, add_bos)
    return folder if _is_whole(folder, len(parts_of(source.items))) else None


def _place(
    source: Source, tokenizer: Tokenizer, rules: ReadRules, cache: Path, add_bos: bool
) -> tuple[Path, dict[str, Any]]:
    """The folder of a source's shards, and the identity that it depends on."""
    identity = {"format": SHARD_FORMAT, "source_hash": source.fingerprint(rules), "add_bos": add_bos}
    identity |= {"tokenizer_hash": tokenizer.fingerprint(), "eos_token_id": tokenizer.eos_token_id}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    label = re.sub(r"[^A-Za-z0-9.]+", "-", source.name)[-40:].strip("-") or "source"
    return cache / "shards" / f"{label}-{key}", identity


def _is_whole(folder: Path, parts: int) -> bool:
    index = read_json(folder / "index.json")
    return bool(index) and index["shards"] == parts and all(whole_shard(folder, n) for n in range(parts))


def _build(
    folder: Path,
    parts: list[list[Item]],
    source: Source,
    tokenizer: Tokenizer,
    rules: ReadRules,
    add_bos: bool,
    workers: int,
    on_progress: OnProgress,
) -> None:
    remove_parts(folder)
    remove_parts(folder / "tokenizer")
    todo = []
    for number, part in enumerate(parts):
        if whole_shard(folder, number):
            on_progress(TokenizeProgress(file_bytes=sum(item.size for item in part)))
        else:
            todo.append(number)
    items = [item for number in todo for item in parts[number]]
    importable = None not in modules_of(items)  # a reader defined in a script or a notebook is not
    if importable and min(workers, len(todo)) > 1 and sum(item.size for item in items) >= MIN_BYTES_FOR_PROCESSES:
        jobs = [(number, parts[number]) for number in todo]
        encode_in_processes(jobs, folder, tokenizer, rules, add_bos, min(workers, len(todo)), on_progress)
        return
    for number in todo:
        encode_part(parts[number], number, folder, tokenizer, rules, add_bos, on_progress)
