"""The server's HTTP interface with canned answers: sessions in a dict, streaming with a pause between words, failures on demand."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
STATE_BYTES = 1_900_000
MAGIC = b"fake session\n"


@dataclass
class Fake:
    """What the server holds and how it behaves.

    pause: seconds between words. failures: (method, path pattern, status, sentence), each used once. answer: the answer to every message,
    or None for the canned ones. breaks_after, holds_after: words after which a stream breaks off, or waits for `released`.
    prefix: path under which a proxy would serve the page.
    """

    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)
    pause: float = 0.0
    failures: list[tuple[str, str, int, str]] = field(default_factory=list)
    answer: str | None = None
    breaks_after: int | None = None
    holds_after: int | None = None
    released: threading.Event = field(default_factory=threading.Event)
    key: str | None = None
    has_memory: bool = True
    import_bytes: int = 5_000_000
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    undone: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    last_turn: dict[str, tuple[str, str]] = field(default_factory=dict)
    grows: int = 0
    url: str = ""
    prefix: str = ""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def add(self, name: str, title: str = "", messages: tuple[tuple[str, str], ...] = (), age: float = 0.0) -> None:
        found = [{"role": role, "content": content} for role, content in messages]
        read = sum(tokens(m["content"]) for m in found)
        now = time.time() - age
        self.sessions[name] = {
            "id": name,
            "object": "session",
            "title": title,
            "created": now - 50,
            "updated": now,
            "tokens_read": read,
            "state_bytes": STATE_BYTES,
            "expires": None,
            "messages": found,
        }

    def view(self, name: str, full: bool = False) -> dict[str, Any]:
        found = copy.deepcopy(self.sessions[name]) | {"turns": len(self.sessions[name]["messages"])}
        messages = found.pop("messages")
        return found | {"messages": messages, "memory": "write"} if full else found

    def posted(self, path: str) -> list[Any]:
        """Bodies of the POST requests to a path so far."""
        return [body for method, where, body in self.requests if method == "POST" and where == path]


def tokens(text: str) -> int:
    return len(pieces(text))


def pieces(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+$", text)


def canned(text: str, remembered: str) -> str:
    if "play" in text and "?" in text:
        return "Clara plays the drum." if "drum" in remembered else "I do not know what Clara plays."
    return f"I have read {tokens(text)} words, and keep them."


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def log_message(self, format: str, *args: Any) -> None:
        """No log."""

    def do_GET(self) -> None:
        self.handle_one()

    do_POST = do_PATCH = do_DELETE = do_GET

    def handle_one(self) -> None:
        url = urlsplit(self.path.removeprefix(self.fake.prefix))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_json = "json" in (self.headers.get("Content-Type") or "")
        value = json.loads(body) if is_json else body
        with self.fake.lock:
            self.fake.requests.append((self.command, url.path, value))
            for i, (method, pattern, status, sentence) in enumerate(self.fake.failures):
                if method == self.command and re.fullmatch(pattern, url.path):
                    del self.fake.failures[i]
                    return self.problem(status, sentence)
        if self.command == "GET" and (url.path == "/" or url.path.startswith("/page/")):
            return self.static("index.html" if url.path == "/" else url.path.removeprefix("/page/"))
        if self.fake.key and self.headers.get("Authorization") != f"Bearer {self.fake.key}":
            return self.problem(401, "This server needs an API key: send it as a bearer token.")
        if url.path == "/v1/chat/completions":
            return self.complete(value)
        with self.fake.lock:
            return self.rest(url.path, value, parse_qs(url.query))

    def static(self, name: str) -> None:
        path = resources.files("mnemos.serve.page") / name
        if "/" in name or not path.is_file() or name.endswith(".py"):
            return self.problem(404, "There is no such file.")
        self.reply(path.read_bytes(), TYPES[name.rpartition(".")[2]])

    def rest(self, path: str, value: Any, query: dict[str, list[str]]) -> None:
        fake, sessions = self.fake, self.fake.sessions
        if path == "/v1/info":
            return self.give(
                {
                    "version": "0.2.0",
                    "model": "titans-mag-nano",
                    "parameters": 1_234_567,
                    "context": {"window": 64},
                    "has_memory": fake.has_memory,
                    "limits": {
                        "max_tokens": 1024,
                        "body_bytes": 1_000_000,
                        "import_bytes": fake.import_bytes,
                        "prompt_tokens": 100_000,
                    },
                    "quota": {"sessions": 100, "bytes": 1_000_000_000},
                    "needs_key": fake.key is not None,
                }
            )
        if path == "/v1/sessions":
            newest = sorted(sessions, key=lambda name: -sessions[name]["updated"])
            return self.give({"object": "list", "data": [fake.view(name) for name in newest]})
        if path == "/v1/sessions/import":
            return self.take(query["id"][0], value)
        name, _, action = path.removeprefix("/v1/sessions/").partition("/")
        name = unquote(name)
        if name not in sessions:
            return self.problem(404, f"There is no session {name!r}.")
        return getattr(self, f"on_{self.command.lower()}_{action or 'session'}")(name, value)

    def on_get_session(self, name: str, value: Any) -> None:
        self.give(self.fake.view(name, full=True))

    def on_patch_session(self, name: str, value: Any) -> None:
        self.fake.sessions[name]["title"] = value["title"]
        self.give(self.fake.view(name))

    def on_delete_session(self, name: str, value: Any) -> None:
        del self.fake.sessions[name]
        self.give({"id": name, "object": "session.deleted", "deleted": True})

    def on_post_fork(self, name: str, value: Any) -> None:
        other = value.get("id") or f"{name}-fork-{len(self.fake.sessions)}"
        now = time.time()
        self.fake.sessions[other] = copy.deepcopy(self.fake.sessions[name]) | {
            "id": other,
            "created": now,
            "updated": now,
        }
        self.give(self.fake.view(other), 201)

    def on_post_undo(self, name: str, value: Any) -> None:
        if not self.fake.undone.get(name):
            return self.problem(409, "There is no turn to undo: only turns since the server opened the session can be.")
        self.fake.sessions[name] = self.fake.undone[name].pop()
        self.fake.last_turn.pop(name, None)
        self.give(self.fake.view(name))

    def on_get_export(self, name: str, value: Any) -> None:
        self.reply(MAGIC + json.dumps(self.fake.sessions[name]).encode(), "application/octet-stream", attachment=True)

    def on_get_trace(self, name: str, value: Any) -> None:
        if name not in self.fake.last_turn:
            return self.problem(409, "there is no turn to inspect since the server opened the session")
        said, answered = self.fake.last_turn[name]
        found = [("user", text) for text in pieces(said)] + [("assistant", text) for text in pieces(answered)]
        surprise = [1.0 + (len(text) * 37 % 50) / 10 for _, text in found]
        found[-1:] = [found[-1], ("assistant", "")]  # the token that ends an answer has no text
        surprise.append(1.0)
        trace = {
            "tokens": [{"id": i, "text": text, "role": role} for i, (role, text) in enumerate(found)],
            "series": {"surprise": surprise, "lr": [0.1 + 0.01 * (i % 9) for i in range(len(found))]},
            "resembled": [
                [{"index": j, "weight": 0.5 / (1 + i - j)} for j in range(max(0, i - 3), i)] for i in range(len(found))
            ],
        }
        trace["series"]["retain"] = [0.99 - 0.001 * (i % 7) for i in range(len(found))]
        if not self.fake.has_memory:
            trace |= {"series": {}, "resembled": None}
        self.give(trace)

    def take(self, name: str, body: bytes) -> None:
        if not NAME.fullmatch(name):
            return self.problem(400, f"session {name!r} is not a valid name.")
        if name in self.fake.sessions:
            return self.problem(409, f"There is a session {name!r} already: choose another name.")
        if not body.startswith(MAGIC):
            return self.problem(400, "The file is not a session: export one from a Mnemos server.")
        self.fake.sessions[name] = json.loads(body.removeprefix(MAGIC)) | {"id": name, "updated": time.time()}
        self.give(self.fake.view(name), 201)

    def complete(self, value: dict[str, Any]) -> None:
        fake, name, mode = self.fake, value.get("session"), value.get("memory", "write")
        text = value["messages"][-1]["content"]
        if name is None and "memory" in value:
            return self.problem(400, "memory needs a session: give one, or leave memory out")
        with fake.lock:
            if name and name not in fake.sessions and mode == "write":
                fake.add(name)
            session = fake.sessions.get(name) if name else None
            known = "" if mode == "off" or session is None else json.dumps(session["messages"])
        answer = fake.answer if fake.answer is not None else canned(text, known)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        said: list[str] = []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
            for piece in pieces(answer):
                if fake.breaks_after is not None and len(said) >= fake.breaks_after:
                    return
                if len(said) == fake.holds_after:
                    fake.released.wait(30)
                time.sleep(fake.pause)
                self.event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
                said.append(piece)
            self.keep(name, mode, text, "".join(said))
            self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            usage = {
                "prompt_tokens": tokens(text),
                "completion_tokens": len(said),
                "total_tokens": tokens(text) + len(said),
            }
            about = None
            if session is not None:
                about = {
                    "id": name,
                    "tokens_read": session["tokens_read"],
                    "state_bytes": session["state_bytes"],
                    "cached": None,
                }
            self.event(
                {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 0}}, "session": about}
            )
            self.wfile.write(b"data: [DONE]\n\n")
            return
        self.keep(name, mode, text, "".join(said))  # the client closed the connection: the turn ends there

    def keep(self, name: str | None, mode: str, said: str, answered: str) -> None:
        fake = self.fake
        with fake.lock:
            if not name or name not in fake.sessions:
                return
            fake.last_turn[name] = said, answered
            if mode != "write":
                return
            session = fake.sessions[name]
            fake.undone.setdefault(name, []).append(copy.deepcopy(session))
            session["messages"] += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
            session["title"] = session["title"] or " ".join(said.split())[:80]
            session["tokens_read"] += tokens(said) + tokens(answered)
            session["state_bytes"] += fake.grows
            session["updated"] = time.time()

    def event(self, value: Any) -> None:
        self.wfile.write(f"data: {json.dumps({'object': 'chat.completion.chunk', **value})}\n\n".encode())
        self.wfile.flush()

    def give(self, value: Any, status: int = 200) -> None:
        self.reply(json.dumps(value).encode(), "application/json", status)

    def problem(self, status: int, sentence: str) -> None:
        self.give({"error": {"message": sentence, "type": "invalid_request_error", "code": None}}, status)

    def reply(self, body: bytes, kind: str, status: int = 200, attachment: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind if kind == "application/octet-stream" else f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        if attachment:
            self.send_header("Content-Disposition", 'attachment; filename="session.safetensors"')
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body)


@contextlib.contextmanager
def serving(fake: Fake):
    """Serve on a free port of the loopback interface; gives the address."""
    handler = type("Bound", (Handler,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
