"""Errors of the server: one sentence for the client, one line of log for the operator."""

from __future__ import annotations

import errno
import json
import time

import pytest

JSON = {"Content-Type": "application/json"}


def logged(running, count: int) -> list[str]:
    """The kinds of errors in the log, which is written after the answer."""
    deadline, found = time.monotonic() + 10, []
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
