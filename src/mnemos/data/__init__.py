"""Data: tokenises text of any source once into memory-mapped shards, and serves batches in a reproducible order.

Entry point: `open_data(DataConfig(...))`. Names are imported lazily, because the processes that tokenise need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .batches import Batches, FixedBatches
    from .bpe import train_bpe
    from .config import DataConfig
    from .dataset import Data, open_data
    from .long_context import BookDataset, LongContextDataset
    from .padding import collate
    from .readers import Item, Reader, ReadRules, open_item, register_reader
    from .recall import RecallDataset
    from .report import ReadReport
    from .tokenizer import ByteTokenizer, Tokenizer, check_vocabulary, open_tokenizer

_HOME = {
    "Batches": "batches",
    "BookDataset": "long_context",
    "ByteTokenizer": "tokenizer",
    "Data": "dataset",
    "DataConfig": "config",
    "FixedBatches": "batches",
    "Item": "readers",
    "LongContextDataset": "long_context",
    "Reader": "readers",
    "RecallDataset": "recall",
    "ReadReport": "report",
    "ReadRules": "readers",
    "Tokenizer": "tokenizer",
    "check_vocabulary": "tokenizer",
    "collate": "padding",
    "open_data": "dataset",
    "open_item": "readers",
    "open_tokenizer": "tokenizer",
    "register_reader": "readers",
    "train_bpe": "bpe",
}

__all__ = [
    "Batches",
    "BookDataset",
    "ByteTokenizer",
    "Data",
    "DataConfig",
    "FixedBatches",
    "Item",
    "LongContextDataset",
    "ReadReport",
    "ReadRules",
    "Reader",
    "RecallDataset",
    "Tokenizer",
    "check_vocabulary",
    "collate",
    "open_data",
    "open_item",
    "open_tokenizer",
    "register_reader",
    "train_bpe",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return value
