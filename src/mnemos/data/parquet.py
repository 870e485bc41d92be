"""Reads parquet files, one document per row. A bounded number of rows is in memory, whatever the file unpacks to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import require
from .parquet_pages import bytes_of_rows, read_pages
from .reader import Item, OnBytes, Reader, ReadRules
from .report import ReadReport

PARQUET_ROWS = 256  # largest number of rows unpacked together


class Parquet(Reader):
    """The text column of a table. A file can be divided between row groups."""

    name, suffixes, zipped = "parquet", (".parquet",), False

    def records(self, item: Item, rules: ReadRules, report: ReadReport, on_bytes: OnBytes) -> Iterator[Any]:
        pyarrow = require("pyarrow", "data")
        file = open_parquet(item.path)
        stop = file.metadata.num_row_groups if item.stop < 0 else item.stop
        told = 0
        try:
            for group in range(item.start, stop):
                rows = _rows_at_once(file, group, item.path, rules)
                for batch in (
                    file.iter_batches(batch_size=rows, row_groups=[group], columns=[rules.column]) if rows else ()
                ):
                    cells = batch.column(0)
                    cells = cells.dictionary_decode() if pyarrow.types.is_dictionary(cells.type) else cells
                    # the file's claim that the column is UTF-8 is not checked
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

    def check(self, path: Path, rules: ReadRules) -> None:
        columns = open_parquet(path).schema_arrow.names
        if rules.column not in columns:
            raise ValueError(f"{path} has no column {rules.column!r}: text_column can be one of {', '.join(columns)}")

    def ends(self, path: Path, size: int, part_bytes: int) -> list[int]:
        groups = open_parquet(path).metadata.num_row_groups
        pieces = min(groups, -(-size // part_bytes))
        return [groups * (i + 1) // pieces for i in range(pieces)]


def _rows_at_once(file, group: int, path: str, rules: ReadRules) -> int:
    """The number of rows of a group that fit into memory together, whatever they unpack to; 0 for a column without text.

    A file of one kilobyte can hold gigabytes: a page can unpack to any size, and a thousand rows can share one long value.
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


def open_parquet(path: str | Path):
    """Open a parquet file; raises a ValueError if it is not one."""
    pyarrow = require("pyarrow", "data")
    require("pyarrow.parquet", "data")
    try:
        return pyarrow.parquet.ParquetFile(str(path))
    except (pyarrow.ArrowInvalid, OSError) as broken:
        raise ValueError(f"{path} is not a readable parquet file: {str(broken).splitlines()[0]}") from None
