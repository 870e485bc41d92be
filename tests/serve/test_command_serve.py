"""`mnemos serve` as a process: starts, answers, stops, and refuses unsafe options in one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

from mnemos.cli import main
from mnemos.cli.serve import seconds_of, size_of
from serving import open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model whose tokens are bytes."""
    model, _ = open_model("titans-mag")
    path = tmp_path_factory.mktemp("model") / "tiny"
    model.save_pretrained(path)
    return path


def started(folder, *options: str) -> tuple[subprocess.Popen, str]:
    """A server, and its address."""
    words = [sys.executable, "-m", "mnemos", "serve", str(folder), "--port", "0", *options]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    line = process.stdout.readline()
    assert " at http://" in line, process.stderr.read()
    return process, line.split()[-1]


def test_a_server_starts_answers_finishes_and_stops(folder, tmp_path):
    process, url = started(folder, "--store", str(tmp_path / "store"))
    body = {"session": "ann", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.post("/v1/chat/completions", json=body | {"model": "tiny"}).json()["session"]["id"] == "ann"
        body = {"session": "bob", "prompt": "hello", "max_tokens": 400, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2:] == ["data: [DONE]", ""]  # a stopping server finishes its answers
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert events[0]["event"] == "started" and events[-1]["event"] == "stopped"
    assert "hello" not in log and "ann" not in json.dumps(events)
    assert {path.name for path in (tmp_path / "store").rglob("*.safetensors")} == {"ann.safetensors", "bob.safetensors"}


@pytest.mark.parametrize(
    "options, words",
    [
        (["--host", "0.0.0.0"], "give --api-keys FILE, or --allow-anyone"),
        (["--host", "192.168.1.5"], "give --api-keys FILE, or --allow-anyone"),
        (["--port", "70000"], "from 0 to 65535"),
        (["--ttl", "soon"], "--ttl 'soon' is not valid"),
        (["--quota", "-1"], "--quota '-1' is not valid"),
        (["--max-batch", "0"], "max_batch=0"),
        (["--api-keys", "none.txt"], "cannot be read as a file of keys"),
        (["--threads", "0"], "threads=0"),
        (["--prefill-budget", "nan"], "prefill_budget=nan"),
    ],
)
def test_unsafe_and_unknown_values_are_refused_in_one_sentence(options, words, capsys, tmp_path):
    assert main(["serve", "runs/none", "--store", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_model_without_a_memory_or_a_used_port_is_refused(folder, tmp_path, capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--store", str(tmp_path), "--port", port]) == 2
    assert "choose another --port" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "none"), "--store", str(tmp_path)]) == 2


def test_times_and_sizes():
    assert [seconds_of("ttl", text) for text in ("90", "90s", "15m", "1.5h", "30d", "2w")] == [
        90,
        90,
        900,
        5400,
        2592000,
        1209600,
    ]
    assert [size_of("quota", text) for text in ("10", "2k", "5 MB", "1.5G")] == [10, 2048, 5 * 2**20, 3 * 2**29]
