"""Conversations: each token read once, exact undo and fork, and a restored session that continues as the warm one."""

from __future__ import annotations

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
        for speak in (lambda: session.tell(FIRST), lambda: session.ask("Where?", max_new_tokens=5 + turn)):  # noqa: B023
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
