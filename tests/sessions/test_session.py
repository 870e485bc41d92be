"""Conversations: each token read once, exact undo and fork, and a restored session that continues as the warm one."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from session_models import MODELS, continued, open_model

from mnemos.sessions import Session, SessionRecord, SessionStore

FIRST = "The key is under the mat. "


def tensors(session: Session) -> dict[str, torch.Tensor]:
    """Every tensor of the state, by name."""
    cache = session.record.cache
    if cache is None:
        return {}
    found = cache.file_contents()[0] if hasattr(cache, "file_contents") else cache.tensors()
    return {name: x.clone() for name, x in found.items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def begun(kind: str, store: SessionStore) -> Session:
    session = Session(*open_model(kind), store, "ann")
    session.tell(FIRST)
    session.ask("Where is it?", max_new_tokens=7)
    session.save()
    return session


@pytest.fixture(scope="module")
def continuations(tmp_path_factory) -> tuple[Path, dict[str, Session], dict[str, str]]:
    """A warm session with every model, and the answers of another process that continued it from its file."""
    folder = tmp_path_factory.mktemp("stores")
    torch.use_deterministic_algorithms(True, warn_only=True)
    warm = {kind: begun(kind, SessionStore(folder / kind)) for kind in MODELS}
    command = [sys.executable, str(Path(__file__).parent / "session_models.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, warm, dict(zip(MODELS, done.stdout.splitlines()))


@pytest.mark.parametrize("kind", MODELS)
def test_a_session_restored_in_a_new_process_continues_bit_by_bit_as_the_warm_one(kind, continuations):
    folder, sessions, answers = continuations
    warm = sessions[kind]
    assert continued(warm) == answers[kind]
    warm.record.name = "warm"
    warm.save()
    left, right = (load_file(SessionStore(folder / kind).path(name)) for name in ("warm", "restored"))
    left.pop("turns"), right.pop("turns")  # their times differ
    assert equal(left, right)


@pytest.mark.parametrize("kind", MODELS)
def test_every_token_is_counted_and_read_exactly_once(kind):
    model, tokenizer = open_model(kind, torch.float64)
    session = Session(model, tokenizer)
    conversation: list[int] = []
    for turn in range(3):
        ask = functools.partial(session.ask, "Where?", max_new_tokens=5 + turn)
        for speak in (lambda: session.tell(FIRST), ask, ask):
            pending = list(session.pending)
            speak()
            assert session.last_turn is not None
            tokens = session.last_turn[1]
            assert tokens[: len(pending)] == pending
            conversation += tokens[len(pending) :]
    assert conversation[-1:] == session.pending
    read = conversation[:-1]
    assert session.tokens_read == len(read)
    assert sum(turn["tokens"] for turn in session.turns) == session.tokens_read + len(session.pending)
    once = Session.from_record(
        model, tokenizer, SessionRecord("x", cache=model.state(torch.tensor([read])), tokens_read=len(read))
    )
    left, right = tensors(session), tensors(once)
    assert left.keys() == right.keys()
    for name, x in left.items():
        torch.testing.assert_close(x, right[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_undo_restores_the_state_before_the_last_turn_exactly(kind):
    session = Session(*open_model(kind))
    session.tell(FIRST)
    session.ask("Where?", max_new_tokens=4)
    before, turns, pending = tensors(session), list(session.turns), list(session.pending)
    answer = session.ask("Why?", max_new_tokens=6)
    assert not equal(before, tensors(session))
    session.undo()
    assert equal(before, tensors(session)) and session.turns == turns and session.pending == pending
    assert session.ask("Why?", max_new_tokens=6) == answer
    for _ in range(3):
        session.undo()
    assert session.tokens_read == 0 and session.turns == [] and session.record.cache is None
    with pytest.raises(ValueError, match="no turn to undo"):
        session.undo()


@pytest.mark.parametrize("kind", MODELS)
def test_a_turn_of_one_token_does_not_change_the_state_before_it(kind):
    """A model may advance a cache in place by one token; the state that undo and read return to is never changed."""
    session = Session(*open_model(kind))
    session.tell(FIRST)
    before = tensors(session)
    session.tell("y")
    session.undo()
    assert equal(before, tensors(session))
    session.memory = "read"
    session.ask("y", max_new_tokens=3)
    assert equal(before, tensors(session))


def test_undo_keeps_a_bounded_number_of_states():
    session = Session(*open_model("deltanet"), undo_depth=2)
    for _ in range(4):
        session.tell(FIRST)
    session.undo()
    session.undo()
    with pytest.raises(ValueError, match="no turn to undo"):
        session.undo()
    assert session.tokens_read == 2 * len(FIRST)


def test_a_reset_session_is_empty_and_can_be_undone():
    session = Session(*open_model("titans-mag"))
    session.tell(FIRST)
    before = tensors(session)
    session.reset()
    assert session.tokens_read == 0 and session.turns == [] and session.state_bytes == 0
    session.undo()
    assert equal(before, tensors(session)) and len(session.turns) == 1


@pytest.mark.parametrize("kind", ["titans-mag", "attached", "attached-window"])
def test_a_fork_continues_without_its_origin(kind, tmp_path):
    session = Session(*open_model(kind), SessionStore(tmp_path), "ann")
    session.tell(FIRST)
    session.save()
    before, turns = tensors(session), len(session.turns)
    forked = session.fork("bob")
    first = forked.ask("Where?", max_new_tokens=5)
    forked.save()
    assert equal(before, tensors(session)) and len(session.turns) == turns
    assert session.ask("Where?", max_new_tokens=5) == first and equal(tensors(session), tensors(forked))
    with pytest.raises(ValueError, match="has a session 'bob' already"):
        session.fork("bob")


@pytest.mark.parametrize("kind", ["titans-mag", "attached", "attached-window"])
def test_memory_read_answers_from_the_state_and_leaves_it_as_it_was(kind):
    session = Session(*open_model(kind))
    session.tell(FIRST)
    session.ask("Where?", max_new_tokens=3)
    before, turns, pending = tensors(session), list(session.turns), list(session.pending)
    session.memory = "read"
    answer = session.ask("Why?", max_new_tokens=6)
    assert equal(before, tensors(session)) and session.turns == turns and session.pending == pending
    with pytest.raises(ValueError, match="nothing can be stored"):
        session.tell(FIRST)
    session.memory = "write"
    assert session.ask("Why?", max_new_tokens=6) == answer


def test_memory_off_answers_as_a_new_session():
    model, tokenizer = open_model("titans-mag")
    session = Session(model, tokenizer)
    session.tell(FIRST)
    session.ask("Where?", max_new_tokens=3)
    before = tensors(session)
    session.memory = "off"
    assert session.ask("Why?", max_new_tokens=8) == Session(model, tokenizer).ask("Why?", max_new_tokens=8)
    assert equal(before, tensors(session))
    with pytest.raises(ValueError, match="choose one of write, read, off"):
        session.memory = "on"


def test_a_stream_that_is_closed_early_ends_the_answer_there():
    model, tokenizer = open_model("titans-mag")
    session, whole = Session(model, tokenizer), Session(model, tokenizer)
    pieces = session.stream("Where is the key?", max_new_tokens=50)
    said = [next(pieces), next(pieces)]
    with pytest.raises(ValueError, match="being streamed"):
        session.tell("more")
    pieces.close()
    generated = session.turns[-1]["tokens"]
    assert session.turns[-1]["content"] == "".join(said) and generated < 50
    whole.ask("Where is the key?", max_new_tokens=generated)
    assert equal(tensors(session), tensors(whole)) and session.pending == whole.pending


def test_an_error_in_the_middle_of_an_answer_undoes_the_turn(monkeypatch):
    session = Session(*open_model("titans-mag"))
    session.tell(FIRST)
    before, turns = tensors(session), list(session.turns)
    calls, read = [], Session._read

    def fails(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Session, "_read", fails)
    with pytest.raises(KeyboardInterrupt):
        session.ask("Where?", max_new_tokens=20)
    assert equal(before, tensors(session)) and session.turns == turns and session.pending == []


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it():
    model, tokenizer = open_model("attached")
    whole = Session(model, tokenizer).ask("Where?", max_new_tokens=20)
    stop = whole[3:5]
    session = Session(model, tokenizer)
    assert session.ask("Where?", max_new_tokens=20, stop=stop) == whole[:3] == whole[: whole.index(stop)]
    assert session.turns[-1]["content"] == whole[:3] and session.turns[-1]["tokens"] < 20


def test_a_long_text_is_read_in_pieces(monkeypatch):
    model, tokenizer = open_model("titans-mag", torch.float64)
    whole, pieces = Session(model, tokenizer), Session(model, tokenizer)
    whole.tell(FIRST * 5)
    monkeypatch.setattr("mnemos.sessions.session.PIECE", 16)
    pieces.tell(FIRST * 5)
    assert pieces.tokens_read == whole.tokens_read
    for name, x in tensors(whole).items():
        torch.testing.assert_close(x, tensors(pieces)[name], rtol=1e-9, atol=1e-11)


def test_a_session_is_not_begun_over_a_saved_one(tmp_path):
    model, tokenizer = open_model("deltanet")
    session = Session(model, tokenizer, SessionStore(tmp_path), "ann")
    session.tell(FIRST)
    session.save()
    with pytest.raises(ValueError, match=r"open it by Session\.load"):
        Session(model, tokenizer, SessionStore(tmp_path), "ann")
    with pytest.raises(ValueError, match="has no store"):
        Session(model, tokenizer).save()
    with pytest.raises(ValueError, match="training mode"):
        Session(open_model("deltanet")[0].train(), tokenizer)
    with pytest.raises(ValueError, match="has no token"):
        session.tell("")
