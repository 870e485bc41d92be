"""Documents of files, piece by piece: memory does not grow with a file, nor with a document in a text file.

A document is one or more `Piece`s, the last of them marked. A .txt or .md file is one document; a line of .jsonl, a row of .parquet,
an element of a .json list is one. What is left out is counted in a `Report` (see report.REASONS).
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from .files import require
from .parquet_pages import bytes_of_rows, read_pages
from .parts import Item, open_parquet
from .report import Report
from .utf8 import decode, is_junk, last_break, repair, unfinished

BLOCK = 2**20  # bytes of a piece
PARQUET_ROWS = 256  # rows unpacked together, at most


class Piece(NamedTuple):
    text: str
    last: bool


@dataclass
class Rules:
    """What counts as a document, and where its text is."""

    column: str = "text"
    min_chars: int = 1
    max_document_bytes: int = 2**26
    hub_bytes: int = 2**30
    split: str = "train"


def read(item: Item, rules: Rules, report: Report, on_bytes: Callable[[int], None] = lambda n: None) -> Iterator[Piece]:
    """The pieces of an item's documents; `on_bytes` hears how many bytes of the file are done.

    >>> report = Report()
    >>> any(read(Item("embedded"), Rules(), report))
    True
    """
    if item.kind == "text":
        yield from _text_file(item, rules, report, on_bytes)
        return
    for raw in RECORDS[item.kind](item, rules, report, on_bytes):
        text = as_text(raw, rules, report)
        if text is not None:
            yield Piece(text, True)


def as_text(raw: Any, rules: Rules, report: Report) -> str | None:
    """A record's text, or None and one more in the report's counts."""
    if not isinstance(raw, str | bytes):
        report.skipped["no_text"] += 1
        return None
    if len(raw) > rules.max_document_bytes:
        report.skipped["long"] += 1
        return None
    text, damaged = decode(raw) if isinstance(raw, bytes) else repair(raw)
    return _kept(text, damaged, rules, report)


def _kept(text: str, damaged: bool, rules: Rules, report: Report) -> str | None:
    text = text.removeprefix("\ufeff")
    if damaged and is_junk(text.encode()):
        report.skipped["binary"] += 1
    elif not text or text.isspace():
        report.skipped["empty"] += 1
    elif len(text) < rules.min_chars:
        report.skipped["short"] += 1
    else:
        report.repaired += damaged
        return text
    return None


def _text_file(item: Item, rules: Rules, report: Report, on_bytes: Callable[[int], None]) -> Iterator[Piece]:
    with _opened(item, on_bytes) as file:
        head = file.read(max(BLOCK, 4 * rules.min_chars))
        if is_junk(head[: len(head) - unfinished(head)]):
            report.skipped["binary"] += 1
            return
        following = file.read(BLOCK)
        if not following:
            text = _kept(*decode(head), rules, report)
            if text is not None:
                yield Piece(text, True)
            return
        held, rest, damaged = "", head.removeprefix(b"\xef\xbb\xbf"), False
        while True:
            cut = len(rest) - (unfinished(rest) if following else 0)
            text, wrong = decode(rest[:cut])
            damaged |= wrong
            text = held + text
            if not following:
                report.repaired += damaged
                yield Piece(text, True)
                return
            place = last_break(text)
            yield Piece(text[:place], False)
            held, rest, following = text[place:], rest[cut:] + following, file.read(BLOCK)


@contextlib.contextmanager
def _opened(item: Item, on_bytes: Callable[[int], None]) -> Generator[Any, None, None]:
    """A file, unzipped if need be; the bytes of the file itself are what `on_bytes` hears of."""
    try:
        with open(item.path, "rb") as raw:
            counted = _Counted(raw, on_bytes)
            if not item.path.lower().endswith(".gz"):
                yield counted
                return
            with gzip.GzipFile(fileobj=counted) as file:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as broken:
        raise ValueError(f"{item.path} is damaged: {broken}") from None
    except OSError as wrong:
        raise ValueError(f"{item.path} cannot be read: {wrong.strerror or wrong}") from None


class _Counted:
    """Passes on what is read from a file, and says how much it was."""

    def __init__(self, file: IO[bytes], on_bytes: Callable[[int], None]):
        self.file, self.on_bytes = file, on_bytes

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.on_bytes(len(data))
        return data

    def readline(self, size: int = -1) -> bytes:
        data = self.file.readline(size)
        self.on_bytes(len(data))
        return data

    def seek(self, *place: int) -> int:
        return self.file.seek(*place)

    def tell(self) -> int:
        return self.file.tell()


def _jsonl(item: Item, rules: Rules, report: Report, on_bytes: Callable[[int], None]) -> Iterator[Any]:
    with _opened(item, on_bytes) as file:
        position = 0
        if item.start:
            file.seek(item.start - 1)
            position = item.start - 1 + _skip_line(file)  # the line before belongs to the item before
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
            yield record if isinstance(record, str) else record.get(rules.column) if isinstance(record, dict) else None


def _skip_line(file: IO[bytes]) -> int:
    """To the line's end, without holding the line; the bytes passed."""
    passed = 0
    while chunk := file.readline(BLOCK):
        passed += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return passed


def _json(item: Item, rules: Rules, report: Report, on_bytes: Callable[[int], None]) -> Iterator[Any]:
    limit = 4 * rules.max_document_bytes  # parsing takes three times as much memory
    raw = b""
    if item.size <= limit:
        with _opened(item, on_bytes) as file:
            raw = file.read(limit + 1)
    if max(item.size, len(raw)) > limit:
        raise ValueError(f"{item.path} is more than {limit} bytes of JSON: make it a .jsonl file, one document a line")
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


def _parquet(item: Item, rules: Rules, report: Report, on_bytes: Callable[[int], None]) -> Iterator[Any]:
    pyarrow = require("pyarrow", "data")
    file = open_parquet(item.path)
    stop = file.metadata.num_row_groups if item.stop < 0 else item.stop
    told = 0
    try:
        for group in range(item.start, stop):
            rows = _rows_at_once(file, group, item.path, rules)
            for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=[rules.column]) if rows else ():
                cells = batch.column(0)
                cells = cells.dictionary_decode() if pyarrow.types.is_dictionary(cells.type) else cells
                # a file may call anything UTF-8
                yield from cells.cast(pyarrow.large_binary()).to_pylist()
            if not rows:
                yield from itertools.repeat(None, file.metadata.row_group(group).num_rows)
            done = item.size * (group + 1 - item.start) // (stop - item.start)
            on_bytes(done - told)
            told = done
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, OSError) as broken:
        raise ValueError(f"{item.path} is damaged: {(str(broken).splitlines() or ['no message'])[0]}") from None
    except MemoryError:
        raise ValueError(f"{item.path} unpacks to more than this machine's memory holds") from None


def _rows_at_once(file, group: int, path: str, rules: Rules) -> int:
    """How many rows of a group fit into memory together, whatever they unpack to; 0 for a column that holds no text.

    A file of a kilobyte can hold gigabytes: a page may unpack to any size, and a thousand rows may share one long value.
    """
    pyarrow = require("pyarrow", "data")
    kind = file.schema_arrow.field(rules.column).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if str(kind) not in ("string", "large_string", "binary", "large_binary", "string_view", "binary_view"):
        return 0
    chunks = [file.metadata.row_group(group).column(i) for i in range(file.metadata.num_columns)]
    chunk = next(chunk for chunk in chunks if chunk.path_in_schema == rules.column)
    start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
    try:
        with open(path, "rb") as raw:
            pages = read_pages(raw, start, start + chunk.total_compressed_size)
    except ValueError as wrong:
        raise ValueError(f"{path} is damaged: {wrong}") from None
    most, value = 16 * rules.max_document_bytes, max((page.bytes / max(1, page.values) for page in pages), default=0)
    largest = max((page.bytes for page in pages), default=0)
    if largest > most or (largest > most // 4 and value > rules.max_document_bytes):
        limit, what = (most, "page") if largest > most else (rules.max_document_bytes, "value")
        raise ValueError(
            f"{path} has a {what} of {largest if what == 'page' else int(value)} bytes, more than {limit}: "
            "write it with shorter rows or smaller pages, or raise max_document_bytes"
        )
    budget, rows = 2 * rules.max_document_bytes, PARQUET_ROWS
    while rows > 1 and (rows * value > budget or bytes_of_rows(pages, rows) > max(budget, 2 * largest)):
        rows //= 2
    return rows


def _hub(item: Item, rules: Rules, report: Report, on_bytes: Callable[[int], None]) -> Iterator[Any]:
    from .hub import records

    left = rules.hub_bytes
    for value in records(item.path, item.subset, rules.split, rules.column):
        size = len(value.encode(errors="replace")) if isinstance(value, str) else 0
        on_bytes(min(size, left))
        yield value
        left -= size
        if left <= 0:
            return


def _embedded(item: Item, rules: Rules, report: Report, on_bytes: Callable[[int], None]) -> Iterator[Any]:
    from .embedded import documents

    for text in documents():
        on_bytes(len(text.encode(errors="replace")))
        yield text


RECORDS = {"jsonl": _jsonl, "json": _json, "parquet": _parquet, "hub": _hub, "embedded": _embedded}
