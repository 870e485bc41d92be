"""Validation and test text is never trained on."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from corpora import jsonl, opened, prose, texts_of


def test_documents_are_on_one_side_only_and_every_one_is_on_some(tmp_path):
    data = opened(tmp_path, jsonl(tmp_path / "a.jsonl", 1000), val_fraction=0.05, test_fraction=0.1)
    sides = {name: set(texts_of(data, name)) for name in ("train", "validation", "test")}
    assert not sides["train"] & sides["validation"] and not sides["train"] & sides["test"]
    assert not sides["validation"] & sides["test"]
    assert len(set.union(*sides.values())) == 1000
    shares = {name: tokens / data.report.tokens for name, tokens in data.report.splits.items()}
    assert shares["validation"] == pytest.approx(0.05, abs=0.005) and shares["test"] == pytest.approx(0.1, abs=0.01)


def test_the_split_depends_on_neither_the_seed_nor_the_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    corpus = jsonl(tmp_path / "a.jsonl", 300)
    expected = texts_of(opened(tmp_path, corpus), "validation")
    assert expected == texts_of(opened(tmp_path, corpus, seed=5), "validation")
    assert expected == texts_of(opened(tmp_path, corpus, tokenizer="bpe:400"), "validation")


def test_copies_of_a_document_are_on_the_same_side_in_every_source(tmp_path):
    jsonl(tmp_path / "a.jsonl", 400)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    (tmp_path / "b.jsonl").write_text("\n".join(lines[::-1] + lines[:200]) + "\n")
    data = opened(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl", val_fraction=0.1)
    assert not set(texts_of(data, "train")) & set(texts_of(data, "validation"))
    assert texts_of(data, "validation")


def test_one_long_file_holds_out_its_tail_as_enwik8_does(tmp_path):
    text = prose(100_000)
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(text.encode()))
    data = opened(tmp_path, tmp_path / "enwik8.gz", val_fraction=0.05, test_fraction=0.05)
    assert texts_of(data, "train") == [text[:90_001]]  # 100,001 tokens, the end token is the last
    assert texts_of(data, "validation") == [text[90_001:95_001]]
    assert texts_of(data, "test") == [text[95_001:]]


def test_a_document_that_is_most_of_a_source_is_divided(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", 300)
    with open(path, "a") as file:
        file.write(json.dumps({"text": prose(100_000, seed=77)}) + "\n")
    data = opened(tmp_path, path)
    assert data.report.splits["validation"] == pytest.approx(0.02 * data.report.tokens, rel=0.1)


def test_a_document_that_is_divided_in_one_source_is_left_out_of_another(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(200):
        (corpus / f"{i:03d}.txt").write_text(prose(300, seed=i))
    data = opened(tmp_path, corpus, corpus / "007.txt", val_fraction=0.05)
    folder = [part["train"].tokens + part["validation"].tokens for part in data._parts]
    assert folder == [199 * 301, 301]
    whole = prose(300, seed=7)
    assert not any(text and text in whole for text in texts_of(data, "train")[:-1])


def test_rows_of_validation_hold_no_text_that_training_sees(tmp_path):
    """Every document begins with its number: those of one side never appear on the other, in any packing."""
    import re

    corpus = jsonl(tmp_path / "a.jsonl", 300, chars=60)
    for packing in ("stream", "documents", "windows"):
        data = opened(tmp_path, corpus, packing=packing, val_fraction=0.1, val_batches=100, batch_size=2)
        seen = {"train": set(), "validation": set()}
        for batch in data.validation:
            for row in batch["input_ids"]:
                seen["validation"] |= set(re.findall(r"<0-\d+>", data.tokenizer.decode(row.tolist())))
        for _ in range(800):
            for row in next(data.train)["input_ids"]:
                seen["train"] |= set(re.findall(r"<0-\d+>", data.tokenizer.decode(row.tolist())))
        assert len(seen["validation"]) > 15 and len(seen["train"]) > 240
        assert not seen["train"] & seen["validation"], packing


def test_no_validation_is_possible_and_too_little_for_it_is_one_sentence(tmp_path):
    (tmp_path / "a.txt").write_text(prose(2000))
    data = opened(tmp_path, tmp_path / "a.txt", val_fraction=0.0)
    assert list(data.validation) == [] and data.report.splits["train"] == 2001
    with pytest.raises(ValueError, match=r"val_fraction=0.0001 of 2001 tokens leaves nothing to validate on"):
        opened(tmp_path, tmp_path / "a.txt", val_fraction=0.0001)


def test_a_corpus_of_copies_is_divided_inside_its_documents_and_says_so(tmp_path):
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "the same " * 30}) + "\n") * 800)
    data = opened(tmp_path, tmp_path / "a.jsonl")
    assert data.report.splits["validation"] == pytest.approx(0.02 * data.report.tokens, rel=0.2)
    assert data.report.splits["train"] + data.report.splits["validation"] == data.report.tokens
    assert len(data.report.notes) == 1 and "many of its documents are identical" in data.report.notes[0]
    assert np.isfinite(opened(tmp_path, tmp_path / "a.jsonl", val_fraction=0.0).report.tokens)


@pytest.mark.parametrize("copies", [800, 150, 3])
def test_copies_too_short_to_be_divided_leave_some_to_train_on_and_some_to_validate_on(tmp_path, copies):
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "so it goes and goes"}) + "\n") * copies)
    data = opened(tmp_path, tmp_path / "a.jsonl", seq_len=4)
    assert data.report.splits["validation"] == 20 * max(1, round(0.02 * copies))
    assert data.report.splits["train"] + data.report.splits["validation"] == data.report.tokens
    assert "held out whole" in data.report.notes[-1]


def test_a_source_of_copies_leaves_the_split_of_another_as_it_is(tmp_path):
    jsonl(tmp_path / "a.jsonl", 400)
    alone = texts_of(opened(tmp_path, tmp_path / "a.jsonl"), "validation")
    for i in range(5):  # whatever the hash of the copies is
        (tmp_path / f"b{i}.jsonl").write_text((json.dumps({"text": f"copy {i} " * 30}) + "\n") * 200)
        data = opened(tmp_path, tmp_path / "a.jsonl", tmp_path / f"b{i}.jsonl")
        assert len(data._parts[0]["validation"]) == len(alone)
