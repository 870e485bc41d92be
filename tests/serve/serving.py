"""Servers for tests: in this process, and as processes of their own that are forked from one with everything imported."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import torch

sys.path.append(str(Path(__file__).parent.parent / "sessions"))
from session_models import open_model

from mnemos.serve import Keys, Limits, Log, Service
from mnemos.sessions import SessionStore

KEYS = {"key-of-ann-0123456789": "ann", "key-of-bob-0123456789": "bob", "key-of-metrics-0123": "metrics"}
ANN, BOB, OPERATOR = ({"Authorization": f"Bearer {key}"} for key in KEYS)


opened = functools.cache(open_model)  # one model for all servers of a process


def make_service(
    folder, kind: str = "titans-mag", *, keys: dict[str, str] | None = None, store=None, **limits
) -> Service:
    """A service with a tiny model."""
    model, tokenizer = opened(kind)
    store = SessionStore(folder) if store is None else store
    service = Service(
        model,
        tokenizer,
        store,
        name="tiny",
        limits=Limits(**limits),
        keys=Keys(keys or {}),
        log=Log(io.StringIO()),
    )
    service.dialogue.ends = frozenset()  # a model with random weights ends its answers anywhere
    return service


class Running:
    """A server in a thread of this process."""

    def __init__(self, service: Service):
        import uvicorn

        from mnemos.serve.app import create_app
        from mnemos.serve.run import _listen, make_config

        self.service = service
        self.listener = _listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        app = create_app(service, is_local=not service.keys)
        self.server = uvicorn.Server(make_config(app, service.limits.grace_seconds))
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self.listener])), daemon=True)

    def __enter__(self) -> Running:
        self.thread.start()
        deadline = time.monotonic() + 120
        while not self.server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.server.started
        return self

    def __exit__(self, *_) -> None:
        self.server.should_exit = True
        self.thread.join(120)
        self.listener.close()
        assert not self.thread.is_alive()

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def say(
        self, text: str, session: str | None = None, client: httpx.Client | None = None, **fields
    ) -> httpx.Response:
        """One request of chat."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0} | fields
        body |= {} if session is None else {"session": session}
        with contextlib.ExitStack() as stack:
            client = client or stack.enter_context(self.client())
            return client.post("/v1/chat/completions", json=body)


def sse(text: str) -> list[dict]:
    """The JSON events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@contextlib.contextmanager
def nothing_computed(service):
    """The engine of a service computes nothing meanwhile: what runs is still running at the end."""
    rest = threading.Event()
    service.engine.call(lambda: rest.wait(120))
    try:
        yield
    finally:
        rest.set()


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Zygote:
    """A process with everything imported, from which servers are forked: a new server takes milliseconds."""

    def __init__(self):
        program = [sys.executable, str(Path(__file__).with_name("zygote.py"))]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None and self.process.stdin is not None

    def fork(self, folder: Path) -> tuple[int, str]:
        """A new server of a store: its process id and its address."""
        self.process.stdin.write(f"fork {folder}\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        url = self.process.stdout.readline().split()[-1]
        return pid, url.rstrip("/")

    @staticmethod
    def kill(pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def wait(self, pid: int) -> None:
        """Wait until a server has ended."""
        self.process.stdin.write(f"wait {pid}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def close(self) -> None:
        self.process.kill()  # its servers end with it
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()


torch.set_num_threads(1)
