"""Opens a config as batches. All errors in the data are raised here, before the first training step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ..atomic_io import remove_parts
from .batches import Assembler, Batches, FixedBatches, Mixture, fixed_rows, lane_rows
from .bpe import sample_texts, train_bpe
from .build import build
from .config import DataConfig
from .display import building, training_tokenizer
from .document_streams import Lanes
from .files import cache_folder
from .packing import Packed, Stream
from .readers import ReadRules
from .report import ReadReport
from .shards import Store
from .shuffle import mix
from .sources import Source, resolve
from .splits import SPLITS, Documents, split
from .tokenizer import Tokenizer, open_tokenizer

BPE_CHARS = 50_000_000


class Data:
    """Opened data: `train`, `validation`, `test`, `tokenizer`, `vocab_size`, `report`."""

    def __init__(
        self, config: DataConfig, sources, stores, tokenizer: Tokenizer, seed: int, rank: int, world_size: int
    ):
        self.config, self.tokenizer, self.vocab_size = config, tokenizer, tokenizer.vocab_size
        self.stores: Sequence[Store] = stores
        self.report = ReadReport()
        names = [source.name for source in sources]
        self._parts = split(
            stores,
            config.val_fraction,
            config.test_fraction,
            lambda i, why: self.report.notes.append(f"source {names[i]!r}: {why}"),
        )
        for source, store in zip(sources, stores):
            self.report.add(store.report)
            self.report.sources[source.name] = store.report
        for name in SPLITS:
            self.report.splits[name] = sum(part[name].tokens for part in self._parts)
        if tokenizer.bytes_per_token is None:
            tokenizer.bytes_per_token = self.report.bytes_per_token
        self._check_room([source.name for source in sources])
        sizes = [source.weight or part["train"].tokens for source, part in zip(sources, self._parts)]
        self.weights = [size / sum(sizes) for size in sizes]
        extra = "continues" if config.carry_state else None if config.packing == "stream" else "position_ids"
        self._assemble = Assembler(stores, config.seq_len, tokenizer.eos_token_id, extra, rank, world_size)
        plan = self._lanes("train", mix(seed), True) if config.carry_state else self._mixture("train", mix(seed))
        self.train = Batches(plan, self._assemble, self._identity(seed), config.prefetch)
        self.validation = self._fixed("validation")
        self.test = self._fixed("test")

    def _check_room(self, names: list[str]) -> None:
        config = self.config
        for name, part in zip(names, self._parts):
            tokens = part["train"].tokens
            if tokens < (config.seq_len if config.packing == "stream" and not config.carry_state else 2):
                raise ValueError(
                    f"source {name!r} leaves {tokens} tokens to train on, fewer than one sequence (seq_len={config.seq_len}): "
                    "give more text or a smaller seq_len"
                )
        if config.val_fraction and self.report.splits["validation"] < 2:
            raise ValueError(
                f"val_fraction={config.val_fraction} of {self.report.tokens} tokens leaves nothing to validate on: "
                "give more text, a larger val_fraction, or 0 for no validation"
            )

    def _documents(self, name: str) -> list[Documents]:
        return [part[name] for part in self._parts]

    def _rows(self, name: str, key: int) -> list[Stream | Packed]:
        config, found = self.config, []
        for i, (store, documents) in enumerate(zip(self.stores, self._documents(name))):
            if config.packing == "stream":
                found.append(Stream(i, documents, store.bounds, config.seq_len, mix(key, i)))
            else:
                overlap = int(config.seq_len * config.overlap_ratio)
                found.append(Packed(i, documents, config.seq_len, mix(key, i), overlap))
        return found

    def _mixture(self, name: str, key: int) -> Mixture:
        return Mixture(self._rows(name, key), self.weights, self.config.batch_size, key)

    def _lanes(self, name: str, key: int, endless: bool) -> Lanes:
        config = self.config
        apart = config.packing == "documents"
        return Lanes(
            self._documents(name), self.weights, config.batch_size, config.seq_len, key, apart=apart, endless=endless
        )

    def _fixed(self, name: str) -> FixedBatches:
        config = self.config
        if not self.report.splits[name]:
            return FixedBatches(lambda: iter(()), 0, self._assemble)
        if config.carry_state:
            make = lambda: lane_rows(lambda: self._lanes(name, 0, False), config.val_batches)  # noqa: E731
            return FixedBatches(make, sum(1 for _ in make()), self._assemble)
        batches = fixed_rows(self._rows(name, 0), self.weights, config.batch_size, config.val_batches)
        return FixedBatches(lambda: iter(batches), len(batches), self._assemble)

    def _identity(self, seed: int) -> dict[str, Any]:
        """The settings and texts that determine the order of batches; paths do not matter."""
        config = self.config
        text = hashlib.sha256(json.dumps([self.tokenizer.fingerprint(), config.add_bos]).encode())
        for store in self.stores:
            text.update(np.ascontiguousarray(store.hashes).tobytes())
        names = ("seq_len", "packing", "carry_state", "overlap_ratio", "val_fraction", "test_fraction")
        identity: dict[str, Any] = {"text": text.hexdigest()[:16], "seed": seed, "weights": self.weights}
        identity |= {name: getattr(config, name) for name in names}
        return identity | ({"batch_size": config.batch_size} if config.carry_state else {})


def open_data(
    config: DataConfig, seed: int = 0, rank: int = 0, world_size: int = 1, progress: bool | None = None
) -> Data:
    """Validate the config, build or open the shards, and return the batches of each split.

    rank, world_size: this process gets rows rank::world_size of each global batch.
    progress: whether to show a progress bar (None: on rank 0, in a terminal).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     data = open_data(DataConfig(seq_len=64, batch_size=2, cache_dir=folder))
    ...     next(data.train)["input_ids"].shape
    torch.Size([2, 64])
    """
    config.validate()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..world_size-1 = {world_size - 1}, but is {rank}")
    if config.batch_size % world_size:
        raise ValueError(f"batch_size must be a multiple of world_size = {world_size}, but is {config.batch_size}")
    progress = False if progress is None and rank else progress  # only rank 0 shows a bar
    rules = rules_of(config)
    cache = cache_folder(config.cache_dir)
    sources = resolve(config.sources, rules)
    tokenizer = tokenizer_of(config, sources, rules, cache, progress)
    total = sum(item.size for source in sources for item in source.items)
    with building(total, progress) as on_progress:
        stores = [
            build(source, tokenizer, rules, cache, config.add_bos, config.workers, on_progress) for source in sources
        ]
    return Data(config, sources, stores, tokenizer, seed, rank, world_size)


def rules_of(config: DataConfig) -> ReadRules:
    """The fields of a config that define a document."""
    return ReadRules(config.text_column, config.min_chars, config.max_document_bytes, config.hub_bytes, config.split)


def tokenizer_of(
    config: DataConfig, sources: Sequence[Source], rules: ReadRules, cache: Path, progress: bool | None
) -> Tokenizer:
    """The tokenizer of a config; `bpe:n` is trained on the sources at first use."""
    folder = bpe_folder(config, sources, rules, cache)
    if folder is None:
        return open_tokenizer(config.tokenizer, config.eos_token)
    size = config.tokenizer.partition(":")[2]
    folder.parent.mkdir(exist_ok=True)
    written_last = folder / "tokenizer_config.json"
    if not written_last.exists():
        with FileLock(f"{folder}.lock"):
            if not written_last.exists():
                remove_parts(folder)
                with training_tokenizer(progress) as on_chars:
                    trained = train_bpe(sample_texts(sources, rules, BPE_CHARS, on_chars=on_chars), int(size))
                trained.save(folder)
    tokenizer = open_tokenizer(str(folder / "tokenizer.json"), "<eos>")
    tokenizer.name = config.tokenizer
    return tokenizer


def bpe_folder(config: DataConfig, sources: Sequence[Source], rules: ReadRules, cache: Path) -> Path | None:
    """The folder of the tokenizer `bpe:n`, which depends on the sources; None for other tokenizers."""
    kind, _, size = config.tokenizer.partition(":")
    if kind != "bpe" or not size:
        return None
    if not size.isdecimal():
        raise ValueError(f"tokenizer {config.tokenizer!r} must include its vocabulary size, as in bpe:32000")
    identity = [size, BPE_CHARS, *(source.fingerprint(rules) for source in sources), *(s.weight for s in sources)]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return cache / "tokenizers" / f"bpe-{size}-{key}"
