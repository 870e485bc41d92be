"""The typed config of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Packing = Literal["documents", "stream", "windows"]


@dataclass
class DataConfig:
    """Sources, tokenizer, and how documents are packed into sequences."""

    sources: tuple[str, ...] = ("embedded",)
    """Files, folders, named sources (embedded, smollm-corpus and its parts) or hub datasets (owner/name, owner/name@subset); append `:0.4` for a weight."""
    tokenizer: str = "bytes"
    """bytes, bpe:32000 (trained on the sources at first use), a tokenizer.json, a folder, or a hub name."""
    seq_len: int = 512
    """Tokens per sequence."""
    batch_size: int = 8
    """Sequences of the global batch in one micro-step, over all processes."""
    packing: Packing = "stream"
    """stream: concatenated documents, cut into sequences. documents: sequences of whole documents, separated by position_ids. windows: as documents, with long ones cut into overlapping windows."""
    carry_state: bool = False
    """Sequence b of a batch continues sequence b of the previous batch; the tensor `continues` marks these sequences."""
    overlap_ratio: float = 0.0
    """Share of a window that repeats the end of the previous one (packing windows)."""
    val_fraction: float = 0.02
    """Share of the text held out for validation; 0 for none."""
    test_fraction: float = 0.0
    """Share of the text held out from training and validation; `data.test` reads it."""
    val_batches: int = 16
    """Largest number of batches per validation."""
    text_column: str = "text"
    """The column or key that holds a document, in JSON, parquet and hub datasets."""
    split: str = "train"
    """The split of hub datasets to read."""
    min_chars: int = 1
    """Documents with fewer characters are skipped and counted."""
    max_document_bytes: int = 2**26
    """Longer JSON lines and table cells are skipped and counted. Text files have no limit: they are read in pieces."""
    hub_bytes: int = 2**30
    """Bytes of text to read from each hub dataset."""
    eos_token: str | None = None
    """The end-of-document token, if the tokenizer defines none."""
    add_bos: bool = False
    """Begin each document with the tokenizer's bos token."""
    cache_dir: str | None = None
    """Folder of the shards (MNEMOS_CACHE, or mnemos in the user's cache folder)."""
    workers: int = 2
    """Processes that tokenise."""
    prefetch: int = 4
    """Batches to prefetch in a thread; 0 for none."""

    def validate(self) -> None:
        """Raise a ValueError for an invalid combination of fields.

        >>> DataConfig(sources=("books:0.7", "notes.jsonl:0.3"), packing="documents", seq_len=1024).validate()
        """
        if isinstance(self.sources, str) or not self.sources or not all(isinstance(s, str) for s in self.sources):
            raise ValueError(f"sources must be one or more strings, but is {self.sources!r}")
        lowest = {"seq_len": 2, "batch_size": 1, "val_batches": 1, "min_chars": 1, "max_document_bytes": 1}
        lowest |= {"hub_bytes": 1, "workers": 1, "prefetch": 0}
        for name, least in lowest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, but is {value!r}")
        if self.packing not in get_args(Packing):
            raise ValueError(f"packing must be one of {', '.join(get_args(Packing))}, but is {self.packing!r}")
        for name in ("val_fraction", "test_fraction", "overlap_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), but is {getattr(self, name)!r}")
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError("val_fraction and test_fraction leave nothing to train on: their sum must be below 1")
        if self.overlap_ratio and self.packing != "windows":
            raise ValueError(f"overlap_ratio needs packing='windows', but packing is {self.packing!r}")
        if self.carry_state and self.packing == "windows":
            raise ValueError(
                "carry_state needs packing 'stream' or 'documents': a state must not read an overlap twice"
            )
