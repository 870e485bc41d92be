"""The base class of readers, which turn one kind of file, or a named source, into documents. `register_reader` adds one.

A document is one or more `DocumentPiece`s; the last one is marked. A `ReadReport` counts skipped documents (see report.REASONS).
"""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, TypeVar

from .report import ReadReport
from .utf8 import decode, is_junk, repair

OnBytes = Callable[[int], None]


class DocumentPiece(NamedTuple):
    text: str
    last: bool


@dataclass(frozen=True)
class Item:
    """A file or a part of one. kind: name of its reader. start, stop: byte range (or row groups) of a divided file."""

    kind: str
    path: str = ""
    start: int = 0
    stop: int = -1
    size: int = 0
    changed: int = 0
    subset: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class ReadRules:
    """Which documents are kept, and the column of their text."""

    column: str = "text"
    min_chars: int = 1
    max_document_bytes: int = 2**26
    hub_bytes: int = 2**30
    split: str = "train"


class Reader:
    """Reads one kind of file, or one source that is not a file. A subclass defines `name`, `suffixes` and `records`.

    suffixes: file endings, such as ".csv". zipped: whether the files may be compressed (.csv.gz). source: a name for `--data`, for a
    source that is not a file. version: increase it when the same file yields other documents than before, so that shards are rebuilt.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    zipped: ClassVar[bool] = True
    source: ClassVar[str | None] = None
    version: ClassVar[int] = 0

    def records(self, item: Item, rules: ReadRules, report: ReadReport, on_bytes: OnBytes) -> Iterator[Any]:
        """The documents of an item: a str, UTF-8 bytes, or any other object for a record without text, which is counted.

        on_bytes: called with the number of bytes of the file that were read (`open_item` calls it).
        """
        raise NotImplementedError

    def pieces(self, item: Item, rules: ReadRules, report: ReadReport, on_bytes: OnBytes) -> Iterator[DocumentPiece]:
        """The documents that the rules keep. A reader of documents that do not fit into memory yields several pieces of each."""
        for raw in self.records(item, rules, report, on_bytes):
            text = as_text(raw, rules, report)
            if text is not None:
                yield DocumentPiece(text, True)

    def check(self, path: Path, rules: ReadRules) -> None:
        """Raise a ValueError for a file without text in the expected column: before the work, not after an hour."""

    def ends(self, path: Path, size: int, part_bytes: int) -> list[int]:
        """`Item.stop` of each part of a file of `size` bytes, parts of about `part_bytes`; empty if the file cannot be divided."""
        return []

    def source_item(self, rules: ReadRules) -> Item:
        """The item that is read for `source`."""
        return Item(self.name)


READERS: dict[str, Reader] = {}
Kind = TypeVar("Kind", bound=type[Reader])


def register_reader(kind: Kind) -> Kind:
    """Class decorator for a `Reader`: registers its suffixes, or its source, for all data options.

    >>> @register_reader
    ... class Lines(Reader):
    ...     name, suffixes = "lines", (".lines",)
    ...     def records(self, item, rules, report, on_bytes):
    ...         with open_item(item, on_bytes) as file:
    ...             yield from iter(file.readline, b"")
    >>> reader_of_suffix(".lines").name
    'lines'
    >>> del READERS["lines"]
    """
    if kind.name in READERS:
        raise ValueError(f"reader {kind.name!r} is registered already: choose another name")
    for suffix in kind.suffixes:
        if not suffix.startswith(".") or suffix != suffix.lower() or suffix == ".gz":
            raise ValueError(
                f"reader {kind.name!r}: suffix {suffix!r} must be in lower case, begin with a dot and not be .gz"
            )
        other = reader_of_suffix(suffix)
        if other is not None:
            raise ValueError(f"reader {kind.name!r}: files that end in {suffix} are those of reader {other.name!r}")
    if kind.source is not None and any(kind.source == other.source for other in READERS.values()):
        raise ValueError(f"reader {kind.name!r}: source {kind.source!r} is registered already: choose another name")
    READERS[kind.name] = kind()
    return kind


def reader_of_suffix(suffix: str) -> Reader | None:
    return next((reader for reader in READERS.values() if suffix in reader.suffixes), None)


def as_text(raw: Any, rules: ReadRules, report: ReadReport) -> str | None:
    """The text of a record; None, and one more skipped document in the report, if there is none."""
    if not isinstance(raw, str | bytes):
        report.skipped["no_text"] += 1
        return None
    if len(raw) > rules.max_document_bytes:
        report.skipped["long"] += 1
        return None
    text, damaged = decode(raw) if isinstance(raw, bytes) else repair(raw)
    return kept(text, damaged, rules, report)


def kept(text: str, damaged: bool, rules: ReadRules, report: ReadReport) -> str | None:
    """The text of a document that the rules keep; None, and one more skipped document in the report, for any other."""
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


@contextlib.contextmanager
def open_item(item: Item, on_bytes: OnBytes) -> Generator[Any, None, None]:
    """Open a file in binary mode, decompressed if needed. `on_bytes` receives the number of bytes read from the file itself."""
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
    """A file wrapper that reports the number of bytes read."""

    def __init__(self, file: IO[bytes], on_bytes: OnBytes):
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
