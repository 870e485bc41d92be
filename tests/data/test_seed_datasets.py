"""LongContextDataset, BookDataset, RecallDataset and collate."""

from __future__ import annotations

import json

import pytest
import torch
from corpora import prose

from mnemos.data import BookDataset, ByteTokenizer, LongContextDataset, RecallDataset, collate, train_bpe


@pytest.mark.parametrize("overlap", [0.0, 0.1, 0.2, 0.5])
def test_windows_cover_a_text_overlap_as_asked_and_end_where_it_ends(overlap):
    text = prose(10_000)
    dataset = LongContextDataset([text], ByteTokenizer(), max_length=1000, overlap_ratio=overlap)
    starts = [start for _, start in dataset.windows]
    step = 1000 - int(1000 * overlap)
    assert all(b - a == step for a, b in zip(starts, starts[1:-1])) and starts[-1] == 9000
    assert all(len(dataset[i]["input_ids"]) == 1000 for i in range(len(dataset)))
    assert all(0 < b - a <= step for a, b in zip(starts, starts[1:]))
    assert bytes(dataset[len(dataset) - 1]["input_ids"].tolist()).decode() == text[-1000:]
    assert torch.equal(dataset[0]["labels"], dataset[0]["input_ids"])


def test_short_texts_are_left_out_and_middling_ones_are_one_window():
    dataset = LongContextDataset(["x" * 511, "y" * 512, "z" * 2048, "w" * 2049], ByteTokenizer())
    assert dataset.skipped == 1
    assert [len(dataset[i]["input_ids"]) for i in range(len(dataset))] == [512, 2048, 2048, 2048]


def test_a_tokenizer_of_transformers_will_do(tmp_path):
    pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    train_bpe([prose(20_000)], 400).save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    dataset = LongContextDataset([prose(5000)], theirs, max_length=256, min_length=10)
    assert theirs.decode(dataset[0]["input_ids"]) in prose(5000)
    sample = RecallDataset(2, 256, tokenizer=theirs)[1]
    assert len(sample["input_ids"]) == 256


def test_books_are_found_in_folders_and_json(tmp_path):
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf/a.txt").write_text("a" * 3000)
    (tmp_path / "b.json").write_text(json.dumps({"text": "b" * 3000}))
    (tmp_path / "c.json").write_text(json.dumps(["c" * 3000, "d" * 100]))
    dataset = BookDataset(tmp_path, max_length=3000)
    assert [chr(dataset[i]["input_ids"][0]) for i in range(len(dataset))] == ["b", "c", "a"] and dataset.skipped == 1
    with pytest.raises(ValueError, match="does not exist: it must be a file or a folder of books"):
        BookDataset(tmp_path / "nowhere")


@pytest.mark.parametrize("length, facts", [(300, 1), (512, 5), (2048, 5), (2048, 40)])
def test_a_recall_sample_has_its_length_its_facts_once_and_its_answer_as_labels(length, facts):
    dataset = RecallDataset(num_samples=20, context_length=length, num_facts=facts)
    places = []
    for i in range(len(dataset)):
        sample = dataset[i]
        assert len(sample["input_ids"]) == len(sample["labels"]) == length and len(sample["facts"]) == facts
        text = ByteTokenizer().decode(sample["input_ids"].tolist())
        for number, value in sample["facts"].items():
            assert text.count(f"Fact {number}: The answer is {value}.") == 1
        answer = sample["answer"]
        assert text.endswith(f"What is the answer of fact {sample['question']}? Answer: {answer}.")
        assert answer == str(sample["facts"][sample["question"]])
        learned = sample["labels"][sample["labels"] >= 0]
        assert (
            ByteTokenizer().decode(learned.tolist()) == f" {answer}."
            and (sample["labels"][: -len(learned)] == -100).all()
        )
        places.append(text.index(f"Fact {sample['question']}:") / length)
    if length == 2048 and facts == 5:
        assert min(places) < 0.3 and max(places) > 0.6, "facts are anywhere"


def test_recall_samples_are_the_same_for_a_seed_and_differ_otherwise():
    ids = lambda seed, i: RecallDataset(5, 400, seed=seed)[i]["input_ids"]  # noqa: E731
    assert torch.equal(ids(0, 2), ids(0, 2)) and not torch.equal(ids(0, 2), ids(1, 2))
    assert not torch.equal(ids(0, 2), ids(0, 3))


def test_what_cannot_be_recalled_is_one_sentence():
    with pytest.raises(ValueError, match=r"context_length must be at least \d+ tokens for 5 facts, but is 100"):
        RecallDataset(context_length=100)
    with pytest.raises(ValueError, match=r"num_facts in 1\.\.9000"):
        RecallDataset(num_facts=0)
    with pytest.raises(IndexError):
        RecallDataset(num_samples=3, context_length=400)[3]


def test_samples_are_padded_with_ignored_labels_and_a_mask():
    dataset = LongContextDataset(["x" * 700, "y" * 600], ByteTokenizer())
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, collate_fn=collate)
    (batch,) = list(loader)
    assert batch["input_ids"].shape == (2, 700)
    assert batch["attention_mask"].sum(1).tolist() == [700, 600]
    assert (batch["labels"][1, 600:] == -100).all() and (batch["labels"][1, :600] == ord("y")).all()
    assert collate([dataset[1]], pad_token_id=9)["input_ids"].shape == (1, 600)
    with pytest.raises(ValueError, match="samples is empty"):
        collate([])
    with pytest.raises(ValueError, match="sample 0 has 2 input_ids but 1 labels"):
        collate([{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1])}])
