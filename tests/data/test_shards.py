"""Shards: built once, whole or not at all, in one process or several, and the same tokens either way."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpora import jsonl, opened, prose

from mnemos.data import ByteTokenizer, build, sharding, train_bpe
from mnemos.data.build import encode_part
from mnemos.data.readers import ReadRules
from mnemos.data.sharding import Item
from mnemos.data.shards import ShardWriter, Store, whole_shard


def tokens(store: Store) -> list[int]:
    return np.concatenate(store.arrays).tolist()


def in_many_parts(monkeypatch, size=4000):
    monkeypatch.setattr(sharding, "PART_BYTES", size)


def test_a_shard_holds_each_document_and_its_end(tmp_path):
    data = opened(tmp_path, jsonl(tmp_path / "a.jsonl", 50))
    (store,) = data.stores
    texts = [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert bytes(tokens(store)) == b"".join(text.encode() + b"\0" for text in texts)
    assert store.lengths.tolist() == [len(text) + 1 for text in texts]
    assert store.sizes.tolist() == [len(text) for text in texts]
    assert data.report.documents == 50 and data.report.tokens == sum(store.lengths)
    index = json.loads((store.folder / "index.json").read_text())
    assert index["tokenizer_hash"] == "bytes" and index["source_hash"] and index["dtype"] == "uint8"


def test_a_first_token_is_added_where_it_is_asked_for(tmp_path):
    pytest.importorskip("tokenizers")
    corpus = jsonl(tmp_path / "a.jsonl", 50)
    data = opened(tmp_path, corpus, tokenizer="bpe:300", add_bos=True)
    (store,) = data.stores
    ids = np.array(tokens(store))
    assert (ids[store.starts] == 2).all() and (ids[store.starts + store.lengths - 1] == 3).all()
    assert (ids == 2).sum() == (ids == 3).sum() == 50 and store.arrays[0].dtype == np.uint16


def test_shards_are_built_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    corpus = jsonl(tmp_path / "a.jsonl", 50)
    first = opened(tmp_path, corpus).stores[0]
    monkeypatch.setattr(build, "encode_part", None)  # a second build would fail
    assert opened(tmp_path, corpus).stores[0].folder == first.folder
    monkeypatch.undo()
    jsonl(corpus, 60)
    assert opened(tmp_path, corpus).report.documents == 60
    assert opened(tmp_path, corpus, min_chars=150).report.documents < 60


def test_many_parts_and_processes_give_the_same_tokens_as_one(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    jsonl(corpus / "a.jsonl", 60)
    for i in range(5):
        (corpus / f"{i}.txt").write_text(prose(3000, seed=i))
    for tokenizer in ("bytes", "bpe:300"):
        whole = opened(tmp_path, corpus, tokenizer=tokenizer, cache_dir=str(tmp_path / "one")).stores[0]
        in_many_parts(monkeypatch)
        monkeypatch.setattr(build, "MIN_BYTES_FOR_PROCESSES", 0)
        divided = opened(tmp_path, corpus, tokenizer=tokenizer, workers=2).stores[0]
        monkeypatch.undo()
        assert len(whole.arrays) == 1 and len(divided.arrays) > 4
        for name in ("lengths", "sizes", "hashes"):
            assert getattr(whole, name).tolist() == getattr(divided, name).tolist()
        assert tokens(whole) == tokens(divided)
        everything = np.zeros(int(divided.lengths[-1]), np.int64)
        divided.read(int(divided.starts[-1]), everything)
        assert everything.tolist() == tokens(whole)[-len(everything) :]


def test_an_error_in_a_process_is_raised_here(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(3):
        (corpus / f"{i}.json").write_text(json.dumps([prose(3000)]))
    (corpus / "2.json").write_text("{" + "x" * 3000)
    in_many_parts(monkeypatch)
    monkeypatch.setattr(build, "MIN_BYTES_FOR_PROCESSES", 0)
    with pytest.raises(ValueError, match=r"2\.json is not JSON"):
        opened(tmp_path, corpus, workers=2)


def test_half_a_shard_is_never_taken_for_whole(tmp_path):
    store = opened(tmp_path, jsonl(tmp_path / "a.jsonl", 50)).stores[0]
    expected = tokens(store)
    for damage in (
        lambda: os.truncate(store.folder / "00000.bin", 100),
        lambda: os.truncate(store.folder / "00000.npy", 100),
        lambda: (store.folder / "00000.json").write_text("{"),
        lambda: (store.folder / "index.json").write_text("{"),
        lambda: (store.folder / "index.json").unlink(),
        lambda: (store.folder / "00000.bin").unlink(),
    ):
        damage()
        assert tokens(opened(tmp_path, tmp_path / "a.jsonl").stores[0]) == expected


def test_a_build_that_fails_leaves_no_file_behind_that_looks_whole(tmp_path):
    class Failing(ByteTokenizer):
        def encode_batch(self, texts):
            raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text(prose(1000))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(KeyboardInterrupt):
        encode_part([Item("text", str(tmp_path / "a.txt"))], 0, out, Failing(), ReadRules())
    assert list(out.iterdir()) == [] and whole_shard(out, 0) is None


KILLED = """
import sys, time
from mnemos.data import DataConfig, build, open_data, sharding
sharding.PART_BYTES = 4000
original = build.encode_part
def slow(items, number, *args):
    if number == 3:
        class Slow(type(args[1])):
            def encode_batch(self, texts):
                print("now", flush=True)
                time.sleep(60)
        args = (args[0], Slow(), *args[2:])
    return original(items, number, *args)
build.encode_part = slow
open_data(DataConfig(sources=(sys.argv[1],), cache_dir=sys.argv[2], seq_len=64))
"""


def test_a_build_that_was_killed_goes_on_where_it_was(tmp_path, monkeypatch):
    corpus = jsonl(tmp_path / "a.jsonl", 200)
    cache = tmp_path / "cache"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(corpus), str(cache)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)
    (folder,) = (path for path in (cache / "shards").iterdir() if path.is_dir())
    assert not (folder / "index.json").exists() and list(folder.glob("*.part"))
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("0000[012].bin")}
    assert len(kept) == 3
    expected = tokens(opened(tmp_path, corpus, cache_dir=str(tmp_path / "fresh")).stores[0])
    in_many_parts(monkeypatch)
    store = opened(tmp_path, corpus).stores[0]
    assert tokens(store) == expected
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "what was whole is built again"
    assert not list(folder.glob("*.part"))


OPENING = """
import sys
from mnemos.data import DataConfig, build, open_data
original = build.encode_part
build.encode_part = lambda *args: print("built") or original(*args)
data = open_data(DataConfig(sources=(sys.argv[1],), cache_dir=sys.argv[2], seq_len=64, batch_size=4), rank=int(sys.argv[3]), world_size=2)
print(data.report.tokens, next(data.train)["input_ids"].sum().item())
"""


def test_two_processes_that_open_the_same_data_at_once_build_it_once(tmp_path):
    corpus = jsonl(tmp_path / "a.jsonl", 300)
    command = [sys.executable, "-c", OPENING, str(corpus), str(tmp_path / "cache")]
    running = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    said = [process.communicate(timeout=120)[0].split() for process in running]
    assert sum(words.count("built") for words in said) == 1
    said = [words[-2:] for words in said]
    assert said[0][0] == said[1][0] and said[0][1] != said[1][1]
    whole = opened(tmp_path, corpus)
    assert sum(int(words[1]) for words in said) == next(whole.train)["input_ids"].sum().item()


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"cache_dir .*file/cache cannot be created"):
        opened(tmp_path, "embedded", cache_dir=str(tmp_path / "file/cache"))


def test_the_worker_needs_no_torch():
    code = "import sys, mnemos.data.processes, mnemos.data.build; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_bpe_of_parts_is_used_by_processes_without_a_name_for_its_end(tmp_path, monkeypatch):
    """A tokenizer whose end token only the user can name, in processes that open it from a file."""
    pytest.importorskip("tokenizers")
    bpe = train_bpe([prose(5000)], 300)
    bpe.save(tmp_path / "tokenizer")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(4):
        (corpus / f"{i}.txt").write_text(prose(3000, seed=i))
    in_many_parts(monkeypatch)
    monkeypatch.setattr(build, "MIN_BYTES_FOR_PROCESSES", 0)
    name = str(tmp_path / "tokenizer/tokenizer.json")
    store = opened(tmp_path, corpus, tokenizer=name, eos_token="<unk>", workers=2).stores[0]
    ids = np.array(tokens(store))
    assert (ids[store.starts + store.lengths - 1] == 1).all()
    assert Path(store.folder / "tokenizer/tokenizer.json").exists()


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(self, ids):
        raise OSError(errno.ENOSPC, "No space left on device")

    corpus = jsonl(tmp_path / "a.jsonl", 50)
    monkeypatch.setattr(ShardWriter, "write", full)
    with pytest.raises(ValueError, match=r"shards cannot be written in .*: No space left on device"):
        opened(tmp_path, corpus)
    monkeypatch.undo()
    assert not list((tmp_path / "cache").rglob("*.part")) and not list((tmp_path / "cache").rglob("*.bin"))
    assert opened(tmp_path, corpus).report.documents == 50


def test_a_full_disk_in_a_process_is_the_same_sentence(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(3):
        (corpus / f"{i}.txt").write_text(prose(3500, seed=i))
    in_many_parts(monkeypatch)
    monkeypatch.setattr(build, "MIN_BYTES_FOR_PROCESSES", 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # what the processes inherit
    try:
        with pytest.raises(ValueError, match="shards cannot be written in"):
            opened(tmp_path, corpus, workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
