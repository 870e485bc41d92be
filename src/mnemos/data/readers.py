"""Readers of text, JSON, JSON lines and hub datasets. Memory use does not grow with a file, nor with a document in a text file.

One document: a .txt or .md file, a line of .jsonl, a row of .parquet, an element of a .json list.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ..choices import unknown
from .embedded import MAX_CHARACTERS, documents
from .modules import home_of
from .parquet import Parquet
from .reader import READERS, DocumentPiece, Item, OnBytes, Reader, ReadRules, kept, open_item, register_reader
from .report import ReadReport
from .utf8 import decode, is_junk, last_break, unfinished

BLOCK_BYTES = 2**20  # size of a piece


def read(
    item: Item, rules: ReadRules, report: ReadReport, on_bytes: OnBytes = lambda n: None
) -> Iterator[DocumentPiece]:
    """The pieces of an item's documents; `on_bytes` receives the number of bytes read.

    >>> report = ReadReport()
    >>> any(read(Item("embedded"), ReadRules(), report))
    True
    """
    if item.kind not in READERS:
        raise unknown("reader", item.kind, READERS)
    yield from READERS[item.kind].pieces(item, rules, report, on_bytes)


def modules_of(items: Iterable[Item]) -> list[str | None]:
    """The modules that another process must import to read these items; None for a reader that cannot be imported."""
    package = __name__.partition(".")[0]
    modules = sorted({type(READERS[item.kind]).__module__ for item in items})
    return [home_of(module) for module in modules if module.partition(".")[0] != package]


@register_reader
class Text(Reader):
    """A file is one document of any length."""

    name, suffixes = "text", (".txt", ".md")

    def pieces(self, item: Item, rules: ReadRules, report: ReadReport, on_bytes: OnBytes) -> Iterator[DocumentPiece]:
        with open_item(item, on_bytes) as file:
            head = file.read(max(BLOCK_BYTES, 4 * rules.min_chars))
            if is_junk(head[: len(head) - unfinished(head)]):
                report.skipped["binary"] += 1
                return
            following = file.read(BLOCK_BYTES)
            if not following:
                text = kept(*decode(head), rules, report)
                if text is not None:
                    yield DocumentPiece(text, True)
                return
            held, rest, damaged = "", head.removeprefix(b"\xef\xbb\xbf"), False
            while True:
                cut = len(rest) - (unfinished(rest) if following else 0)
                text, wrong = decode(rest[:cut])
                damaged |= wrong
                text = held + text
                if not following:
                    report.repaired += damaged
                    yield DocumentPiece(text, True)
                    return
                place = last_break(text)
                yield DocumentPiece(text[:place], False)
                held, rest, following = text[place:], rest[cut:] + following, file.read(BLOCK_BYTES)


@register_reader
class Json(Reader):
    """A file is a list of records, or one record."""

    name, suffixes = "json", (".json",)

    def records(self, item: Item, rules: ReadRules, report: ReadReport, on_bytes: OnBytes) -> Iterator[Any]:
        limit = 4 * rules.max_document_bytes  # parsing takes three times the memory
        raw = b""
        if item.size <= limit:
            with open_item(item, on_bytes) as file:
                raw = file.read(limit + 1)
        if max(item.size, len(raw)) > limit:
            raise ValueError(
                f"{item.path} is more than {limit} bytes of JSON: make it a .jsonl file, one document a line"
            )
        if not raw.strip():
            report.skipped["empty"] += 1
            return
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError) as wrong:
            raise ValueError(f"{item.path} is not JSON: {wrong}") from None
        for record in content if isinstance(content, list) else [content]:
            value = record.get(rules.column) if isinstance(record, dict) else record
            yield from value if isinstance(value, list) else [value]


@register_reader
class Jsonl(Reader):
    """One record per line. A file can be divided at any byte: a line belongs to the part in which it begins."""

    name, suffixes = "jsonl", (".jsonl",)

    def records(self, item: Item, rules: ReadRules, report: ReadReport, on_bytes: OnBytes) -> Iterator[Any]:
        with open_item(item, on_bytes) as file:
            position = 0
            if item.start:
                file.seek(item.start - 1)
                position = item.start - 1 + _skip_line(file)  # the previous line belongs to the previous item
            while item.stop < 0 or position < item.stop:
                line = file.readline(rules.max_document_bytes + 1)
                position += len(line)
                if not line:
                    return
                if len(line) > rules.max_document_bytes and not line.endswith(b"\n"):
                    position += _skip_line(file)
                    report.skipped["long"] += 1
                    continue
                if line.isspace():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    report.skipped["bad_json"] += 1
                    continue
                text = record.get(rules.column) if isinstance(record, dict) else record
                yield text if isinstance(record, str | dict) else None

    def check(self, path: Path, rules: ReadRules) -> None:
        first = next(self.records(Item(self.name, str(path)), rules, ReadReport(), lambda n: None), "")
        if not isinstance(first, str):
            raise ValueError(
                f"the first line of {path} has no text under {rules.column!r}: text_column must name a key that holds a string"
            )

    def ends(self, path: Path, size: int, part_bytes: int) -> list[int]:
        return [*range(part_bytes, size, part_bytes), size]


def _skip_line(file: IO[bytes]) -> int:
    """Skip to the end of the line without holding it in memory. Returns the number of bytes skipped."""
    passed = 0
    while chunk := file.readline(BLOCK_BYTES):
        passed += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return passed


register_reader(Parquet)


@register_reader
class Hub(Reader):
    """A hub dataset, up to `ReadRules.hub_bytes` of text."""

    name = "hub"

    def records(self, item: Item, rules: ReadRules, report: ReadReport, on_bytes: OnBytes) -> Iterator[Any]:
        from .hub import records

        left = rules.hub_bytes
        for value in records(item.path, item.subset, rules.split, rules.column):
            size = len(value.encode(errors="replace")) if isinstance(value, str) else 0
            on_bytes(min(size, left))
            yield value
            left -= size
            if left <= 0:
                return


@register_reader
class Embedded(Reader):
    """Python's own documentation, which needs no download."""

    name = source = "embedded"

    def records(self, item: Item, rules: ReadRules, report: ReadReport, on_bytes: OnBytes) -> Iterator[Any]:
        for text in documents():
            on_bytes(len(text.encode(errors="replace")))
            yield text

    def source_item(self, rules: ReadRules) -> Item:
        return Item(self.name, path=f"python {sys.version}", size=MAX_CHARACTERS)
