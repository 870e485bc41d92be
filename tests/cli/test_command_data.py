"""`mnemos data` and `mnemos tokenizer`."""

from __future__ import annotations

import json
import os

import pytest

from mnemos.cli import main


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MNEMOS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"document {i} says what it says, and no more. " * 3}) for i in range(200)]
    path.write_text("\n".join([*lines, '{"text": ""}', "{broken"]))
    return path


def test_data_is_built_and_its_counts_are_printed(corpus, tmp_path, capsys):
    assert main(["data", "build", str(corpus), "--seq-len", "64"]) == 0
    printed = capsys.readouterr().out
    assert "200" in printed and "1 bad_json" in printed and "1 empty" in printed
    assert os.listdir(tmp_path / "cache/shards")


def test_rows_are_shown_as_training_sees_them(corpus, capsys):
    assert main(["data", "show", str(corpus), "--packing", "documents", "--seq-len", "512", "--rows", "2"]) == 0
    printed = capsys.readouterr().out
    assert "Row 2: 512 tokens" in printed and "stretch" in printed and "says what it says" in printed
    assert "Row 3" not in printed


def test_a_tokenizer_is_trained_with_every_option_and_shown(corpus, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    out, kept = tmp_path / "tokenizer", tmp_path / "kept.txt"
    options = ["--output", str(out), "--vocab-size", "300", "--target-chars", "5000", "--seed", "1"]
    assert main(["tokenizer", "train", str(corpus), *options, "--keep-corpus", "--corpus-path", str(kept)]) == 0
    assert "300 tokens in" in capsys.readouterr().out
    assert 4900 <= len(kept.read_text()) <= 5200
    assert main(["tokenizer", "show", str(out), "--text", "document 7"]) == 0
    assert "300 tokens, end 3, begin 2" in capsys.readouterr().out
    assert main(["data", "build", str(corpus), "--tokenizer", str(out), "--seq-len", "16"]) == 0
    assert "vocabulary 300" in capsys.readouterr().out


def test_what_is_wrong_is_a_sentence_and_status_2(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    assert main(["data", "build", str(tmp_path / "a.jsonl")]) == 2
    assert "has no text under 'text'" in capsys.readouterr().err
    assert main(["data", "build", "./nowhere"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["tokenizer", "train", "./nowhere", "--output", str(tmp_path / "t")]) == 2
    assert not (tmp_path / "t").exists()
