"""What may be named as a source."""

from __future__ import annotations

import os
import time

import pytest
from corpora import jsonl, opened, prose

from mnemos.data import DataConfig, embedded, open_data
from mnemos.data.hub import open_hub, records
from mnemos.data.readers import ReadRules
from mnemos.data.sources import parse, resolve


def test_the_embedded_text_needs_nothing_and_is_the_same_every_time():
    texts = list(embedded.documents())
    assert texts == list(embedded.documents())
    assert sum(map(len, texts)) == embedded.MAX_CHARACTERS
    assert any('"""' in text and "def " in text for text in texts)


def test_the_embedded_text_is_ready_in_two_seconds_of_processor_time(tmp_path):
    start = time.process_time()
    data = opened(tmp_path, "embedded")
    next(data.train)
    assert time.process_time() - start < 2
    assert data.vocab_size == 256 and data.report.bytes > 4e6


def test_a_python_without_sources_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda name: str(tmp_path / "zipped"))
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="without its sources"):
        list(embedded.documents())


def test_a_folder_is_read_recursively_without_hidden_and_unknown_files(tmp_path):
    for name in ("b/deep/x.txt", "a.md", "c.png", ".git/y.txt", ".hidden.txt"):
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    (source,) = resolve([str(tmp_path / "corpus")], ReadRules())
    assert [os.path.relpath(item.path, tmp_path / "corpus") for item in source.items] == ["a.md", "b/deep/x.txt"]


def test_the_smollm_recipe_has_its_three_parts_and_weights():
    assert parse(["smollm-corpus"]) == [("cosmopedia-v2", 0.4), ("fineweb-edu-dedup", 0.5), ("python-edu", 0.1)]
    assert parse(["cosmopedia-v2:0.7", "python-edu:0.3"]) == [("cosmopedia-v2", 0.7), ("python-edu", 0.3)]
    sources = resolve(["smollm-corpus"], ReadRules())
    assert [(s.items[0].path, s.items[0].subset) for s in sources] == [
        ("HuggingFaceTB/smollm-corpus", "cosmopedia-v2"),
        ("HuggingFaceTB/smollm-corpus", "fineweb-edu-dedup"),
        ("Avelina/python-edu-cleaned", None),
    ]


@pytest.mark.parametrize(
    "specs, message",
    [
        (["a.txt:0.5", "b.txt"], "source 'b.txt' has no weight"),
        (["a.txt:0"], "a weight above 0"),
        (["a.txt:-1"], "a weight above 0"),
        (["a.txt:inf"], "a weight above 0"),
        (["a.txt", "a.txt"], "given twice"),
        (["nowhere.txt"], "does not exist; named sources are embedded"),
        (["./nowhere"], "does not exist"),
        (["a/b/c/d"], "does not exist"),
        (["nowhere/"], "does not exist"),
        ([""], "does not exist"),
    ],
)
def test_a_wrong_source_is_one_sentence(specs, message):
    with pytest.raises(ValueError, match=message):
        resolve(specs, ReadRules())


def test_a_file_whose_name_looks_like_a_weight_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:1").write_text("x")
    assert parse(["a:1"]) == [("a:1", None)]


def test_a_missing_column_is_found_before_anything_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match=r"first line of .*a\.jsonl has no text under 'text'"):
        resolve([str(tmp_path / "a.jsonl")], ReadRules())
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["x"], "title": ["y"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"no column 'text': text_column can be one of body, title"):
        resolve([str(tmp_path / "a.parquet")], ReadRules())


def test_an_empty_folder_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"holds no \.txt"):
        resolve([str(tmp_path)], ReadRules())


def test_a_source_without_documents_says_what_was_skipped(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_bytes(os.urandom(3000))
    (tmp_path / "corpus/b.txt").write_text("")
    with pytest.raises(ValueError, match=r"holds no document: skipped 1 binary \(not text\), 1 empty"):
        opened(tmp_path, tmp_path / "corpus")


def test_a_dataset_is_streamed_by_the_datasets_library(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "dataset"
    folder.mkdir()
    jsonl(folder / "train.jsonl", 30)
    rows = list(records(str(folder), None, "train", "text"))
    assert len(rows) == 30 and rows[7].startswith("<0-7> ")
    with pytest.raises(ValueError, match="has no column 'body': text_column can be one of text"):
        next(records(str(folder), None, "train", "body"))


def test_a_hub_dataset_stops_at_hub_bytes(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    folder = tmp_path / "dataset"
    folder.mkdir()
    jsonl(folder / "train.jsonl", 200, chars=400)
    monkeypatch.setattr("mnemos.data.sources.HUB", {"my-hub": (str(folder), None)})
    data = opened(tmp_path, "my-hub", hub_bytes=20_000, val_fraction=0.1)
    assert 20_000 <= data.report.bytes < 22_000
    next(data.train)


def test_no_network_is_one_sentence_and_quick(monkeypatch):
    pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")

    def fail(*args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(hub.HfApi, "dataset_info", fail)
    with pytest.raises(
        ValueError, match="'someone/corpus' is not a file, a folder or a named source, and the hub cannot"
    ):
        open_hub("someone/corpus", None, "train")


def test_a_hub_that_is_lost_on_the_way_is_one_sentence(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def lost(self):
        yield {"text": "the first row"}
        raise ConnectionError("gone")

    folder = tmp_path / "dataset"
    folder.mkdir()
    jsonl(folder / "train.jsonl", 30)
    monkeypatch.setattr(datasets.IterableDataset, "__iter__", lost)
    rows = records(str(folder), None, "train", "text")
    assert next(rows) == "the first row"
    with pytest.raises(ValueError, match="the connection to the hub was lost after 1 rows of dataset"):
        next(rows)


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"seq_len": 1}, "seq_len must be a whole number >= 2, but is 1"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"packing": "loose"}, "packing must be one of documents, stream, windows, but is 'loose'"),
        ({"val_fraction": 1.0}, r"val_fraction must be in \[0, 1\)"),
        ({"val_fraction": 0.6, "test_fraction": 0.5}, "leave nothing to train on"),
        ({"overlap_ratio": 0.5}, "overlap_ratio needs packing='windows'"),
        ({"carry_state": True, "packing": "windows"}, "carry_state needs"),
        ({"sources": "a.txt"}, "sources must be one or more strings"),
        ({"sources": ()}, "sources must be one or more strings"),
        ({"prefetch": -1}, "prefetch must be"),
    ],
)
def test_a_config_that_cannot_be_is_one_sentence(choice, message):
    with pytest.raises(ValueError, match=message):
        open_data(DataConfig(**choice))


def test_ranks_that_do_not_fit_are_one_sentence(tmp_path):
    (tmp_path / "a.txt").write_text(prose(5000))
    with pytest.raises(ValueError, match="batch_size must be a multiple of world_size = 3, but is 4"):
        opened(tmp_path, tmp_path / "a.txt", world_size=3)
    with pytest.raises(ValueError, match="rank must be in"):
        opened(tmp_path, tmp_path / "a.txt", rank=2, world_size=2)


def test_too_little_text_is_one_sentence(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match=r"leaves 6 tokens to train on, fewer than one sequence \(seq_len=64\)"):
        opened(tmp_path, tmp_path / "a.txt")
