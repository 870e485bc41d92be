"""PyTorch datasets of long texts: `len(dataset)` and `dataset[i]`, for any DataLoader or Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .readers import ReadRules, read
from .report import ReadReport
from .sources import resolve
from .tasks.text import check_tokenizer
from .tokenizer import ByteTokenizer, Tokenizer


class LongContextDataset(Dataset):
    """Windows of `max_length` tokens over long texts; each shares `overlap_ratio` of its tokens with the previous one.

    The last window of a text ends at the end of the text, so no token is lost. Texts with fewer than `min_length` tokens are skipped and
    counted in `skipped`. tokenizer: one of ours, or any object with `encode(text) -> list of ids` (default: bytes).

    >>> dataset = LongContextDataset(["a long text " * 99], max_length=256, overlap_ratio=0.25, min_length=64)
    >>> len(dataset), dataset[0]["input_ids"].shape
    (6, torch.Size([256]))
    """

    def __init__(
        self,
        texts: Iterable[str],
        tokenizer: Tokenizer | None = None,
        max_length: int = 2048,
        overlap_ratio: float = 0.1,
        min_length: int = 512,
    ):
        if max_length < 2 or min_length < 1:
            raise ValueError(f"max_length must be >= 2 and min_length >= 1, but are {max_length} and {min_length}")
        if not 0 <= overlap_ratio < 1:
            raise ValueError(f"overlap_ratio must be in [0, 1), but is {overlap_ratio}")
        self.tokenizer, self.max_length = ByteTokenizer() if tokenizer is None else tokenizer, max_length
        check_tokenizer(self.tokenizer)
        self.skipped = 0
        self.documents: list[np.ndarray] = []
        self.windows: list[tuple[int, int]] = []  # (document, first token)
        step = max_length - int(max_length * overlap_ratio)
        for text in texts:
            ids = np.asarray(token_ids(self.tokenizer, text), np.int32)
            if len(ids) < min_length:
                self.skipped += 1
                continue
            last = max(0, len(ids) - max_length)
            self.windows += [(len(self.documents), start) for start in [*range(0, last, step), last]]
            self.documents.append(ids)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """input_ids, labels, attention_mask: (T,). T is max_length, or less for a shorter text."""
        document, start = self.windows[index]
        ids = torch.from_numpy(self.documents[document][start : start + self.max_length].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


class BookDataset(LongContextDataset):
    """`LongContextDataset` of the books in a file or folder: .txt, .md, .json (`text` key, or a list), .jsonl, .parquet, .gz.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "book.txt").write_text("Call me Ishmael. " * 99)
    ...     len(BookDataset(folder, max_length=512))
    4
    """

    def __init__(
        self,
        path: str | os.PathLike,
        tokenizer: Tokenizer | None = None,
        max_length: int = 2048,
        overlap_ratio: float = 0.1,
        min_length: int = 512,
        text_column: str = "text",
    ):
        if not os.path.exists(path):
            raise ValueError(f"path {str(path)!r} does not exist: it must be a file or a folder of books")
        self.report = ReadReport()
        super().__init__(self._texts(path, text_column), tokenizer, max_length, overlap_ratio, min_length)

    def _texts(self, path: str | os.PathLike, text_column: str) -> Iterable[str]:
        rules = ReadRules(column=text_column)
        pieces: list[str] = []
        for source in resolve([os.path.abspath(path)], rules):
            for item in source.items:
                for piece in read(item, rules, self.report):
                    pieces.append(piece.text)
                    if piece.last:
                        yield "".join(pieces)
                        pieces = []


def token_ids(tokenizer, text: str):
    """Ids without special tokens, from one of our tokenizers or one of transformers."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode_batch([text])[0]
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except TypeError:
        return tokenizer.encode(text)
