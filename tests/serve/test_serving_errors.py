"""Errors of the server: one sentence for the client, one line of log for the operator."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from mnemos.serve import session_routes
from mnemos.sessions import SessionStore
from serving import Running, make_service, sse, wait_for

JSON = {"Content-Type": "application/json"}


def logged(running, count: int) -> list[str]:
    """The kinds of errors in the log, which is written after the answer."""
    deadline, found = time.monotonic() + 60, []
    while len(found) < count and time.monotonic() < deadline:
        lines = [json.loads(line) for line in running.service.log.file.getvalue().splitlines()]
        found = [line["kind"] for line in lines if line["event"] == "error"]
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
@pytest.mark.parametrize("is_streamed", ["true", "false"])
def test_numbers_that_no_answer_can_hold_are_refused_before_the_turn(serve_with, number, is_streamed):
    running = serve_with()
    body = f'{{"input": "hi", "session": "ann", "stream": {is_streamed}, "metadata": {{"a": {number}}}}}'
    with running.client(headers=JSON) as client:
        answer = client.post("/v1/responses", content=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "metadata"
        assert client.get("/v1/sessions/ann").status_code == 404


def test_an_unexpected_error_is_one_sentence_and_one_line_of_log(serve_with, monkeypatch, capfd):
    running = serve_with()
    monkeypatch.setattr(running.service.metrics, "text", lambda: 1 / 0)
    with running.client() as client:
        answer = client.get("/metrics")
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert logged(running, 1) == ["ZeroDivisionError"]
    assert "Traceback" not in capfd.readouterr().err


def test_the_log_names_why_a_file_could_not_be_used(serve_with, monkeypatch):
    running = serve_with()

    def broken(*_):
        raise OSError(errno.EIO, "input/output error")

    running.say("one", "ann")
    with running.client() as client:
        with monkeypatch.context() as patched:
            patched.setattr(running.service.store, "replace", broken)
            assert running.say("two", "ann", client).status_code == 500
            patched.setattr(running.service.store, "turns", broken)
            assert client.get("/v1/sessions/ann").status_code == 500
        assert logged(running, 2) == ["OSError", "OSError"]
        assert client.get("/v1/sessions/ann").json()["messages"][0]["content"] == "one"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_import_that_the_disk_cannot_hold_is_answered_by_507(serve_with, monkeypatch):
    running = serve_with()
    running.say("one", "ann")
    with running.client() as client:
        contents = client.get("/v1/sessions/ann/export").content
        make = session_routes._nameless_file

        def tiny(folder):
            file = make(folder)
            full = os.open("/dev/full", os.O_RDWR)
            os.dup2(full, file.fileno())
            os.close(full)
            return file

        monkeypatch.setattr(session_routes, "_nameless_file", tiny)
        answer = client.post("/v1/sessions/import?id=bob", content=contents)
    assert answer.status_code == 507 and answer.json()["error"]["code"] == "storage_full"


def test_a_change_that_is_refused_changes_nothing(serve_with):
    running = serve_with()
    running.say("one", "ann")
    running.say("two", "bob")
    with running.client() as client:
        before = client.get("/v1/sessions/ann").json()
        assert client.patch("/v1/sessions/ann", json={"title": "new", "id": "bob"}).status_code == 409
        assert client.get("/v1/sessions/ann").json() == before
        assert client.patch("/v1/sessions/ann", json={"title": "new", "id": "eve"}).json()["title"] == "new"
        assert client.get("/v1/sessions/ann").status_code == 404
        assert client.post("/v1/sessions/eve/undo").status_code == 200  # still warm


def test_a_fork_of_a_response_is_listed_and_a_continued_response_has_its_own_time(serve_with):
    running = serve_with()
    with running.client() as client:
        first = client.post("/v1/responses", json={"input": "a", "max_output_tokens": 2}).json()
        fork = client.post(f"/v1/sessions/{first['id']}/fork").json()["id"]
        assert [session["id"] for session in client.get("/v1/sessions").json()["data"]] == [fork]
        assert running.say("go on", fork, client).status_code == 200
        time.sleep(1.1)
        body = {"input": "b", "max_output_tokens": 2, "previous_response_id": first["id"]}
        second = client.post("/v1/responses", json=body).json()
        stored = client.get(f"/v1/responses/{second['id']}").json()
        assert stored["created_at"] == second["created_at"] > first["created_at"]


def test_any_loopback_address_may_be_the_host(serve_with):
    with serve_with().client() as client:
        for host, status in (
            ("127.0.0.2:8000", 200),
            ("127.1.2.3", 200),
            ("127.0.0.1.evil.org", 403),
            ("128.0.0.1", 403),
        ):
            assert client.get("/health", headers={"Host": host}).status_code == status


def test_endless_headers_are_refused(serve_with):
    host, port = serve_with().listener.getsockname()
    with socket.create_connection((host, port), timeout=30) as client:
        client.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nX: ".encode() + 100_000 * b"a")
        assert client.recv(100).startswith(b"HTTP/1.1 400 ")


def test_offsets_of_streamed_tokens_are_those_of_the_whole_answer(serve_with):
    body = {"prompt": "hi", "max_tokens": 4, "logprobs": 1, "temperature": 0}
    with serve_with().client() as client:
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["text_offset"]
        events = sse(client.post("/v1/completions", json=body | {"stream": True}).text)
    parts = [event["choices"][0]["logprobs"] for event in events if event["choices"]]
    assert [offset for part in parts if part for offset in part["text_offset"]] == whole


def test_a_sweep_that_fails_is_tried_again(tmp_path, monkeypatch):
    store, calls = SessionStore(tmp_path, ttl=0.05), []

    def sweep():
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.EIO, "input/output error")
        return []

    monkeypatch.setattr(store, "sweep", sweep)
    with Running(make_service(tmp_path, store=store)) as running:
        wait_for(lambda: len(calls) >= 2)
        assert logged(running, 1) == ["OSError"]


@pytest.mark.parametrize("value", [1e38, 1e20])
def test_an_imported_state_that_overflows_is_a_conflict_and_no_fault_of_the_server(serve_with, value):
    running = serve_with()
    with running.client() as client:
        running.say("hello", "ann", client)
        file = client.get("/v1/sessions/ann/export").content
        size = int.from_bytes(file[:8], "little")
        header = json.loads(file[8 : 8 + size])["__metadata__"]
        tensors = {name: x.clone() for name, x in load(file).items()}
        statuses = set()
        for i, name in enumerate(name for name, x in tensors.items() if x.is_floating_point()):
            changed = tensors | {name: torch.full_like(tensors[name], value)}
            assert client.post(f"/v1/sessions/import?id=b{i}", content=save(changed, header)).status_code == 201
            answer = running.say("why", f"b{i}", client)
            statuses.add(answer.status_code)
            if answer.status_code == 409:
                assert answer.json()["error"]["code"] == "session_unusable"
        assert statuses == {200, 409}
        assert running.say("why", "ann", client).status_code == 200
