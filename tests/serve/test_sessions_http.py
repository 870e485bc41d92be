"""Sessions over HTTP: created on first use, read, renamed, forked, undone, exported, imported, inspected, deleted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mnemos.serve.pace import Pace, Piece
from mnemos.sessions import Session
from serving import ANN, BOB, KEYS, OPERATOR, nothing_computed, sse, wait_for


def test_a_session_equals_the_same_conversation_in_python(server):
    texts = ["the key is under the mat. ", "where is it? ", "why"]
    answers = [server.say(text, "equal").json() for text in texts]
    service = server.service
    session = Session(service.model, service.tokenizer)
    session.dialogue.ends = frozenset()
    assert [a["choices"][0]["message"]["content"] for a in answers] == [
        session.ask(text, max_new_tokens=4) for text in texts
    ]
    saved = service.store.load("equal", service.model)
    assert saved.tokens_read == session.tokens_read == answers[-1]["session"]["tokens_read"]
    assert saved.pending == session.pending and saved.state_bytes == answers[-1]["session"]["state_bytes"]
    for saved_layer, layer in zip(saved.cache.layers, session.record.cache.layers):
        for name, state in layer.items():
            for key, x in state.tensors().items():
                assert torch.equal(saved_layer[name].tensors()[key], x), (name, key)


def test_a_session_read_from_disk_continues_bit_by_bit_as_a_warm_one(serve_with):
    states = []
    for is_warm in (True, False):
        running = serve_with()
        for text in ("hello", "and so on", "why"):
            running.say(text, "ann")
            if not is_warm:
                running.service.warm.drop("", "ann")
        states.append(running.service.store.load("ann", running.service.model).cache)
    for one, other in zip(states[0].layers, states[1].layers):
        for name in one:
            for key, x in one[name].tensors().items():
                assert torch.equal(other[name].tensors()[key], x), (name, key)


def test_every_route_of_sessions(server):
    with server.client() as client:
        for text in ("hello", "why"):
            assert server.say(text, "ann", client).status_code == 200
        [summary] = [s for s in client.get("/v1/sessions").json()["data"] if s["id"] == "ann"]
        assert summary["turns"] == 4 and summary["title"] == "hello" and summary["expires"] is None
        whole = client.get("/v1/sessions/ann").json()
        assert [m["role"] for m in whole["messages"]] == ["user", "assistant"] * 2
        assert whole["tokens_read"] == summary["tokens_read"] == 5 + 4 + 3 + 3
        changed = client.patch("/v1/sessions/ann", json={"title": "<b>new & old</b>", "id": "anna"}).json()
        assert (changed["id"], changed["title"]) == ("anna", "<b>new & old</b>")
        assert client.get("/v1/sessions/ann").status_code == 404
        fork = client.post("/v1/sessions/anna/fork")
        assert fork.status_code == 201 and fork.json()["id"] == "anna-2"
        assert client.post("/v1/sessions/anna/fork", json={"id": "anna-2"}).status_code == 409
        undone = client.post("/v1/sessions/anna/undo").json()
        assert (undone["turns"], undone["tokens_read"]) == (2, 8)
        assert client.get("/v1/sessions/anna-2").json()["turns"] == 4  # the fork stays as it was
        file = client.get("/v1/sessions/anna-2/export")
        assert file.headers["content-disposition"] == 'attachment; filename="anna-2.safetensors"'
        copy = client.post("/v1/sessions/import?id=copy", content=file.content)
        assert copy.status_code == 201 and copy.json()["tokens_read"] == 15
        assert client.post("/v1/sessions/import?id=copy", content=file.content).status_code == 409
        assert client.delete("/v1/sessions/copy").json() == {
            "id": "copy",
            "object": "session.deleted",
            "deleted": True,
        }
        assert client.get("/v1/sessions/copy/export").status_code == 404
        assert client.post("/v1/sessions/anna-2/undo").status_code == 409  # not open in this process yet


def test_an_imported_session_answers_as_the_exported_one(server):
    with server.client() as client:
        server.say("hello", "origin", client)
        file = client.get("/v1/sessions/origin/export").content
        client.post("/v1/sessions/import?id=imported", content=file)
        answers = [server.say("why", name, client).json()["choices"] for name in ("origin", "imported")]
        assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["titans-mag", "attached-window", "transformer"])
def test_a_trace_has_a_value_for_each_token_of_the_last_turn(serve_with, kind):
    running = serve_with(kind)
    with running.client() as client:
        running.say("hello", "ann", client)
        running.say("why me", "ann", client)
        found = client.get("/v1/sessions/ann/trace").json()
    assert [token["role"] for token in found["tokens"]] == ["user"] * 7 + ["assistant"] * 4
    if kind == "transformer":
        assert found["series"] == {} and found["resembled"] is None
        return
    assert found["series"].keys() == {"surprise", "lr", "retain"}
    assert all(len(values) == 11 for values in found["series"].values())
    assert len(found["resembled"]) == 11 and not found["resembled"][0]
    for i, near in enumerate(found["resembled"]):
        assert len(near) <= 3 and all(0 <= entry["index"] < i and 0 < entry["weight"] <= 1 for entry in near)


def test_traces_are_requests_with_a_limit_of_their_own(serve_with):
    running = serve_with(max_traces=1)
    engine = running.service.engine
    with running.client() as client, ThreadPoolExecutor(1) as pool:
        running.say("hello", "ann", client)
        with nothing_computed(running.service):
            first = pool.submit(running.client().get, "/v1/sessions/ann/trace")
            wait_for(lambda: engine.open_jobs == 1)
            second = client.get("/v1/sessions/ann/trace")
        assert second.status_code == 429 and "inspected" in second.json()["error"]["message"]
        assert first.result(60).status_code == 200
        assert client.get("/v1/sessions/ann/trace").json() == first.result().json()


def test_a_trace_gives_its_time_back_to_answers():
    pace = Pace(256, 2.0)
    pace.step, pace.single = 1.0, 1.0
    first = pace.unusual_piece(100, is_busy=True)
    pace.spent(7.0)  # 2 belong to this step and 2 to each of three others
    found = [pace.unusual_piece(100, is_busy=True)]  # before the others' step
    for _ in range(4):
        pace.stepped(1, 1.0)
        found.append(pace.unusual_piece(100, is_busy=True))
    assert [first, *found] == [Piece(16), None, None, None, None, Piece(16)]
    assert pace.unusual_piece(100, is_busy=False) == Piece(32)


def test_a_trace_needs_a_turn_since_the_session_was_opened(server):
    with server.client() as client:
        server.say("hello", "old", client)
        server.service.warm.drop("", "old")
        found = client.get("/v1/sessions/old/trace")
    assert found.status_code == 409 and found.json()["error"]["code"] == "nothing_to_inspect"


def test_memory_read_and_off_leave_the_session_as_it_was(server):
    with server.client() as client:
        server.say("hello", "kept", client)
        before = server.service.store.version("kept")
        read, off = (server.say("why", "kept", client, memory=mode).json() for mode in ("read", "off"))
        assert server.service.store.version("kept") == before
        assert read["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
        assert off["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        alone = server.say("why", None, client).json()
        assert off["choices"][0]["message"] == alone["choices"][0]["message"]
        assert server.say("why", "never", client, memory="read").status_code == 200
        assert client.get("/v1/sessions/never").status_code == 404


def test_nothing_is_answered_if_no_token_is_asked_for(server):
    told = server.say("the key is under the mat. ", "told", max_tokens=0).json()
    assert told["usage"]["completion_tokens"] == 0 and told["session"]["tokens_read"] == 26
    assert sse(server.say("and more. ", "told", max_tokens=0, stream=True).text)[-1]["session"]["tokens_read"] == 36
    with server.client() as client:
        assert [m["role"] for m in client.get("/v1/sessions/told").json()["messages"]] == ["user", "user"]


def test_a_system_prompt_is_read_once(server):
    with server.client() as client:

        def turn(messages):
            body = {"session": "system", "messages": messages, "max_tokens": 2, "temperature": 0}
            return client.post("/v1/chat/completions", json=body)

        system, hello = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}
        assert turn([system, hello]).json()["usage"]["prompt_tokens"] == len("Be kind.\n\nhello")
        assert turn([system, hello]).json()["usage"]["prompt_tokens"] == len("Be kind.\n\nhello") + 2 + 5
        other = turn([{"role": "system", "content": "Be rude."}, hello])
        assert other.status_code == 400 and "read once" in other.json()["error"]["message"]
        old = turn([hello, {"role": "assistant", "content": "yes"}, hello])
        assert old.status_code == 400 and "only the new ones" in old.json()["error"]["message"]


def test_nobody_sees_the_sessions_of_somebody_else(serve_with):
    running = serve_with(keys=KEYS)
    with running.client(headers=ANN) as ann, running.client(headers=BOB) as bob:
        assert running.say("my secret is 7", "diary", ann).status_code == 200
        response = ann.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2}).json()["id"]
        paths = ("", "/export", "/trace")
        assert [bob.get(f"/v1/sessions/diary{path}").status_code for path in paths] == [404] * 3
        assert [bob.post(f"/v1/sessions/diary/{word}").status_code for word in ("fork", "undo")] == [404] * 2
        assert bob.patch("/v1/sessions/diary", json={"title": "mine"}).status_code == 404
        assert bob.delete("/v1/sessions/diary").status_code == 404
        assert bob.get("/v1/sessions").json()["data"] == []
        assert bob.get(f"/v1/responses/{response}").status_code == 404
        stolen = {"input": "what?", "previous_response_id": response}
        assert bob.post("/v1/responses", json=stolen).status_code == 404
        assert running.say("hello", "diary", bob).json()["session"]["tokens_read"] == 8  # a diary of his own
        assert len(ann.get("/v1/sessions/diary").json()["messages"]) == 2
        assert ann.get("/metrics").status_code == 401
    with running.client(headers=OPERATOR) as operator:
        text = operator.get("/metrics").text
        assert "mnemos_turns_total 3" in text and "diary" not in text and "ann" not in text.replace("annot", "")
        assert operator.get("/v1/sessions").status_code == 403
    with running.client() as nobody:
        answers = [nobody.get(path) for path in ("/v1/info", "/v1/models", "/v1/sessions", "/metrics")]
        assert [answer.status_code for answer in answers] == [401] * 4
        assert nobody.get("/health").status_code == nobody.get("/").status_code == 200
    assert "secret" not in running.service.log.file.getvalue()
