"""Requests of strangers: keys, hosts, sizes, leaving clients, and bodies, headers and names of all kinds."""

from __future__ import annotations

import http.client
import json
import os
import random
import resource
import socket
import threading

import httpx
import pytest

from mnemos.serve import Keys
from mnemos.serve.guard import POLICY
from serving import ANN, KEYS, nothing_computed, sse, wait_for

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0}


def raw(running, request: bytes, seconds: float = 20) -> bytes:
    """The answer to the bytes of a request; what follows them is never sent."""
    port = running.listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(request)
        found = b""
        while b"\r\n\r\n" not in found:
            part = connection.recv(65536)
            if not part:
                break
            found += part
        return found


def status(answer: bytes) -> int:
    return int(answer.split(None, 2)[1])


def test_a_body_over_the_limit_is_refused_before_it_is_read(serve_with):
    running = serve_with(max_body_bytes=1000)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    assert status(raw(running, head + b"Content-Length: 1001\r\n\r\n")) == 413
    assert status(raw(running, head + b"Content-Length: 99999999999999999999999999\r\n\r\n")) in (400, 413)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    assert status(raw(running, chunked + b"5dc\r\n" + b"x" * 1500 + b"\r\n")) == 413  # more would follow
    with running.client() as client:
        assert client.post(CHAT, json=HELLO).status_code == 200
        answer = client.post(CHAT, json=HELLO | {"user": "x" * 1000})
        assert answer.status_code == 413 and "1,000 bytes" in answer.json()["error"]["message"]


def test_a_body_that_does_not_arrive_is_given_up(serve_with):
    running = serve_with(body_seconds=0.3)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n"
    assert status(raw(running, head.encode() + b"{")) == 408


def test_web_pages_of_others_reach_nothing(server):
    body = json.dumps(HELLO).encode()
    with server.client() as client:
        own = client.post(CHAT, json=HELLO, headers={"Origin": server.url})
        assert own.status_code == 200
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "evil.example:8000"}):
            answer = client.post(CHAT, json=HELLO, headers=headers)
            assert answer.status_code == 403, headers
        plain = client.post(CHAT, content=body, headers={"Content-Type": "text/plain"})
        assert plain.status_code == 415  # a form of another site could send it without asking
        assert "access-control-allow-origin" not in own.headers


def test_every_answer_has_the_policy_of_the_page(server):
    with server.client() as client:
        for path in ("/", "/health", "/none", "/v1/sessions", "/page/none.js"):
            headers = client.get(path).headers
            assert headers["content-security-policy"] == POLICY and headers["x-content-type-options"] == "nosniff"
        assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
        for path in ("/page/..%2Fapp.py", "/page/%2e%2e/app.py", "/page/__init__.py", "/page//etc/passwd", "/page/"):
            assert client.get(path).status_code == 404, path


def test_small_answers_do_not_wait_for_acknowledgements(server):
    """Nagle's algorithm holds the body back until the client acknowledges the head: 40 ms with every answer and token."""
    with server.client() as client:
        client.get("/health")
        connections = [one.transport.get_extra_info("socket") for one in server.server.server_state.connections]
        assert connections and all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in connections)


def test_keys_are_read_from_a_private_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# users\nann key-of-ann-0123456789\nkey-without-a-name-0123 # a comment\n")
    file.chmod(0o600)
    keys = Keys.load(file)
    assert keys.owner("Bearer key-of-ann-0123456789") == "ann" and keys.owner("bearer key-of-ann-0123456789") == "ann"
    assert keys.owner("Bearer key-without-a-name-0123").startswith("key-")
    for header in (
        None,
        "",
        "Bearer",
        "Bearer ",
        "key-of-ann-0123456789",
        "Basic key-of-ann-0123456789",
        "Bearer é\udcff",
    ):
        assert keys.owner(header) is None
    for text in ("", "ann short", "a b c-0123456789abcdefgh", "bad/name key-of-ann-0123456789", "k" * 300):
        file.write_text(text)
        with pytest.raises(ValueError, match="keys"):
            Keys.load(file)
    if os.name == "posix":
        file.chmod(0o604)
        with pytest.raises(ValueError, match="chmod 600"):
            Keys.load(file)


def test_limits_are_answered_by_429_and_400(serve_with):
    running = serve_with(max_batch=1, max_waiting=0, max_choices=1, max_tokens=5000, max_prompt_tokens=50)
    with running.client() as client:
        body = HELLO | {"max_tokens": 5000, "stream": True}
        with client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()  # kept: a stream is closed with its iterator
            next(lines)
            with nothing_computed(running.service):
                busy = client.post(CHAT, json=HELLO)
            assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
        wait_for(lambda: client.post(CHAT, json=HELLO).status_code != 429)
        for wrong in ({"max_tokens": 5001}, {"n": 2}, {"messages": [{"role": "user", "content": "x" * 51}]}):
            assert client.post(CHAT, json=HELLO | wrong).status_code == 400, wrong
        assert (
            client.post(
                CHAT, json=HELLO | {"session": "a", "messages": [{"role": "user", "content": "x" * 51}]}
            ).status_code
            == 400
        )
        assert client.get("/v1/sessions").json()["data"] == []


def test_a_session_answers_one_request_at_a_time(serve_with):
    running = serve_with()
    with running.client() as client:
        body = HELLO | {"max_tokens": 4000, "stream": True, "session": "ann"}
        with client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()  # kept: a stream is closed with its iterator
            next(lines)
            with nothing_computed(running.service):
                busy = client.post(CHAT, json=HELLO | {"session": "ann"})
                assert busy.status_code == 409 and busy.json()["error"]["code"] == "session_busy"
                assert client.delete("/v1/sessions/ann").status_code == 409
            assert client.post(CHAT, json=HELLO | {"session": "bob"}).status_code == 200


def test_a_client_that_leaves_a_stream_frees_its_place_and_keeps_the_part(serve_with):
    running = serve_with()
    engine = running.service.engine
    with running.client() as client:
        body = HELLO | {"max_tokens": 4096, "stream": True, "session": "ann"}
        with client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()
            while '"content":""' in (line := next(lines)) or not line:
                pass
        wait_for(lambda: engine.open_jobs == 0 and not engine.rows)
        wait_for(lambda: not running.service.claims.taken)
        turns = client.get("/v1/sessions/ann").json()["messages"]
        assert len(turns) == 2 and 0 < len(turns[1]["content"]) < 4096
        tokens = running.service.metrics.value("mnemos_tokens_total", kind="generated")
        assert tokens < 4096 and running.service.metrics.value("mnemos_cancelled_total") == 1
        answer = client.post(CHAT, json=HELLO | {"session": "ann"}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 5 + tokens - 1


def test_a_client_that_leaves_before_its_whole_answer_undoes_the_turn(serve_with):
    running = serve_with()
    with running.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=HELLO | {"max_tokens": 4096, "session": "ann"}, timeout=0.3)
    wait_for(lambda: running.service.engine.open_jobs == 0 and not running.service.claims.taken)
    assert not running.service.store.exists("ann")


def test_shutting_down_finishes_answers_and_refuses_new_ones(serve_with):
    running = serve_with()
    with running.client() as client:
        found = {}
        body = HELLO | {"max_tokens": 300, "stream": True, "session": "ann"}
        thread = threading.Thread(target=lambda: found.update(text=client.post(CHAT, json=body).text))
        with nothing_computed(running.service):
            thread.start()
            wait_for(lambda: running.service.engine.open_jobs == 1)
            running.service.is_draining = True
            refused = client.post(CHAT, json=HELLO)
            assert refused.status_code == 503 and client.get("/health").status_code == 503
        thread.join(120)
        assert found["text"].endswith("[DONE]\n\n") and sse(found["text"])[-1]["usage"]["completion_tokens"] == 300


NAMES = (
    "a" * 129,
    "..",
    ".a",
    "a/b",
    "a%2Fb",
    "%00",
    "é",
    "𝕏",
    "a b",
    "a\nb",
    "resp_x",
    "%ff%fe",
    "a" * 5000,
    "-",
    "con",
    "~root",
)
VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**400, 1e308, 0.5, "", "x", "a/../b", "\ud800", "\x00", "ann",
    "𝕏" * 50, [], [[]], {}, {"a": {}}, ["x"] * 100, [None], [1, 2], "NaN", "1", [{"role": "user", "content": "hi"}],
    [{"role": "tool", "content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}], {"type": "text"},
)  # fmt: skip
FIELDS = (
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "stream", "session",
    "memory", "logprobs", "top_logprobs", "stream_options", "prompt", "echo", "input", "instructions", "previous_response_id", "store",
    "tools", "response_format", "user", "metadata", "title", "id", "__proto__", "x" * 300,
)  # fmt: skip
PATHS = (CHAT, "/v1/completions", "/v1/responses")
SEEDS = {
    CHAT: HELLO,
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}


def mutated(choose: random.Random) -> tuple[str, str, dict[str, str], bytes]:
    """A method, a path, headers and a body that somebody might send."""
    headers = {"Content-Type": "application/json"}
    roll = choose.random()
    if roll < 0.6:
        path = choose.choice(PATHS)
        value = dict(SEEDS[path])
        for _ in range(choose.randrange(1, 4)):
            value[choose.choice(FIELDS)] = choose.choice(VALUES)
        if choose.random() < 0.1:
            value.pop(choose.choice(list(value)))
        value = {name: x for name, x in value.items() if name != "store"} | ({"store": False} if "resp" in path else {})
        body = json.dumps(value).encode()
        kind = choose.random()
        if kind < 0.15:
            spoiled = bytearray(body)
            for _ in range(choose.randrange(1, 6)):
                spoiled[choose.randrange(len(spoiled))] = choose.randrange(256)
            body = bytes(spoiled)
        elif kind < 0.2:
            body = body[: choose.randrange(len(body))]
        elif kind < 0.23:
            body = b"[" * choose.randrange(1, 200_000)
        elif kind < 0.25:
            body = b'{"messages":' + b'{"a":' * 50_000
        return "POST", path, headers, body
    name = choose.choice(NAMES)
    if roll < 0.8:
        word = choose.choice(("", "/fork", "/undo", "/export", "/trace", "/none"))
        body = json.dumps({choose.choice(("id", "title", "x")): choose.choice(VALUES)}).encode()
        return choose.choice(("GET", "POST", "PATCH", "DELETE", "PUT")), f"/v1/sessions/{name}{word}", headers, body
    if roll < 0.9:
        return "POST", f"/v1/sessions/import?id={name}", {}, choose.randbytes(choose.randrange(0, 3000))
    headers |= {
        choose.choice(
            ("Content-Type", "Authorization", "Accept", "Content-Encoding", "Expect", "X-Other", "Range")
        ): choose.choice(
            (
                "",
                "x",
                "application/json; charset=utf-7",
                "gzip",
                "Bearer " + "x" * 5000,
                "bytes=0-",
                "100-continue",
                "é",
            )
        )
    }
    return (
        choose.choice(("GET", "POST", "HEAD", "OPTIONS", "BREW")),
        choose.choice((*PATHS, "/", "/page/x", "/metrics", "//", "/v1")),
        headers,
        b"{}",
    )


def send_mutated(running, count: int, seed: int) -> None:
    choose = random.Random(seed)
    port = running.listener.getsockname()[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seen: dict[int, int] = {}
    for i in range(count):
        method, path, headers, body = mutated(choose)
        try:
            connection.putrequest(
                method, "".join(c if 32 < ord(c) < 127 else "%3F" for c in path), skip_accept_encoding=True
            )
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                connection.putheader(name, value.encode("latin-1"))
            connection.endheaders(body)
            answer = connection.getresponse()
            text = answer.read()
        except (http.client.HTTPException, ConnectionError):  # the server may close a connection after a refusal
            connection.close()
            continue
        seen[answer.status] = seen.get(answer.status, 0) + 1
        assert answer.status < 500 or answer.status == 507, (seed, i, method, path, headers, body[:500], text[:300])
        if answer.status >= 400 and method != "HEAD" and answer.getheader("content-type") == "application/json":
            message = json.loads(text)["error"]["message"]
            assert 0 < len(message) <= 400 and "\n" not in message and str(running.service.store.folder) not in message
    assert sum(seen.values()) > 0.9 * count and seen[400] > count / 10 and seen[200] > count / 100, seen
    connection.close()


def test_a_thousand_mutated_requests_are_answered_in_one_sentence(serve_with):
    running = serve_with(max_batch=4, max_tokens=8)
    send_mutated(running, 1000, seed=1)
    assert running.service.engine.is_healthy and running.service.engine.open_jobs == 0
    assert running.say("hello").status_code == 200


@pytest.mark.slow
def test_a_hundred_thousand_mutated_requests_leave_no_memory(serve_with):
    running = serve_with(max_batch=4, max_tokens=8, warm_bytes=1_000_000)
    sizes = []
    for seed in range(10):
        send_mutated(running, 10_000, seed)
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    assert running.service.engine.open_jobs == 0 and not running.service.claims.taken
    print("megabytes after each 10,000 requests:", sizes)
    assert sizes[-1] - sizes[2] < 100, sizes


def test_contents_are_logged_only_if_asked_for(serve_with):
    running = serve_with(keys=KEYS)

    def written() -> list[dict]:
        return [json.loads(line) for line in running.service.log.file.getvalue().splitlines()]

    def wait_for_requests(count: int) -> None:  # a line is written when the client has its answer already
        wait_for(lambda: sum(line["event"] == "request" for line in written()) == count)

    with running.client(headers=ANN) as client:
        running.say("my secret", "diary", client)
        client.get("/v1/sessions/diary")
        wait_for_requests(2)
        running.service.log.contents = True
        client.get("/v1/sessions/diary")
        wait_for_requests(3)
    lines = written()
    assert "diary" not in json.dumps(lines[:-1]) and lines[-1]["path"] == "/v1/sessions/diary"
    assert all(
        {"time", "event", "route", "status", "ms"} <= line.keys() for line in lines if line["event"] == "request"
    )
