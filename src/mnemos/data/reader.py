"""What a reader is: it turns one kind of file, or a source with a name, into documents. `register_reader` adds one.

A document is one or more `DocumentPiece`s, the last of them marked. What is left out is counted in a `ReadReport` (see report.REASONS).
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
    """What a process is given to read. kind: the name of its reader. start, stop: the part of a file that was divided."""

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
    """What counts as a document, and where its text is."""

    column: str = "text"
    min_chars: int = 1
    max_document_bytes: int = 2**26
    hub_bytes: int = 2**30
    split: str = "train"


class Reader:
    """One kind of file, or one source that is no file. A reader of your own needs `name`, `suffixes` and `records`.

    suffixes: endings of its files, as ".csv". zipped: they may be compressed (.csv.gz). source: a name that `--data` takes, for a
    source that is no file. version: raise it when the same file gives other documents than before; shards are then made anew.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    zipped: ClassVar[bool] = True
    source: ClassVar[str | None] = None
    version: ClassVar[int] = 0

    def records(self, item: Item, rules: ReadRules, report: ReadReport, on_bytes: OnBytes) -> Iterator[Any]:
        """The documents of an item: a str, bytes of UTF-8, or anything else for a record without text, which is counted.

        on_bytes: to be called with the number of bytes of the file that are done (`open_item` does so).
        """
        raise NotImplementedError

    def pieces(self, item: Item, rules: ReadRules, report: ReadReport, on_bytes: OnBytes) -> Iterator[DocumentPiece]:
        """The documents that the rules keep; a reader whose documents do not fit into memory yields several pieces of each."""
        for raw in self.records(item, rules, report, on_bytes):
            text = as_text(raw, rules, report)
            if text is not None:
                yield DocumentPiece(text, True)

    def check(self, path: Path, rules: ReadRules) -> None:
        """Raise a ValueError for a file that has no text where the rules look for it: before the work, not after an hour."""

    def ends(self, path: Path, size: int, part_bytes: int) -> list[int]:
        """`Item.stop` of each part of a file of `size` bytes, parts of about `part_bytes`; empty where it cannot be divided."""
        return []

    def source_item(self, rules: ReadRules) -> Item:
        """What is read for `source`."""
        return Item(self.name)


READERS: dict[str, Reader] = {}
Kind = TypeVar("Kind", bound=type[Reader])


def register_reader(kind: Kind) -> Kind:
    """Decorate a `Reader` to make files with its suffixes, or its source, readable wherever data are named.

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
    """A record's text, or None and one more in the report's counts."""
    if not isinstance(raw, str | bytes):
        report.skipped["no_text"] += 1
        return None
    if len(raw) > rules.max_document_bytes:
        report.skipped["long"] += 1
        return None
    text, damaged = decode(raw) if isinstance(raw, bytes) else repair(raw)
    return kept(text, damaged, rules, report)


def kept(text: str, damaged: bool, rules: ReadRules, report: ReadReport) -> str | None:
    """The text that counts as a document, or None and one more in the report's counts."""
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
    """A file of bytes, decompressed if needed. `on_bytes` receives the number of bytes read from the file itself."""
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
