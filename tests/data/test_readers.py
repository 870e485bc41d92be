"""Files of every kind, and files that are not what they should be."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pytest
from corpora import prose

from mnemos.data import readers
from mnemos.data.readers import ReadRules, read
from mnemos.data.report import ReadReport
from mnemos.data.sharding import Item, items_of, kind_of, parts_of


def documents(path, report=None, items=None, **rules) -> list[str]:
    found, pieces = [], []
    report = report if report is not None else ReadReport()
    for item in items or items_of(path, kind_of(path) or "text"):
        for piece in read(item, ReadRules(**rules), report):
            pieces.append(piece.text)
            if piece.last:
                found.append("".join(pieces))
                pieces = []
    assert not pieces, "a document has no end"
    return found


def parquet(path, column, row_group_size=None):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"text": pa.array(column), "number": list(range(len(column)))})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_json_file_that_memory_should_not_hold_is_one_sentence(tmp_path, name):
    raw = json.dumps({"text": "word " * 100}).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert len(documents(tmp_path / name, max_document_bytes=len(raw))) == 1
    with pytest.raises(ValueError, match=r"is more than 400 bytes of JSON: make it a \.jsonl file"):
        documents(tmp_path / name, max_document_bytes=100)


def test_every_kind_of_file_gives_its_documents(tmp_path):
    texts = [f"document {i}: naïve 日本 text" for i in range(5)]
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "a.md").write_text(texts[1])
    (tmp_path / "list.json").write_text(json.dumps(texts))
    (tmp_path / "records.json").write_text(json.dumps([{"text": text} for text in texts]))
    (tmp_path / "one.json").write_text(json.dumps({"text": texts[2]}))
    (tmp_path / "chapters.json").write_text(json.dumps({"text": texts}))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(texts[3].encode()))
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(texts[4].encode()))
    expected = {"a.txt": [texts[0]], "a.md": [texts[1]], "one.json": [texts[2]], "a.txt.gz": [texts[3]]}
    expected |= {"enwik8.gz": [texts[4]]}
    expected |= dict.fromkeys(("list.json", "records.json", "chapters.json", "a.jsonl", "a.jsonl.gz"), texts)
    for name, wanted in expected.items():
        assert documents(tmp_path / name) == wanted, name
    assert documents(parquet(tmp_path / "a.parquet", texts)) == texts


def test_another_column_is_read_where_it_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": "y"}\n')
    assert documents(tmp_path / "a.jsonl", column="body") == ["x"]


def test_pieces_of_a_long_file_are_the_file_and_cut_no_word(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1000)
    text = prose(10_000).replace("the", "thé").replace(". ", ".\n\n  ")
    (tmp_path / "a.txt").write_text(text)
    pieces = [p.text for p in read(Item("text", str(tmp_path / "a.txt")), ReadRules(), ReadReport())]
    assert "".join(pieces) == text and len(pieces) > 5
    for left, right in zip(pieces, pieces[1:]):
        assert not left[-1].isspace() and right[0].isspace()


@pytest.mark.parametrize("block", [7, 8, 9, 10, 11])
def test_a_character_is_never_cut_in_two(tmp_path, monkeypatch, block):
    monkeypatch.setattr(readers, "BLOCK_BYTES", block)
    text = "aé日𝄞" * 50
    (tmp_path / "a.txt").write_text(text)
    report = ReadReport()
    assert documents(tmp_path / "a.txt", report) == [text] and report.repaired == 0


def test_white_space_short_and_odd_records_are_skipped_and_counted(tmp_path):
    lines = [
        '{"text": "  "}',
        '{"text": "ab"}',
        "{broken",
        '{"text": 7}',
        '{"other": "x"}',
        "[1]",
        "",
        '{"text": "long enough"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    report = ReadReport()
    assert documents(tmp_path / "a.jsonl", report, min_chars=5) == ["long enough"]
    assert dict(report.skipped) == {"empty": 1, "short": 1, "bad_json": 1, "no_text": 3}
    for empty in ("", " \n\t "):
        (tmp_path / "empty.txt").write_text(empty)
        report = ReadReport()
        assert documents(tmp_path / "empty.txt", report) == [] and dict(report.skipped) == {"empty": 1}


def test_binary_junk_is_skipped_and_stray_bytes_are_repaired(tmp_path):
    (tmp_path / "junk.txt").write_bytes(os.urandom(5000))
    (tmp_path / "stray.txt").write_bytes(b"good text \xff and " + b"more " * 50 + b"\0end")
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait, s'il vous pla\xeet".encode("latin1"))
    report = ReadReport()
    assert documents(tmp_path / "junk.txt", report) == [] and dict(report.skipped) == {"binary": 1}
    report = ReadReport()
    (repaired,) = documents(tmp_path / "stray.txt", report)
    assert repaired.startswith("good text \ufffd and more") and repaired.endswith("more end") and report.repaired == 1
    assert (
        documents(tmp_path / "latin.txt", report) == ["caf\ufffd au lait, s'il vous pla\ufffdt"]
        and report.repaired == 2
    )


def test_half_a_surrogate_pair_in_json_becomes_text_that_utf8_can_hold(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "broken \\ud800 pair, and a long enough rest"}\n')
    report = ReadReport()
    (text,) = documents(tmp_path / "a.jsonl", report)
    assert text.encode() and report.repaired == 1


def test_invalid_utf8_in_parquet_is_repaired(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    raw = pa.array([b"fine enough \xff to be read", b"also fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": raw}), tmp_path / "a.parquet")
    report = ReadReport()
    assert documents(tmp_path / "a.parquet", report) == ["fine enough \ufffd to be read", "also fine"]
    assert report.repaired == 1


def test_a_line_longer_than_the_limit_is_passed_over_without_being_held(tmp_path):
    lines = ['{"text": "before"}', json.dumps({"text": "x" * 50_000}), '{"text": "after"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    report = ReadReport()
    assert documents(tmp_path / "a.jsonl", report, max_document_bytes=1000) == ["before", "after"]
    assert dict(report.skipped) == {"long": 1}


LIMITED = """
import resource, sys
from mnemos.data.readers import ReadRules, read
from mnemos.data.sharding import Item
from mnemos.data.report import ReadReport
report = ReadReport()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
chars = sum(len(p.text) for p in read(Item(sys.argv[1], sys.argv[2]), ReadRules(max_document_bytes=2**22), report))
print(chars, report.skipped["long"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("kind, expected", [("text", (2**28 + 12, 0)), ("jsonl", (0, 1))])
def test_one_endless_line_is_read_in_bounded_memory(tmp_path, kind, expected):
    path = tmp_path / "line"
    with open(path, "wb") as file:
        file.write(b'{"text": "')
        for _ in range(2**8):
            file.write(b"x" * 2**20)
        file.write(b'"}')
    done = subprocess.run([sys.executable, "-c", LIMITED, kind, str(path)], capture_output=True, text=True)
    chars, long, kilobytes = map(int, done.stdout.split())
    assert (chars, long) == expected
    assert kilobytes < 2**15, "256 MB were read: 32 MB must do"


def test_a_damaged_file_is_one_sentence(tmp_path):
    whole = gzip.compress(prose(100_000).encode())
    (tmp_path / "a.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.txt\.gz is damaged"):
        documents(tmp_path / "a.txt.gz")
    (tmp_path / "a.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"a\.json is not JSON"):
        documents(tmp_path / "a.json")
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable parquet file"):
        documents(tmp_path / "a.parquet")


@pytest.mark.parametrize("size", [50, 100, 333, 10_000])
def test_ranges_of_a_jsonl_file_give_every_line_once(tmp_path, size):
    texts = [f"line {i} " + "y" * (i * 7 % 90) for i in range(60)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    items = items_of(path, "jsonl", part_bytes=size)
    assert len(items) > 1 or size == 10_000
    report = ReadReport()
    assert documents(path, report, items) == texts and not report.skipped


def test_row_groups_of_a_parquet_file_give_every_row_once(tmp_path):
    texts = [f"row {i}" for i in range(100)]
    path = parquet(tmp_path / "a.parquet", texts, row_group_size=9)
    items = items_of(path, "parquet", part_bytes=path.stat().st_size // 4)
    assert len(items) >= 4 and documents(path, items=items) == texts


def test_small_files_share_a_part_and_large_ones_have_their_own():
    items = [Item("text", str(i), size=size) for i, size in enumerate([10, 10, 10, 500, 10])]
    assert [[int(item.path) for item in part] for part in parts_of(items, 100)] == [[0, 1, 2], [3], [4]]
