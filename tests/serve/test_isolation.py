"""Interleaved sessions of two owners: each state and answer equals that of the same conversation alone."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mnemos.sessions import Session
from serving import ANN, BOB, KEYS, OPERATOR, Running, make_service


def facts(owner: str, number: int) -> list[str]:
    return [f"{owner}'s number {number} is {number * 37 % 101}. ", f"what is {number}? ", "why? "]


def interleave(folder, sessions: int, turns: int) -> None:
    choose = random.Random(3)
    jobs = [(owner, number) for owner in ("ann", "bob") for number in range(sessions // 2)]
    with Running(make_service(folder, keys=KEYS, max_per_owner=64, warm_bytes=8_000_000)) as running:
        headers = {"ann": ANN, "bob": BOB}
        clients = {owner: running.client(headers=headers[owner]) for owner in headers}
        answers: dict[tuple[str, int], list[str]] = {job: [] for job in jobs}

        def turn(job: tuple[str, int], text: str) -> None:
            owner, number = job
            answer = running.say(text, f"s{number}", clients[owner], max_tokens=5)  # both owners use the same names
            assert answer.status_code == 200, answer.text
            answers[job].append(answer.json()["choices"][0]["message"]["content"])

        with ThreadPoolExecutor(12) as pool:
            for i in range(turns):
                choose.shuffle(jobs)
                list(pool.map(lambda job, i=i: turn(job, facts(*job)[i]), jobs))
        assert running.service.metrics.value("mnemos_turns_total") == turns * sessions
        for owner, client in clients.items():
            listed = client.get("/v1/sessions").json()["data"]
            assert len(listed) == sessions // 2
            other = "bob" if owner == "ann" else "ann"
            assert not any(other in entry["title"] for entry in listed)
        fork = clients["ann"].post("/v1/sessions/s0/fork", json={"id": "fork"})
        assert fork.status_code == 201
        before = running.service.store.version("s0", "ann")
        running.say("and now?", "fork", clients["ann"])
        assert running.service.store.version("s0", "ann") == before  # the origin did not change with its fork
        metrics = running.client(headers=OPERATOR).get("/metrics").text
        assert not any(word in metrics for word in ("number", "s0", "bob"))
        service = running.service
    for owner, number in jobs:
        session = Session(service.model, service.tokenizer)
        session.dialogue.ends = frozenset()
        alone = [session.ask(text, max_new_tokens=5) for text in facts(owner, number)[:turns]]
        saved = service.store.load(f"s{number}", service.model, owner)
        assert answers[owner, number] == alone
        assert [turn["content"] for turn in saved.turns] == [turn["content"] for turn in session.turns]
        for layer, expected in zip(saved.cache.layers, session.record.cache.layers):
            for name, state in expected.items():
                for key, x in state.tensors().items():
                    torch.testing.assert_close(layer[name].tensors()[key], x, atol=2e-4, rtol=1e-3)


def test_fifty_interleaved_sessions_do_not_cross(tmp_path):
    interleave(tmp_path / "store", 50, 2)


@pytest.mark.slow
def test_a_thousand_interleaved_sessions_do_not_cross(tmp_path):
    interleave(tmp_path / "store", 1000, 3)
