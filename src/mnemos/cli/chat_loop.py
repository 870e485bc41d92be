"""The loop of `mnemos chat`: lines are turns, lines that begin with / are commands."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from ..choices import unknown
from ..sessions import Session

MODES = {"on": "write", "read": "read", "off": "off"}
INSPECTED = 200  # tokens of a turn that /inspect prints, the last ones
PLAIN_HELP = "A line is a turn; the model answers it."
GAME_HELP = """A line is a fact (remember Alice is lamp) or a question (what is Alice?).
people: {people}
things: {things}"""


class ChatLoop:
    """Reads lines from standard input and answers them. options: those of `Sampling`. is_game: the model is that of the demo.

    arguments: of `mnemos chat` for the same model and store.
    """

    def __init__(self, session: Session, options: dict[str, Any], is_game: bool = False, arguments: Sequence[str] = ()):
        self.session, self.options, self.is_game, self.arguments = session, options, is_game, arguments
        self.is_saved = True  # nothing has changed since the last save
        self.commands: dict[str, tuple[str, Callable[[str], object]]] = {
            "/remember": ("TEXT: read a text without an answer", self.remember),
            "/forget": ("empty the memory and the conversation", self.forget),
            "/undo": ("restore the state before the last turn", self.undo),
            "/memory": (
                "on | read | off: keep what is read; answer without keeping; answer from an empty state",
                self.memory,
            ),
            "/inspect": (
                "[FILE.html]: surprise, lr and retain of the last turn's tokens; a page of the conversation",
                self.inspect,
            ),
            "/sessions": ("list the saved sessions", self.sessions),
            "/fork": ("NAME: copy this session and continue in the copy", self.fork),
            "/save": ("save now; every turn is saved in any case", self.save),
            "/help": ("this list", self.help),
            "/quit": ("save and leave, as Ctrl-D does; Ctrl-C ends an answer", self.quit),
        }
        self.is_done = False

    def run(self) -> None:
        """Until /quit or the end of the input."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 — line editing for input()
        while not self.is_done:
            try:
                line = input("> " if is_terminal else "")
            except EOFError:
                if is_terminal:
                    print()
                self.quit("")
                break
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /quit leaves)")
                continue
            try:
                self.line(line.strip())
            except (ValueError, FileNotFoundError) as wrong:
                print(f"! {wrong}", flush=True)
            except KeyboardInterrupt:
                print("\n(interrupted; the turn is undone)", flush=True)

    def line(self, line: str) -> None:
        """One line of the user."""
        word, _, rest = line.partition(" ")
        if line.startswith("/"):
            if word not in self.commands:
                raise unknown("command", word, self.commands)
            self.commands[word][1](rest.strip())
        elif line and self.is_game:
            self.play(line)
        elif line:
            self.answer(self._text(line))

    def _text(self, line: str) -> str:
        """A line as the model reads it: with its line break, if there is no chat template."""
        return line if self.is_game or self.session.dialogue.has_template else f"{line}\n"

    def answer(self, text: str, **options: Any) -> str:
        """Print the answer while it is generated; Ctrl-C ends it."""
        pieces = self.session.stream(text, **self.options | options)
        said = []
        with _interruptible() as interrupted:
            for piece in pieces:
                print(printable(piece), end="", flush=True)
                said.append(piece)
                if interrupted.is_set():
                    pieces.close()
                    print(" (interrupted)", end="")
                    break
        print(flush=True)
        self._autosave()
        return "".join(said)

    def play(self, line: str) -> None:
        """A fact, or a question and its answer of one word."""
        from ..demo.game import is_question, person_in

        if not is_question(line):
            self.remember(line)
            return
        facts = [turn["content"] for turn in self.session.turns if not is_question(turn["content"])]
        self.answer(line, max_new_tokens=1, temperature=0.0)
        person = person_in(line)
        if person is not None and not any(person.lower() in text.lower() for text in facts):
            print(f"(a guess: no line of this session mentions {person})")

    def remember(self, text: str) -> None:
        if self.session.memory != "write":
            raise ValueError("the memory is not written to: /memory on")
        before = self.session.tokens_read
        self.session.tell(self._text(text) if text else text)
        print(f"({self.session.tokens_read - before} tokens read)", flush=True)
        self._autosave()

    def forget(self, _: str) -> None:
        self.session.reset()
        self._autosave()
        print("(forgotten; /undo brings it back)")

    def undo(self, _: str) -> None:
        self.session.undo()
        self._autosave()
        print(f"(back at {self.session.tokens_read:,} tokens read)")

    def memory(self, mode: str) -> None:
        if mode not in MODES:
            raise unknown("mode", mode, MODES)
        self.session.memory = MODES[mode]  # ty: ignore[invalid-assignment]
        print(f"(memory {mode})")

    def inspect(self, target: str) -> None:
        from ..report.texts import token_texts
        from ..sessions.inspection import SERIES, inspect_turn
        from .tables import print_table

        ids, values = inspect_turn(self.session)
        if not values:
            raise ValueError("the model has no memory to look into")
        texts = [printable(repr(text)[1:-1]) for text in token_texts(self.session.dialogue, ids)]
        rows = [[text, *(f"{values[name][i]:.4g}" for name in SERIES)] for i, text in enumerate(texts)]
        if len(rows) > INSPECTED:
            print(f"(the last {INSPECTED} of {len(rows)} tokens)")
        print_table(["token", *SERIES], rows[-INSPECTED:], left=["token"])
        if target:
            self._page(Path(target).expanduser())

    def _page(self, target: Path) -> None:
        """The inspector's page of the whole conversation as one text."""
        from ..report.inspect import inspect, inspect_page
        from ..report.page import write_page

        text = "".join(turn["content"] for turn in self.session.turns)
        if self.is_game:
            raise ValueError("the page shows models of text, and the demo's model has none")
        seen = inspect(self.session.model, self.session.tokenizer, text, name=self.session.name)
        write_page(target, inspect_page([seen], f"mnemos chat: {self.session.name}"))
        print(f"page: {target}")

    def sessions(self, _: str) -> None:
        from .tables import print_table

        store = self.session.store
        assert store is not None
        rows = [
            (
                info.name,
                str(info.turns),
                f"{info.tokens_read:,}",
                size_text(info.file_bytes),
                _when(info.updated),
                printable(" ".join(info.title.split()))[:60],
            )
            for info in store.list(skipped=lambda why: print(f"! left out: {printable(why)}"))
        ]
        if not rows:
            print("(no saved session)")
            return
        print_table(["name", "turns", "tokens read", "file", "saved", "title"], rows, left=["name", "title", "saved"])

    def fork(self, name: str) -> None:
        forked = self.session.fork(name)
        forked.save()
        self.session = forked
        print(f"(this is now session {name}; the other stays as it is)")

    def save(self, _: str) -> None:
        self.session.save()
        self.is_saved = True
        print(f"(saved: {self.session.tokens_read:,} tokens read, state {size_text(self.session.state_bytes)})")

    def help(self, _: str) -> None:
        from ..demo.facts import PEOPLE, THINGS

        words = {"people": " ".join(PEOPLE), "things": " ".join(THINGS)}
        print(GAME_HELP.format(**words) if self.is_game else PLAIN_HELP)
        for name, (about, _function) in self.commands.items():
            print(f"  {name:<10} {about}")

    def quit(self, _: str) -> None:
        self.is_done = True
        if self.session.turns:
            if not self.is_saved:
                self.session.save()
            command = shlex.join(["mnemos", "chat", *self.arguments, "--session", self.session.name])
            print(f"saved; to continue: {command}")

    def _autosave(self) -> None:
        self.is_saved = False
        try:
            self.session.save()
            self.is_saved = True
        except OSError as full:
            print(f"! not saved: {full.strerror or full}", flush=True)


def printable(text: str) -> str:
    """A text without control characters, which could steer the terminal.

    >>> printable("a\\x1b[31mb\\n")
    'a�[31mb\\n'
    """
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def size_text(count: int) -> str:
    """Bytes in decimal units.

    >>> size_text(512), size_text(53792), size_text(1_900_000)
    ('512 B', '53.8 kB', '1.9 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def default_store() -> Path:
    """The folder of sessions: mnemos/sessions in $XDG_DATA_HOME, or in ~/.local/share."""
    root = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(root) / "mnemos" / "sessions"


def default_name() -> str:
    """The name of a new session: its time."""
    return time.strftime("chat-%Y%m%d-%H%M%S")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(min(seconds, 2**36)))


@contextlib.contextmanager
def _interruptible() -> Generator[threading.Event]:
    """An event that the first Ctrl-C sets; the second raises KeyboardInterrupt."""
    event = threading.Event()

    def handler(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread has handlers
        yield event
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
