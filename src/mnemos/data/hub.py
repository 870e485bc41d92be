"""Hugging Face hub datasets, streamed by the `datasets` library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from .files import require


def records(name: str, subset: str | None, split: str, column: str) -> Iterator[Any]:
    """The text column of a dataset, row by row, without downloading it as a whole."""
    dataset = open_hub(name, subset, split)
    columns = list(dataset.features) if dataset.features else None
    if columns is None:
        first = next(iter(dataset), None)
        columns = list(first) if first else [column]
    if column not in columns:
        raise ValueError(f"dataset {name} has no column {column!r}: text_column can be one of {', '.join(columns)}")
    rows = iter(dataset.select_columns(column))
    count = 0
    while True:
        try:
            row = next(rows, None)
        except Exception as wrong:
            if not _is_network(wrong):
                raise
            raise ValueError(
                f"the connection to the hub was lost after {count} rows of dataset {name}: try again"
            ) from None
        if row is None:
            return
        count += 1
        yield row[column]


def open_hub(name: str, subset: str | None, split: str) -> Any:
    """A streaming dataset; raises a ValueError with the reason if it cannot be opened."""
    datasets = require("datasets", "data")
    hub = require("huggingface_hub", "data")
    where = f"{name}@{subset}" if subset else name
    try:
        if not os.path.isdir(name) and not hub.is_offline_mode():
            hub.HfApi().dataset_info(name, timeout=20)  # `datasets` itself would try for half a minute
        return datasets.load_dataset(name, subset, split=split, streaming=True)
    except hub.errors.RepositoryNotFoundError:
        raise ValueError(f"source {where!r} is not a file, a folder, a named source or a hub dataset") from None
    except hub.errors.HfHubHTTPError as refused:
        raise ValueError(f"the hub does not return dataset {where!r}: {str(refused).splitlines()[0]}") from None
    except Exception as wrong:
        if _is_network(wrong):
            raise ValueError(
                f"source {where!r} is not a file, a folder or a named source, and the hub cannot be reached"
            ) from None
        if isinstance(wrong, ValueError | FileNotFoundError):
            raise ValueError(f"dataset {where!r} cannot be opened: {str(wrong).splitlines()[0]}") from None
        raise


def _is_network(wrong: BaseException | None) -> bool:
    """Whether the network caused an exception: its libraries have families of exceptions of their own."""
    while wrong is not None:
        if isinstance(wrong, ConnectionError | TimeoutError):
            return True
        names = {kind.__name__ for kind in type(wrong).__mro__}
        if names & {
            "ConnectError",
            "ConnectionError",
            "TransportError",
            "OfflineModeIsEnabled",
            "LocalEntryNotFoundError",
        }:
            return True
        wrong = wrong.__cause__ or wrong.__context__
    return False
