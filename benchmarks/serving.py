"""`mnemos serve` beside the bare model: overhead, batches, first tokens, others' long prompts, idle sessions, start-up.

The server is a process of its own; the bare model runs here, with one thread, in turn with the server: ratios are of one round each.
CPU time, of all threads of the server, says more on a busy machine than the clock.

python benchmarks/serving.py [--preset titans-mag] [--tokens 200] [--rounds 5] [--threads 1] [--idle 200] [--prompt 100000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from harness import interval, machine, median, table
from mnemos.models import MnemosForCausalLM, presets

SESSIONS = 16
HEADER = ["", "by the clock", "ratio (95 % interval)", "CPU time of all threads", "ratio (95 % interval)"]
TURN = "and where is it now?"  # 20 tokens


class Client:
    """Requests over raw sockets: the client shares the machine, so it does as little as it can."""

    def __init__(self, port: int):
        self.port = port
        self.generated = 0  # tokens of all answers so far: an answer may end before its limit

    async def post(self, path: str, body: dict[str, Any]) -> list[float]:
        """Times at which pieces of the answer arrived, after the request was sent, in seconds; one per event of a stream."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        started = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        times, status = [], await reader.readline()
        assert b" 200 " in status, status + await reader.read()
        async for line in reader:
            if line.startswith(b"data: {") or not body.get("stream"):
                times.append(time.perf_counter() - started)
            if b'"completion_tokens":' in line:
                self.generated += json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
        writer.close()
        return times

    def stream(self, count: int, **fields: Any) -> Any:
        body: dict[str, Any] = {"prompt": TURN, "max_tokens": count, "temperature": 0, "stream": True, "logprobs": 0}
        body |= {"stream_options": {"include_usage": True}} | fields
        return self.post("/v1/completions", body)


def cpu(pid: int) -> float:
    """Seconds of CPU time of all threads of a process."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def resident(pid: int) -> float:
    """Megabytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def start(folder: str, store: str, threads: int) -> tuple[subprocess.Popen, int, float]:
    """A server, its port, and the seconds until it listened."""
    words = [
        sys.executable,
        "-m",
        "mnemos",
        "serve",
        folder,
        "--port",
        "0",
        "--store",
        store,
        "--threads",
        str(threads),
    ]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*words, "--warm", "1G"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, int(line.rstrip("/\n").rpartition(":")[2]), time.perf_counter() - began


def bare(model: MnemosForCausalLM, rows: int, count: int, clock=time.perf_counter) -> float:
    """Seconds per step of transformers' generate."""
    ids = torch.tensor([list(TURN.encode())]).expand(rows, -1)

    def seconds(tokens: int) -> float:
        began = clock()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return clock() - began

    return (seconds(count) - seconds(1)) / (count - 1)


async def one_stream(client: Client, count: int) -> float:
    """Seconds per token of one stream, as `bare` measures them: tokens of a random model are no text each."""

    async def seconds(tokens: int) -> float:
        began = time.perf_counter()
        await client.stream(tokens)
        return time.perf_counter() - began

    return (await seconds(count) - await seconds(1)) / (count - 1)


async def turns(client: Client, count: int, sessions: int) -> float:
    """Seconds per token of sessions that answer at the same time, each at another position; reading and saving included."""
    began, before = time.perf_counter(), client.generated
    await asyncio.gather(*(client.stream(count, session=f"many-{i}") for i in range(sessions)))
    return (time.perf_counter() - began) / (client.generated - before)


async def gaps(client: Client, count: int, prompt: int) -> tuple[float, float, float, float]:
    """Seconds between tokens of a stream, alone and while somebody's long prompt is read: medians and 99th percentiles."""
    quiet = await client.stream(count)
    stream = asyncio.create_task(client.stream(4 * count))
    long = asyncio.create_task(client.post("/v1/completions", {"prompt": "x" * prompt, "max_tokens": 1}))
    busy = await stream
    long.cancel()
    found = []
    for times in (quiet, busy):
        between = sorted(b - a for a, b in zip(times[5:], times[6:]))
        found += [statistics.median(between), between[int(0.99 * len(between))]]
    return found[0], found[1], found[2], found[3]


async def run(client: Client, model: MnemosForCausalLM, pid: int, arguments: argparse.Namespace) -> None:
    count, rows = arguments.tokens, []
    found: dict[str, list[float]] = {name: [] for name in ("bare", "stream", "one", "batch", "first")}
    spent: dict[str, list[float]] = {name: [] for name in ("bare", "stream", "one", "batch")}
    await one_stream(client, 20)
    await turns(client, 5, SESSIONS)
    for _ in range(arguments.rounds):
        spent["bare"].append(bare(model, 1, count, time.thread_time))
        found["bare"].append(bare(model, 1, count))
        began = cpu(pid)
        await client.stream(1)
        first = cpu(pid) - began
        began = cpu(pid)
        found["stream"].append(await one_stream(client, count))  # `count` tokens and one
        spent["stream"].append((cpu(pid) - began - 2 * first) / (count - 1))
        await client.stream(1, session="warm")  # the sessions of the round before may have taken its place
        found["first"].append((await client.stream(2, session="warm"))[0])
        for name, sessions in (("one", 1), ("batch", SESSIONS)):
            before, generated = cpu(pid), client.generated
            found[name].append(await turns(client, count, sessions))
            spent[name].append((cpu(pid) - before) / (client.generated - generated))
    for name, what, other, text in (
        ("bare", "generate, one row, a token", "bare", ""),
        ("stream", "server, one stream, a token", "bare", "of generate"),
        ("one", "server, a turn of one session, a token", "bare", "of generate"),
        ("batch", f"server, turns of {SESSIONS} sessions, a token", "one", "of one session"),
        ("first", "first token of a warm session, turn of 20 tokens", "stream", "tokens of one stream"),
    ):
        seconds, work = found[name], spent.get(name)
        clock = f"{ratio(seconds, found[other])} {text}" if text else ""
        time_spent = f"{ratio(work, spent[other])} {text}" if text and work else ""
        rows.append([what, f"{1e3 * median(seconds):.2f} ms", clock])
        rows[-1] += [f"{1e3 * median(work):.2f} ms", time_spent] if work else ["", ""]
    if not arguments.prompt:
        print(table(HEADER, rows))
        return
    quiet, quiet99, busy, busy99 = await gaps(client, count, arguments.prompt)
    rows.append(
        [
            f"between tokens, while a prompt of {arguments.prompt:,} is read",
            f"median {1e3 * busy:.2f} ms, 99 % {1e3 * busy99:.2f} ms",
            f"alone {1e3 * quiet:.2f} and {1e3 * quiet99:.2f} ms",
            "",
            "",
        ]
    )
    before = resident(pid)
    for i in range(0, arguments.idle, 8):
        await asyncio.gather(*(client.stream(1, session=f"idle-{j}") for j in range(i, min(i + 8, arguments.idle))))
    rows.append(
        [
            f"{arguments.idle} idle sessions",
            f"{resident(pid) - before:+.0f} MB of memory",
            "1 GB of states is kept warm",
            "",
            "",
        ]
    )
    print(table(HEADER, rows))


def ratio(values: list[float], others: list[float]) -> str:
    """Median and interval of the ratios of what was measured in the same round."""
    found = [a / b for a, b in zip(values, others)]
    low, high = interval(found)
    return f"{median(found):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="titans-mag")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1, help="of the server's torch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine(), "\n", flush=True)
    model = MnemosForCausalLM(presets.config(arguments.preset, "nano")).eval()
    model.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/nano")
        process, port, seconds = start(f"{folder}/nano", f"{folder}/store", arguments.threads)
        try:
            print(f"start-up: {seconds:.1f} s\n", flush=True)
            asyncio.run(run(Client(port), model, process.pid, arguments))
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main()
