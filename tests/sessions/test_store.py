"""The folder of sessions: owners apart, quotas, leftovers, and nothing deleted that is not a session."""

from __future__ import annotations

import errno
import os
import time

import pytest
from session_models import open_model

from mnemos.sessions import Session, SessionRecord, SessionStore, StoreFull


@pytest.fixture(scope="module")
def model_and_tokenizer():
    return open_model("deltanet")


def begun(opened, store: SessionStore, name: str = "ann", owner: str = "") -> Session:
    session = Session(*opened, store, name, owner=owner)
    session.tell("The key is under the mat. ")
    session.save()
    return session


def test_sessions_are_listed_forked_renamed_and_deleted(model_and_tokenizer, tmp_path):
    model, _ = model_and_tokenizer
    store = SessionStore(tmp_path / "store")
    begun(model_and_tokenizer, store)
    store.fork("ann", "bob")
    store.rename("bob", "eve")
    store.retitle("eve", "about keys")
    assert [(info.name, info.tokens_read) for info in store.list()] == [("ann", 26), ("eve", 26)]
    assert store.load("eve", model).title == "about keys" and "eve" in store and "bob" not in store
    with pytest.raises(FileExistsError, match="exists already"):
        store.fork("ann", "eve")
    with pytest.raises(FileExistsError, match="exists already"):
        store.rename("ann", "eve")
    store.delete("ann")
    assert [info.name for info in store.list()] == ["eve"]
    for call in (lambda: store.load("ann", model), lambda: store.delete("ann"), lambda: store.fork("ann", "x")):
        with pytest.raises(FileNotFoundError, match="no session 'ann'"):
            call()


def test_owners_do_not_see_each_other(model_and_tokenizer, tmp_path):
    model, _ = model_and_tokenizer
    store = SessionStore(tmp_path)
    begun(model_and_tokenizer, store, owner="one")
    assert store.list("two") == [] and not store.exists("ann", "two")
    with pytest.raises(FileNotFoundError):
        store.load("ann", model, "two")
    begun(model_and_tokenizer, store, owner="two")
    store.delete("ann", "one")
    assert store.exists("ann", "two") and not store.exists("ann", "one")
    os.makedirs(store.path("x", "three").parent)
    os.rename(store.path("ann", "two"), store.path("ann", "three"))
    with pytest.raises(ValueError, match="another name or owner"):
        store.load("ann", model, "three")


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".lock", "é", "a\0b", ""])
def test_no_method_takes_a_name_that_leaves_the_folder(name, model_and_tokenizer, tmp_path):
    model, _ = model_and_tokenizer
    store = SessionStore(tmp_path)
    begun(model_and_tokenizer, store)
    for call in (
        lambda: store.load(name, model),
        lambda: store.delete(name),
        lambda: store.fork("ann", name),
        lambda: store.rename("ann", name),
        lambda: store.exists(name),
        lambda: store.export(name, tmp_path / "x"),
        lambda: store.save(SessionRecord(name)),
    ):
        with pytest.raises(ValueError, match="is not a valid name"):
            call()
    assert [info.name for info in store.list()] == ["ann"]


def test_an_exported_session_is_imported_without_its_owner(model_and_tokenizer, tmp_path):
    model, tokenizer = model_and_tokenizer
    store, other = SessionStore(tmp_path / "a"), SessionStore(tmp_path / "b")
    session = begun(model_and_tokenizer, store, owner="key-1")
    store.export("ann", tmp_path / "out.safetensors", "key-1")
    assert SessionRecord.load(tmp_path / "out.safetensors", model).owner == ""
    assert b"key-1" not in (tmp_path / "out.safetensors").read_bytes()
    assert other.import_(tmp_path / "out.safetensors", model, owner="key-2") == "ann"
    restored = Session.load(model, tokenizer, other, "ann", owner="key-2")
    assert restored.ask("Where?", max_new_tokens=6) == session.ask("Where?", max_new_tokens=6)
    with pytest.raises(FileExistsError):
        other.import_(tmp_path / "out.safetensors", model, owner="key-2")
    (tmp_path / "out.safetensors").write_bytes(b"no session")
    with pytest.raises(ValueError, match="not a readable session"):
        other.import_(tmp_path / "out.safetensors", model, "x")


def test_quotas_refuse_new_sessions_and_keep_old_ones(model_and_tokenizer, tmp_path):
    store = SessionStore(tmp_path, max_sessions=2)
    session = begun(model_and_tokenizer, store)
    store.fork("ann", "bob")
    with pytest.raises(StoreFull, match="2 sessions, which is the quota"):
        store.fork("ann", "eve")
    session.tell("more")
    session.save()  # replaces its own file
    store.save(SessionRecord("ann", owner="other"))  # each owner has a quota
    count, size = store.usage()
    assert count == 2
    tight = SessionStore(tmp_path, max_bytes=size - 1000)
    before = store.path("ann").read_bytes()
    session.store = tight
    with pytest.raises(StoreFull, match="the quota is"):
        session.save()
    assert store.path("ann").read_bytes() == before


def test_a_full_disk_is_a_typed_error_and_keeps_the_old_file(model_and_tokenizer, tmp_path, monkeypatch):
    store = SessionStore(tmp_path)
    session = begun(model_and_tokenizer, store)
    before = store.path("ann").read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreFull, match="the disk is full"):
            session.save()
    assert store.path("ann").read_bytes() == before
    assert sorted(p.name for p in store.path("ann").parent.iterdir()) in (
        ["ann.safetensors"],
        [".lock", "ann.safetensors"],
    )


def test_leftover_temporary_files_of_the_store_are_removed_at_start_and_nothing_else(model_and_tokenizer, tmp_path):
    store = SessionStore(tmp_path)
    begun(model_and_tokenizer, store)
    home = store.path("ann").parent
    ours = home / ".ann.safetensors.0123456789abcdef.part"
    others = [
        home / "notes.txt",
        home / ".notes.0123456789abcdef.part",
        tmp_path / ".a.safetensors.0123456789abcdef.part",
    ]
    others += [tmp_path / "readme"]
    for path in (ours, *others):
        path.write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ours.name).write_text("x")
    SessionStore(tmp_path)
    assert not ours.exists() and all(path.exists() for path in others) and (tmp_path / "folder" / ours.name).exists()


def test_a_sweep_deletes_old_sessions_alone(model_and_tokenizer, tmp_path):
    store = SessionStore(tmp_path, ttl=3600)
    begun(model_and_tokenizer, store)
    store.save(SessionRecord("old", updated=time.time() - 7200))
    store.save(SessionRecord("older", owner="x", updated=time.time() - 9000))
    foreign = store.path("foreign")
    foreign.write_bytes(b"not a session")
    os.utime(foreign, (0, 0))
    assert sorted(store.sweep()) == ["old", "older"]
    assert [info.name for info in store.list()] == ["ann"] and foreign.exists()
    assert SessionStore(tmp_path).sweep(now=1e12) == []


def test_links_are_neither_read_nor_deleted(model_and_tokenizer, tmp_path):
    model, _ = model_and_tokenizer
    store = SessionStore(tmp_path / "store")
    begun(model_and_tokenizer, store)
    outside = tmp_path / "outside.safetensors"
    os.rename(store.path("ann"), outside)
    os.symlink(outside, store.path("ann"))
    assert store.list() == [] and not store.exists("ann")
    with pytest.raises(FileNotFoundError):
        store.delete("ann")
    with pytest.raises(FileNotFoundError):
        store.load("ann", model)
    assert outside.exists()


def test_damaged_files_are_left_out_of_the_list_with_a_sentence(model_and_tokenizer, tmp_path):
    store = SessionStore(tmp_path)
    begun(model_and_tokenizer, store)
    store.path("bad").write_bytes(b"\0" * 100)
    said: list[str] = []
    assert [info.name for info in store.list(skipped=said.append)] == ["ann"]
    assert len(said) == 1 and "not a readable session" in said[0]
