"""The text that a training held out, read again from its shards, without building any."""

from __future__ import annotations

import numpy as np

from .build import built
from .config import DataConfig
from .dataset import bpe_folder, rules_of, tokenizer_of
from .files import cache_folder
from .shards import Store
from .sources import resolve
from .splits import Documents, split
from .tokenizer import Tokenizer


def held_out_text(config: DataConfig, tokenizer: Tokenizer, tokens: int) -> str | None:
    """The first held-out documents of a config, about `tokens` tokens or all; None if its shards are not in the cache, or nothing is held out.

    tokenizer: the one of the training. Nothing is downloaded or tokenised. Sources that changed since have other shards.

    >>> import tempfile
    >>> from mnemos.data import ByteTokenizer, open_data
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     config = DataConfig(seq_len=64, batch_size=2, cache_dir=folder)
    ...     before = held_out_text(config, ByteTokenizer(), 100)
    ...     _, after = open_data(config), held_out_text(config, ByteTokenizer(), 100)
    >>> before, len(after)
    (None, 100)
    """
    rules, cache = rules_of(config), cache_folder(config.cache_dir)
    sources = resolve(config.sources, rules)
    trained = bpe_folder(config, sources, rules, cache)
    if trained is not None:  # the copy beside a run has another fingerprint
        if not (trained / "tokenizer_config.json").is_file():
            return None
        tokenizer = tokenizer_of(config, sources, rules, cache, progress=False)
    folders = [built(source, tokenizer, rules, cache, config.add_bos) for source in sources]
    stores = [Store(folder) for folder in folders if folder is not None]
    if len(stores) < len(folders):
        return None
    pieces: list[str] = []
    for store, parts in zip(stores, split(stores, config.val_fraction, config.test_fraction)):
        for ids in _documents(store, parts["validation"]):
            ids = ids[:tokens]
            pieces.append(tokenizer.decode(ids.tolist()))
            tokens -= len(ids)
            if tokens <= 0:
                return "\n\n".join(pieces)
    return "\n\n".join(pieces) or None


def _documents(store: Store, documents: Documents):
    for start, length in zip(documents.starts.tolist(), documents.lengths.tolist()):
        ids = np.empty(length, np.int64)
        store.read(start, ids)
        yield ids
