"""Nothing acknowledged is lost: processes are killed at random moments, and disks and quotas are full."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from mnemos.sessions import SessionStore, read_info
from mnemos.sessions.record import read_turns
from serving import Running, Zygote, make_service, sse, wait_for

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Client(threading.Thread):
    """One client with sessions of its own: turns, forks, deletes and exports, until the server is gone.

    said: the texts of acknowledged turns by session. doubtful: operations without an answer: they may have happened or not.
    """

    def __init__(self, number: int, said: dict[str, list[str]]):
        super().__init__(daemon=True)
        self.random, self.number = random.Random(number), number
        self.said, self.doubtful = said, {}
        self.url, self.count, self.acknowledged = "", len(said), 0

    def run(self) -> None:
        with contextlib.suppress(httpx.TransportError), httpx.Client(base_url=self.url, timeout=60) as client:
            while True:
                self.one(client)
                self.acknowledged += 1

    def one(self, client: httpx.Client) -> None:
        names = sorted(self.said)
        roll, name = self.random.random(), self.random.choice(names) if names else None
        if name is None or roll < 0.7:
            if name is None or roll < 0.1:
                self.count += 1
                name = f"s{self.number}-{self.count}-{self.random.randrange(10**6)}"
            self.turn(client, name)
        elif roll < 0.8:
            new = f"f{self.number}-{self.random.randrange(10**9)}"
            self.doubtful[new] = None
            if client.post(f"/v1/sessions/{name}/fork", json={"id": new}).status_code == 201:
                self.said[new] = list(self.said[name])
            del self.doubtful[new]
        elif roll < 0.85:
            before = self.said.pop(name)
            self.doubtful[name] = before
            assert client.delete(f"/v1/sessions/{name}").status_code == 200
            del self.doubtful[name]
        else:
            assert client.get(f"/v1/sessions/{name}/export").status_code == 200

    def turn(self, client: httpx.Client, name: str) -> None:
        text = f"fact {self.random.randrange(10**9)} of {name}. "
        body = {
            "session": name,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.random.randrange(1, 6),
        }
        self.doubtful[name] = [*self.said.get(name, []), text]
        if self.random.random() < 0.5:
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
        else:
            answer = client.post("/v1/chat/completions", json=body | {"stream": True})
            assert "error" not in sse(answer.text)[-1], answer.text
            if not answer.text.endswith("data: [DONE]\n\n"):
                return
        self.said.setdefault(name, []).append(text)
        del self.doubtful[name]


def check(folder, clients: list[Client]) -> None:
    """Every acknowledged turn is in the store, and nothing else but what was on its way."""
    found = {}
    for path in folder.rglob("*.safetensors"):
        name = path.name.removesuffix(".safetensors")
        found[name] = [turn["content"] for turn in read_turns(path) if turn["role"] == "user"]
        assert len(read_turns(path)) == 2 * len(found[name]) == read_info(path).turns
    for client in clients:
        for name, texts in client.said.items():
            allowed = [texts] + ([client.doubtful[name]] if client.doubtful.get(name) else [])
            assert found.get(name) in allowed, (name, texts, found.get(name), client.doubtful)
        for name in client.doubtful:
            if name in found and name not in client.said:
                before = client.doubtful[name]
                assert before is None or found[name] == before, name
        for name in [*client.said, *client.doubtful]:
            if name in found:
                client.said[name] = found[name]
            client.doubtful.pop(name, None)
        gone = [name for name in client.said if name not in found]
        assert not gone
    known = {name for client in clients for name in client.said}
    assert set(found) == known, set(found) ^ known


@pytest.fixture(scope="module")
def zygote():
    process = Zygote()
    yield process
    process.close()


def kill_often(zygote: Zygote, folder, kills: int) -> None:
    choose = random.Random(1)
    clients = [Client(i, {}) for i in range(3)]
    turns = 0
    for _ in range(kills):
        pid, url = zygote.fork(folder)
        for client in clients:
            client.url = url
            client.start()
        target, deadline = choose.randrange(2, 9), time.monotonic() + 30
        while sum(client.acknowledged for client in clients) < target and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(choose.uniform(0, 0.02))
        zygote.kill(pid)
        for client in clients:
            client.join(60)
            assert not client.is_alive()
        zygote.wait(pid)
        check(folder, clients)
        turns = sum(len(texts) for client in clients for texts in client.said.values())
        clients = [Client(client.number + 10, client.said) for client in clients]
    pid, url = zygote.fork(folder)  # the last restart removes what kills have left
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    with httpx.Client(base_url=url, timeout=60) as client:
        for other in clients:
            for name in sorted(other.said)[:3]:
                other.turn(client, name)
                assert client.get(f"/v1/sessions/{name}").json()["turns"] == 2 * len(other.said[name])
    zygote.kill(pid, signal.SIGTERM)
    zygote.wait(pid)
    left = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith((".safetensors", ".lock"))]
    assert not left and turns >= kills / 2


@needs_fork
def test_no_acknowledged_turn_is_lost_by_five_kills(zygote, tmp_path):
    kill_often(zygote, tmp_path / "store", 5)


@needs_fork
@pytest.mark.slow
def test_no_acknowledged_turn_is_lost_by_a_hundred_kills(zygote, tmp_path):
    kill_often(zygote, tmp_path / "store", 100)


def test_the_last_event_of_a_stream_comes_after_the_file_is_renamed(serve_with, monkeypatch):
    running = serve_with()
    store, order = running.service.store, []
    save = store.replace

    def replace(record, version):
        order.append("saving")
        time.sleep(0.2)
        found = save(record, version)
        order.append("saved")
        return found

    monkeypatch.setattr(store, "replace", replace)
    body = {"session": "ann", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    with running.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if '"finish_reason":"length"' in line:
                order.append("acknowledged")
                assert store.exists("ann")
    assert order == ["saving", "saved", "acknowledged"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_refuses_new_turns_and_keeps_old_ones(serve_with, monkeypatch, stream):
    running = serve_with()
    running.say("hello", "ann")
    before = running.service.store.version("ann")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    answer = running.say("why", "ann", stream=stream)
    if stream:
        assert sse(answer.text)[-1]["error"]["type"] == "storage_full_error" and "[DONE]" not in answer.text
    else:
        assert answer.status_code == 507 and answer.json()["error"]["code"] == "storage_full"
    monkeypatch.undo()
    assert running.service.store.version("ann") == before
    assert not list(running.service.store.folder.rglob("*.part"))
    after = running.say("why", "ann").json()
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 8  # the refused turn left nothing behind
    assert running.service.metrics.value("mnemos_save_errors_total") == 1


def test_a_disk_that_is_nearly_full_is_noticed_before_the_answer(serve_with, monkeypatch):
    running = serve_with()
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("mnemos.sessions.store.shutil.disk_usage", lambda folder: usage)
    answer = running.say("hello", "ann")
    assert answer.status_code == 507 and "too little" in answer.json()["error"]["message"]
    assert running.say("hello").status_code == 200  # nothing to store


def test_quotas_are_answered_by_507(tmp_path):
    store = SessionStore(tmp_path / "store", max_sessions=2, max_bytes=10_000_000)
    with Running(make_service(None, store=store)) as running:
        assert [running.say("hello", name).status_code for name in ("a", "b", "c")] == [200, 200, 507]
        assert running.say("why", "a").status_code == 200  # old ones go on
        with running.client() as client:
            assert client.post("/v1/sessions/a/fork").status_code == 507
            assert client.get("/v1/info").json()["quota"] == {"sessions": 2, "bytes": 10_000_000}
            client.delete("/v1/sessions/b")
            assert client.post("/v1/sessions/a/fork").status_code == 201


def test_expired_sessions_are_deleted(tmp_path):
    with Running(make_service(None, store=SessionStore(tmp_path / "store", ttl=900))) as running:
        running.say("hello", "ann")
        found = running.client().get("/v1/sessions/ann").json()
        assert found["expires"] == pytest.approx(found["updated"] + 900, abs=1)
    store = SessionStore(tmp_path / "store", ttl=0.1)
    with Running(make_service(None, store=store)) as running, running.client() as client:
        wait_for(lambda: not store.exists("ann"))
        assert client.get("/v1/sessions/ann").status_code == 404
        assert running.say("hello", "ann").json()["session"]["tokens_read"] == 8  # begins again


def test_idle_sessions_cost_disk_only(serve_with):
    running = serve_with(warm_bytes=400_000)
    with running.client() as client:
        for i in range(12):
            running.say("hello", f"s{i}", client)
        warm = running.service.warm
        assert 0 < warm.size <= 400_000 and 0 < len(warm) < 12
        assert len(client.get("/v1/sessions").json()["data"]) == 12
        for i in range(12):
            assert running.say("why", f"s{i}", client).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


def resident(pid: int) -> float:
    """Megabytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def started_and_used(zygote: Zygote, folder, names: list[str]) -> tuple[float, list[float], int]:
    """Seconds until a new server answers; its memory then, and after a list and a turn of each session; and the number of sessions."""
    began = time.monotonic()
    pid, url = zygote.fork(folder)
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/health").json() == {"status": "ok"}
        seconds, sizes = time.monotonic() - began, [resident(pid)]
        count = len(client.get("/v1/sessions").json()["data"])
        for name in names:
            body = {"session": name, "messages": [{"role": "user", "content": "why"}], "max_tokens": 2}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        sizes.append(resident(pid))
    zygote.kill(pid)
    zygote.wait(pid)
    return seconds, sizes, count


@needs_fork
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_ten_thousand_idle_sessions_cost_disk_only(zygote, tmp_path, monkeypatch):
    names = [f"s{i}" for i in range(50)]
    for folder in ("few", "many"):
        store = SessionStore(tmp_path / folder)
        with Running(make_service(None, store=store)) as running:
            running.say("hello", "s0")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # this process does not crash
    for i in range(1, 10_000):
        store.fork("s0", f"s{i}", "")
    monkeypatch.undo()
    few, many = (started_and_used(zygote, tmp_path / folder, names) for folder in ("few", "many"))
    print("seconds to start, megabytes at start and after use, sessions:", few, many)
    assert many[2] == 10_000
    assert many[0] < few[0] + 1
    assert many[1][0] < few[1][0] + 5 and many[1][1] < few[1][1] + 60  # a list of all of them is made, and sent


@needs_fork
def test_two_processes_behind_a_balancer_share_a_store(zygote, tmp_path):
    """Sessions stay with one process, until the balancer moves all of them to the other one, which goes on with them."""
    folder = tmp_path / "store"
    servers = [zygote.fork(folder), zygote.fork(folder)]
    with httpx.Client(timeout=60) as client:

        def turn(name: str, text: str, shift: int) -> dict:
            url = servers[(int(name[1:]) + shift) % 2][1]  # affinity by the name
            body = {"session": name, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
            return client.post(f"{url}/v1/chat/completions", json=body | {"temperature": 0}).json()

        names = [f"s{i}" for i in range(6)]
        first = {name: [turn(name, text, 0) for text in ("hello", f"{name}. ")] for name in names}
        last = {name: turn(name, "why", 1) for name in names}
        listed = [client.get(f"{url}/v1/sessions").json()["data"] for _, url in servers]
    assert listed[0] == listed[1] and [entry["turns"] for entry in listed[0]] == [6] * 6
    with Running(make_service(tmp_path / "alone")) as alone:
        for name in names:
            expected = [alone.say(text, name).json() for text in ("hello", f"{name}. ", "why")]
            assert [x["choices"] for x in expected] == [x["choices"] for x in (*first[name], last[name])]
            assert last[name]["usage"] == expected[-1]["usage"]
    for pid, _ in servers:
        zygote.kill(pid, signal.SIGTERM)
        zygote.wait(pid)


def test_a_session_that_another_server_has_continued_is_read_again(tmp_path):
    with Running(make_service(tmp_path)) as one, Running(make_service(tmp_path)) as two:
        assert one.say("hello", "ann").json()["session"]["tokens_read"] == 8
        assert two.say("why", "ann").json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
        third = one.say("on", "ann").json()  # its warm state is old, so the file is read
        assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == 8 + 4 + 3
        assert read_info(one.service.store.path("ann")).turns == 6
        alone = make_service(tmp_path / "alone")
        with Running(alone) as single:
            texts = [single.say(text, "ann").json() for text in ("hello", "why", "on")]
        assert texts[-1]["choices"] == third["choices"]


def test_a_turn_that_another_process_overtook_is_refused(tmp_path, monkeypatch):
    with Running(make_service(tmp_path)) as one, Running(make_service(tmp_path)) as two:
        one.say("hello", "ann")
        close = one.service._close

        def late(answer):
            assert two.say("why", "ann").status_code == 200
            close(answer)

        monkeypatch.setattr(one.service, "_close", late)
        answer = one.say("on", "ann")
        monkeypatch.undo()
        assert answer.status_code == 409 and "another process" in answer.json()["error"]["message"]
        assert one.say("on", "ann").json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 15


def test_a_damaged_file_is_named_in_one_sentence(serve_with):
    running = serve_with()
    running.say("hello", "ann")
    path = running.service.store.path("ann")
    running.service.warm.drop("", "ann")
    path.write_bytes(path.read_bytes()[:-1000])
    answer = running.say("why", "ann")
    assert answer.status_code == 409 and str(path.parent) not in answer.text
    with running.client() as client:
        assert client.get("/v1/sessions").json()["data"] == []
        assert client.get("/v1/sessions/ann").status_code in (400, 409)
        assert client.delete("/v1/sessions/ann").status_code == 200
