"""Session files: what is written is read, and anything else is refused in one sentence."""

from __future__ import annotations

import json
import os
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from session_models import open_model

from mnemos.sessions import Session, SessionRecord, check_name, model_hash, read_info

NAMES = [
    "",
    ".",
    "..",
    ".a",
    "a/b",
    "../a",
    "a\\b",
    "a b",
    "é",
    "a\n",
    "a\0",
    "x" * 129,
    "ａ",
    "a:b",
    "~",
    None,
    3,
    b"a",
]


@pytest.fixture(scope="module", params=["titans-mag", "attached-window"])
def saved(request, tmp_path_factory):
    """A model, and the bytes of a session with it."""
    model, tokenizer = open_model(request.param)
    session = Session(model, tokenizer, name="ann", title="keys")
    session.tell("The key is under the mat. ")
    session.ask("Where?", max_new_tokens=5)
    path = tmp_path_factory.mktemp("record") / "ann.safetensors"
    session.save(path)
    return model, path, session


def header_of(path) -> dict[str, str]:
    with safe_open(str(path), framework="pt") as file:
        return file.metadata()


def test_a_record_is_read_as_it_was_written(saved):
    model, path, session = saved
    record = SessionRecord.load(path, model)
    for name in ("name", "title", "turns", "pending", "tokens_read", "model_hash", "owner", "created", "updated"):
        assert getattr(record, name) == getattr(session.record, name), name
    assert record.state_bytes == session.state_bytes
    info = read_info(path)
    assert (info.turns, info.pending, info.file_bytes) == (3, 1, path.stat().st_size)
    assert path.stat().st_size <= record.file_bytes <= path.stat().st_size + 8000
    assert os.listdir(path.parent) == ["ann.safetensors"]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_names_that_are_not_one_plain_path_component_are_refused(name):
    with pytest.raises(ValueError, match="is not a valid name"):
        check_name(name)
    with pytest.raises(ValueError, match="is not a valid name"):
        SessionRecord(name).check()


def test_the_hash_depends_on_weights_and_config_and_survives_saving(tmp_path):
    model, _ = open_model("deltanet")
    first = model_hash(model)
    model.save_pretrained(tmp_path)
    assert model_hash(type(model).from_pretrained(tmp_path)) == first == model_hash(open_model("deltanet")[0])
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-6
    assert model_hash(model) != first
    other, _ = open_model("deltanet")
    other.config.rms_norm_eps *= 2
    assert model_hash(other) != first


def test_a_session_of_another_model_is_refused(saved, tmp_path):
    model, path, _ = saved
    for kind in ("deltanet", "titans-mag", "attached"):
        other, _ = open_model(kind)
        if model_hash(other) != model_hash(model):
            with pytest.raises(ValueError, match="belongs to another model"):
                SessionRecord.load(path, other)


def changed_fields(path, target, **changes) -> None:
    header = header_of(path)
    fields = json.loads(header["session"]) | changes
    save_file(load_file(path), target, header | {"session": json.dumps(fields)})


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../x"},
        {"name": 5},
        {"title": "x" * 201},
        {"title": None},
        {"title": "\ud800"},
        {"tokens_read": -1},
        {"tokens_read": 31},
        {"tokens_read": 2**60},
        {"tokens_read": True},
        {"tokens_read": 1.0},
        {"pending": [10**6]},
        {"pending": [-1]},
        {"pending": ["a"]},
        {"pending": {}},
        {"pending": [True]},
        {"turns": 4},
        {"turns": "3"},
        {"owner": 7},
        {"owner": "x" * 257},
        {"created": float("nan")},
        {"created": float("inf")},
        {"updated": -1},
        {"updated": "now"},
        {"model_hash": "abc"},
        {"model_hash": ""},
        {"model_hash": "0" * 64},
        {"more": 1},
    ],
    ids=str,
)
def test_a_header_with_a_wrong_field_is_refused_in_a_sentence(saved, tmp_path, changes):
    model, path, _ = saved
    target = tmp_path / "x.safetensors"
    changed_fields(path, target, **changes)
    with pytest.raises(ValueError) as refused:
        SessionRecord.load(target, model)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "turns",
    [
        b"[" * 100_000,
        b"{}",
        b"null",
        b"\xff\xfe",
        b'[{"role": "user"}]',
        b"[1, 2, 3]",
        json.dumps([{"role": "root", "content": "", "tokens": 0, "created": 0}] * 3).encode(),
        json.dumps([{"role": "user", "content": 3, "tokens": 0, "created": 0}] * 3).encode(),
        json.dumps([{"role": "user", "content": "", "tokens": -1, "created": 0}] * 3).encode(),
        json.dumps([{"role": [], "content": "", "tokens": 0, "created": 0}] * 3).encode(),
    ],
    ids=lambda turns: repr(turns[:40]),
)
def test_turns_that_are_no_messages_are_refused_in_a_sentence(saved, tmp_path, turns):
    model, path, _ = saved
    tensors = load_file(path) | {"turns": torch.frombuffer(bytearray(turns), dtype=torch.uint8)}
    save_file(tensors, tmp_path / "x.safetensors", header_of(path))
    with pytest.raises(ValueError):
        SessionRecord.load(tmp_path / "x.safetensors", model)


@pytest.mark.parametrize("change", ["drop", "shape", "nan", "dtype", "foreign", "no cache", "rows"])
def test_tensors_that_do_not_fit_the_model_are_refused_in_a_sentence(saved, tmp_path, change):
    model, path, _ = saved
    header, tensors = header_of(path), load_file(path)
    name = sorted(key for key, x in tensors.items() if x.is_floating_point() and x.numel() > 4)[0]
    if change == "drop":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name].flatten().clone()
    elif change == "nan":
        tensors[name].view(-1)[0] = float("nan")
    elif change == "dtype":
        tensors[name] = tensors[name].long()
    elif change == "foreign":
        tensors["other"] = torch.zeros(2)
    elif change == "no cache":
        header["cache"] = "{}"
    else:
        tensors = {key: x if key == "turns" else torch.cat([x, x]) for key, x in tensors.items()}
    save_file(tensors, tmp_path / "x.safetensors", header)
    with pytest.raises(ValueError):
        SessionRecord.load(tmp_path / "x.safetensors", model)


def test_hundreds_of_mutated_files_are_read_or_refused_with_a_value_error(saved, tmp_path):
    """Bits flipped, bytes cut off, doubled and overwritten, in the header twice as often as in the tensors."""
    model, path, _ = saved
    whole, rng, target = path.read_bytes(), random.Random(3), tmp_path / "x.safetensors"
    head = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for i in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            at = rng.randrange(min(head, len(data)) if i % 3 else len(data))
            kind = rng.randrange(5)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at] = rng.choice(b'0123456789{}[]",:x\0\xff')
            elif kind == 2:
                del data[at : at + rng.randrange(1, 20)]
            elif kind == 3:
                data[at:at] = data[at : at + rng.randrange(1, 20)]
            else:
                del data[max(at, 1) :]
        target.write_bytes(data)
        for read in (lambda: SessionRecord.load(target, model), lambda: read_info(target)):
            try:
                read()
            except ValueError as wrong:
                refused += 1
                assert "\n" not in str(wrong) and len(str(wrong)) < 1000
    assert refused > 400


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(saved, tmp_path, monkeypatch):
    _, _, session = saved
    path = tmp_path / "ann.safetensors"
    session.save(path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        session.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["ann.safetensors"]


def test_file_and_folder_are_synced_before_a_save_returns(saved, tmp_path, monkeypatch):
    _, _, session = saved
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}")))
    session.save(tmp_path / "ann.safetensors")
    assert synced[0].endswith(".part") and synced[1:] == [str(tmp_path.resolve())]
