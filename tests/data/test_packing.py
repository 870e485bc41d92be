"""Rows: what is in them, and that nothing is lost or seen twice."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from corpora import jsonl, opened, prose, texts_of

from mnemos.data.packing import Packed, Stream
from mnemos.data.shuffle import permute, uniform
from mnemos.data.splits import Documents


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 255, 1000, 4097])
def test_a_permutation_has_every_place_once_and_depends_on_the_key(n):
    found = permute(np.arange(n), n, key=3)
    assert sorted(found.tolist()) == list(range(n))
    assert (found == [permute(np.array([i]), n, key=3)[0] for i in range(n)]).all()
    if n > 16:
        assert (found != permute(np.arange(n), n, key=4)).any()
        assert abs(np.corrcoef(np.arange(n), found)[0, 1]) < 0.3 + 3 / n**0.5


def test_where_a_place_goes_is_spread_evenly_over_keys():
    counts = collections.Counter(int(permute(np.array([0]), 10, key)[0]) for key in range(2000))
    assert len(counts) == 10 and min(counts.values()) > 140 and max(counts.values()) < 260
    draws = [uniform(0, i) for i in range(5000)]
    assert abs(np.mean(draws) - 0.5) < 0.02 and min(draws) >= 0 and max(draws) < 1


def documents(*lengths, gap=0) -> Documents:
    lengths = np.array(lengths)
    return Documents(np.cumsum(lengths + gap) - lengths - gap, lengths)


def covered(rows) -> collections.Counter:
    return collections.Counter(
        token for row in rows for span in row.spans for token in range(span.start, span.start + span.length)
    )


@pytest.mark.parametrize("gap", [0, 5])
def test_an_epoch_of_the_stream_has_every_token_at_most_once_and_all_but_the_ends(gap):
    stream = Stream(0, documents(30, 7, 100, 1, 62, gap=gap), np.array([0]), 16, key=1)
    for epoch in range(4):
        rows = []
        while True:
            rows.append(stream.next())
            if stream.epoch != epoch:
                rows.pop()
                stream.load({"epoch": epoch + 1, "row": 0})
                break
        counts = covered(rows)
        assert max(counts.values()) == 1 and len(counts) == 16 * len(rows) > 200 - 2 * 16
        assert all(sum(span.length for span in row.spans) == 16 for row in rows)


def test_epochs_of_the_stream_are_cut_elsewhere_and_shuffled_differently():
    stream = Stream(0, documents(1000), np.array([0]), 16, key=1)
    starts = [[stream.next().spans[0].start for _ in range(60)] for _ in range(2)]
    assert starts[0] != sorted(starts[0])
    assert len({start % 16 for epoch in starts for start in epoch}) > 1


def test_spans_end_where_a_shard_ends():
    stream = Stream(0, documents(20, 20), np.array([0, 20, 40]), 40, key=0)
    assert [(span.start, span.length) for span in stream.next().spans] == [(0, 20), (20, 20)]


@pytest.mark.parametrize("overlap", [0, 4])
def test_an_epoch_of_packed_rows_has_every_token(overlap):
    lengths = (5, 16, 17, 18, 33, 100, 2, 1, 7, 9)
    packed = Packed(0, documents(*lengths), 16, key=1, overlap=overlap)
    rows = []
    while packed.epoch == 0:
        rows.append(packed.next())
    counts = covered(rows)
    lonely = {sum(lengths[:7])}  # a document of one token predicts nothing
    if not overlap:  # nor does a piece of one token
        lonely |= {5 + 16 + 16, 5 + 16 + 17 + 18 + 32}
    assert set(counts) == set(range(sum(lengths))) - lonely
    assert all(sum(span.length for span in row.spans) <= 16 for row in rows)
    if overlap:
        assert max(counts.values()) > 1
    else:
        assert max(counts.values()) == 1


def test_packed_rows_are_nearly_full():
    chance = np.random.default_rng(0)
    packed = Packed(0, documents(*chance.integers(5, 400, 3000)), 512, key=0)
    rows = [packed.next() for _ in range(600)]
    assert sum(span.length for row in rows for span in row.spans) / (512 * len(rows)) > 0.97


def test_windows_overlap_and_the_last_one_is_full():
    packed = Packed(0, documents(100), 32, key=0, overlap=8)
    starts, lengths, before = packed.spans(np.arange(packed.pieces))
    assert starts.tolist() == [0, 24, 48, 68] and lengths.tolist() == [32] * 4
    assert before.tolist() == [0, 8, 8, 12]


def test_rows_of_documents_restart_positions_at_each_and_pad_the_rest(tmp_path):
    data = opened(tmp_path, jsonl(tmp_path / "a.jsonl", 300, chars=40), packing="documents", seq_len=128)
    texts = set(texts_of(data, "train"))
    found = 0
    for _ in range(20):
        batch = next(data.train)
        for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"]):
            starts = (positions == 0).nonzero().flatten().tolist()
            assert starts[0] == 0
            for start, end in zip(starts, [*starts[1:], 128]):
                assert positions[start:end].tolist() == list(range(end - start))
                learned = labels[start:end][labels[start:end] >= 0]
                assert learned[-1] == 0 and data.tokenizer.decode(learned.tolist()) in texts
                found += 1
            padding = labels == -100
            assert (ids[padding] == data.tokenizer.eos_token_id).all() and (ids[~padding] == labels[~padding]).all()
    assert found > 150


def test_a_model_learns_from_packed_documents_what_it_learns_from_each_alone(tmp_path):
    """The contract with our models: the loss of a packed row is the mean over the documents by themselves."""
    pytest.importorskip("transformers")
    from mnemos.models import MnemosForCausalLM, presets

    data = opened(tmp_path, jsonl(tmp_path / "a.jsonl", 200, chars=30), packing="documents", seq_len=128, batch_size=2)
    torch.manual_seed(0)
    model = MnemosForCausalLM(presets.config("titans-mag", hidden_size=32, num_hidden_layers=1)).eval()
    batch = next(data.train)
    assert int((batch["position_ids"] == 0).sum()) > 3
    packed = model(**batch).loss
    total, count = 0.0, 0
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"]):
        starts = (positions == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], 128]):
            end = start + int((labels[start:end] >= 0).sum())
            alone = ids[None, start:end]
            total += model(alone, labels=alone).loss.item() * (end - start - 1)
            count += end - start - 1
    assert packed.item() == pytest.approx(total / count, rel=1e-5)


def test_validation_counts_a_token_of_two_windows_once(tmp_path):
    (tmp_path / "a.txt").write_text(prose(20_000))
    choices = {"val_fraction": 0.1, "val_batches": 100}
    data = opened(tmp_path, tmp_path / "a.txt", packing="windows", overlap_ratio=0.5, **choices)
    learned = sum(int((batch["labels"] >= 0).sum()) for batch in data.validation)
    assert learned == data.report.splits["validation"] == 2000
    assert "position_ids" in next(data.train)


def test_sources_come_by_weight_and_in_an_order_the_seed_fixes(tmp_path):
    for i, letter in enumerate("xyz"):
        (tmp_path / f"{letter}.txt").write_text(letter * 3000 * (i + 1))
    sources = [f"{tmp_path}/{letter}.txt:{weight}" for letter, weight in zip("xyz", (0.5, 0.4, 0.1))]
    data = opened(tmp_path, *sources, batch_size=100)
    counts = collections.Counter()
    order = []
    for _ in range(20):
        firsts = [chr(row[0]) for row in next(data.train)["input_ids"].tolist()]
        counts.update(firsts)
        order += firsts
    assert counts["x"] / 2000 == pytest.approx(0.5, abs=0.04)
    assert counts["y"] / 2000 == pytest.approx(0.4, abs=0.04)
    assert counts["z"] / 2000 == pytest.approx(0.1, abs=0.03)
    again = opened(tmp_path, *sources, batch_size=100)
    assert order[:100] == [chr(row[0]) for row in next(again.train)["input_ids"].tolist()]
    learned = {chr(label) for batch in data.validation for label in batch["labels"].flatten().tolist() if label > 0}
    assert learned == {"x", "y", "z"}


def test_without_weights_sources_count_by_their_size(tmp_path):
    for letter, size in (("x", 9000), ("y", 3000)):
        (tmp_path / f"{letter}.txt").write_text(letter * size)
    assert opened(tmp_path, tmp_path / "x.txt", tmp_path / "y.txt").weights == pytest.approx([0.75, 0.25], abs=0.001)
