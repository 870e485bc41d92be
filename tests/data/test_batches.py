"""Batches: an order that can be taken up again, shared among processes, and made ahead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
from corpora import jsonl, opened, prose

PACKINGS = [
    {"packing": "stream"},
    {"packing": "documents"},
    {"packing": "windows", "overlap_ratio": 0.25},
    {"packing": "stream", "carry_state": True},
    {"packing": "documents", "carry_state": True},
]
NAMES = ["stream", "documents", "windows", "carried stream", "carried documents"]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def corpus(tmp_path):
    jsonl(tmp_path / "short.jsonl", 200, chars=60)
    (tmp_path / "long.txt").write_text(prose(5000, seed=5))
    return [f"{tmp_path / 'short.jsonl'}:0.6", f"{tmp_path / 'long.txt'}:0.4"]


@pytest.mark.parametrize("choices", PACKINGS, ids=NAMES)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_batches_go_on_exactly_where_a_state_was_taken(tmp_path, corpus, choices, prefetch):
    data = opened(tmp_path, *corpus, prefetch=prefetch, **choices)
    for _ in range(70):  # beyond an epoch of the long file
        next(data.train)
    state = json.loads(json.dumps(data.train.state_dict()))
    expected = [next(data.train) for _ in range(30)]
    again = opened(tmp_path, *corpus, prefetch=prefetch, **choices)
    next(again.train)
    again.train.load_state_dict(state)
    assert again.train.state_dict() == state
    assert all(same(a, b) for a, b in zip(expected, (next(again.train) for _ in range(30))))
    data.train.load_state_dict(state)
    assert same(next(data.train), expected[0])


@pytest.mark.parametrize("choices", PACKINGS, ids=NAMES)
def test_making_batches_ahead_changes_nothing(tmp_path, corpus, choices):
    ahead = opened(tmp_path, *corpus, prefetch=4, **choices)
    plain = opened(tmp_path, *corpus, prefetch=0, **choices)
    for _ in range(20):
        assert same(next(ahead.train), next(plain.train))
        assert ahead.train.state_dict() == plain.train.state_dict()
    ahead.train.close()
    assert same(next(ahead.train), next(plain.train)), "closing loses nothing"


@pytest.mark.parametrize("choices", PACKINGS, ids=NAMES)
def test_the_ranks_together_have_the_rows_of_one_process(tmp_path, corpus, choices):
    whole = opened(tmp_path, *corpus, batch_size=6, **choices)
    ranks = [opened(tmp_path, *corpus, batch_size=6, rank=r, world_size=3, **choices) for r in range(3)]
    for one, *shared in zip((next(whole.train) for _ in range(25)), *(rank.train for rank in ranks)):
        for name in one:
            assert all(batch[name].shape[0] == 2 for batch in shared)
            together = torch.stack([batch[name] for batch in shared], 1).flatten(0, 1)
            assert torch.equal(together, one[name]), name
    assert all(rank.train.state_dict() == ranks[0].train.state_dict() for rank in ranks)
    assert len({len(list(rank.validation)) for rank in ranks}) == 1
    for one, *shared in zip(whole.validation, *(rank.validation for rank in ranks)):
        together = torch.stack([batch["labels"] for batch in shared], 1).flatten(0, 1)
        assert torch.equal(together, one["labels"])


def test_a_run_can_go_on_with_other_processes_and_another_batch_size(tmp_path, corpus):
    data = opened(tmp_path, *corpus, batch_size=4)
    for _ in range(5):
        next(data.train)
    state = data.train.state_dict()
    following = torch.cat([next(data.train)["input_ids"] for _ in range(2)])
    wider = opened(tmp_path, *corpus, batch_size=8, rank=1, world_size=2)
    wider.train.load_state_dict(state)
    assert torch.equal(next(wider.train)["input_ids"], following[1::2])


@pytest.mark.parametrize("change", [{"seed": 1}, {"seq_len": 32}, {"packing": "documents"}, {"val_fraction": 0.1}])
def test_a_state_of_other_data_is_refused(tmp_path, corpus, change):
    state = opened(tmp_path, *corpus).train.state_dict()
    with pytest.raises(
        ValueError, match=f"cannot be resumed from this state, which was saved with another .*{next(iter(change))}"
    ):
        opened(tmp_path, *corpus, **change).train.load_state_dict(state)
    with pytest.raises(ValueError, match="saved with another text"):
        opened(tmp_path, corpus[0].split(":")[0]).train.load_state_dict(state)


def test_the_order_follows_from_the_text_not_from_where_it_lies(tmp_path):
    data = opened(tmp_path, jsonl(tmp_path / "a.jsonl", 100))
    (tmp_path / "elsewhere").mkdir()
    moved = opened(tmp_path, (tmp_path / "a.jsonl").rename(tmp_path / "elsewhere/b.jsonl"))
    moved.train.load_state_dict(data.train.state_dict())
    assert same(next(moved.train), next(data.train))


def test_seeds_give_different_orders_and_the_same_validation(tmp_path, corpus):
    first, second = (opened(tmp_path, *corpus, seed=seed) for seed in range(2))
    assert not same(next(first.train), next(second.train))
    for _ in range(2):
        assert all(same(a, b) for a, b in zip(first.validation, second.validation, strict=True))


@pytest.mark.parametrize("choices", PACKINGS, ids=NAMES)
def test_validation_has_at_most_val_batches_of_the_full_shape(tmp_path, corpus, choices):
    for val_batches in (1, 3, 1000):
        data = opened(tmp_path, *corpus, val_batches=val_batches, val_fraction=0.1, batch_size=3, **choices)
        batches = list(data.validation)
        assert 1 <= len(batches) == len(data.validation) <= val_batches
        assert all(batch["input_ids"].shape == (3, 64) for batch in batches)
        assert all((batch["labels"] >= 0).any() for batch in batches)
    learned = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    assert learned >= 0.9 * data.report.splits["validation"] and len(batches) < 1000


def test_rows_that_carry_on_are_one_text_from_batch_to_batch(tmp_path):
    text = "".join(f"[{i}]" for i in range(20_000))
    (tmp_path / "a.txt").write_text(text)
    data = opened(tmp_path, tmp_path / "a.txt", carry_state=True, val_fraction=0.0)
    batches = [next(data.train) for _ in range(100)]
    assert not batches[0]["continues"].any() and all(batch["continues"].all() for batch in batches[1:])
    for b in range(4):
        lane = data.tokenizer.decode(torch.cat([batch["input_ids"][b] for batch in batches]).tolist())
        assert lane in text
    assert all((batch["labels"] == batch["input_ids"]).all() for batch in batches)


def test_carried_documents_start_afresh_and_never_share_a_row(tmp_path):
    corpus = jsonl(tmp_path / "a.jsonl", 300, chars=150)
    data = opened(tmp_path, corpus, carry_state=True, packing="documents")
    lanes = [""] * 4
    finished = []
    for _ in range(200):
        batch = next(data.train)
        for b in range(4):
            learned = batch["labels"][b][batch["labels"][b] >= 0]
            if not batch["continues"][b]:
                finished.append(lanes[b])
                lanes[b] = ""
            lanes[b] += data.tokenizer.decode(learned.tolist())
            assert len(re.findall(r"<0-\d+>", lanes[b])) == 1 and lanes[b].startswith("<0-")
    texts = {json.loads(line)["text"] for line in corpus.read_text().splitlines()}
    assert len(finished) > 100 and all(text in texts for text in finished if text)


def test_carried_sources_come_by_weight(tmp_path):
    for letter in "xy":
        (tmp_path / f"{letter}.jsonl").write_text((json.dumps({"text": letter * 90}) + "\n") * 120)
    sources = [f"{tmp_path}/x.jsonl:0.8", f"{tmp_path}/y.jsonl:0.2"]
    data = opened(tmp_path, *sources, carry_state=True, val_fraction=0.0)
    ids = torch.cat([next(data.train)["input_ids"] for _ in range(200)])
    share = (ids == ord("x")).sum() / ((ids == ord("x")).sum() + (ids == ord("y")).sum())
    assert share.item() == pytest.approx(0.8, abs=0.02)


def test_the_thread_ends_with_its_batches(tmp_path, corpus):
    others = set(threading.enumerate())  # of tests before this one
    data = opened(tmp_path, *corpus, prefetch=2)
    next(data.train)
    assert any(thread.name == "mnemos-data" for thread in set(threading.enumerate()) - others)
    del data
    deadline = time.monotonic() + 60
    while any(thread.name == "mnemos-data" for thread in set(threading.enumerate()) - others):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_can_end_while_batches_are_made(tmp_path):
    """A thread that comes back from torch into an interpreter that is gone takes the process down with SIGABRT."""
    script = tmp_path / "ends.py"
    script.write_text(
        "import torch\n"
        "from mnemos.data.batches import Batches\n"
        "class Plan:\n"
        "    def rows(self): return []\n"
        "    def state(self): return {}\n"
        "    def load(self, state): pass\n"
        "busy = lambda rows: {'input_ids': torch.rand(2_000_000).sort().values}\n"
        "batches = [Batches(Plan(), busy, {}, prefetch=9) for _ in range(2)]\n"
        "for one in batches: next(one)\n"
        "del one, batches[0]\n"  # one is collected before the end, one is not
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_error_in_the_thread_is_raised_where_the_batch_is_asked_for(tmp_path, corpus, monkeypatch):
    data = opened(tmp_path, *corpus, prefetch=2)
    good = next(data.train)
    state = data.train.state_dict()
    data.train.close()
    monkeypatch.setattr(type(data.stores[0]), "read", lambda *a: (_ for _ in ()).throw(OSError("the disk is gone")))
    with pytest.raises(OSError, match="the disk is gone"):
        next(data.train)
    monkeypatch.undo()
    assert data.train.state_dict() == state and not same(next(data.train), good)


def test_batches_have_the_types_a_model_takes(tmp_path, corpus):
    batch = next(opened(tmp_path, *corpus, packing="documents").train)
    assert {name: (x.dtype, tuple(x.shape)) for name, x in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (torch.int64, (4, 64))
    )
    carried = next(opened(tmp_path, *corpus, carry_state=True).train)
    assert carried["continues"].dtype == torch.bool and carried["continues"].shape == (4,)
    assert set(carried) == {"input_ids", "labels", "continues"}
