"""Tokenises parts in separate processes: `main` reads jobs and writes answers, one line of JSON each.

Plain processes, not multiprocessing: no fork of a program with threads, no second import of the user's script, no pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..interpreter import command
from .encode import TokenizeProgress, encode_part
from .modules import import_named
from .readers import Item, ReadRules, modules_of
from .tokenizer import ByteTokenizer, FastTokenizer, Tokenizer, open_tokenizer


def encode_in_processes(
    jobs: Sequence[tuple[int, Sequence[Item]]],
    folder: Path,
    tokenizer: Tokenizer,
    rules: ReadRules,
    add_bos: bool,
    workers: int,
    on_progress,
) -> None:
    """Run every job (shard number, items); raises the first error of a process."""
    with contextlib.ExitStack() as stack:
        opened = _tokenizer_file(tokenizer, folder)
        waiting: queue.SimpleQueue = queue.SimpleQueue()
        for number, items in jobs:
            waiting.put({"number": number, "items": [item.as_json() for item in items], "folder": str(folder)})
        common: dict[str, Any] = {"rules": vars(rules), "tokenizer": opened, "add_bos": add_bos}
        common |= {"ends": [tokenizer.eos_token_id, tokenizer.bos_token_id]}
        common |= {"modules": modules_of(item for _, items in jobs for item in items)}
        lock, stop = threading.Lock(), threading.Event()
        processes = [stack.enter_context(_worker(workers)) for _ in range(workers)]
        with ThreadPoolExecutor(workers) as pool:
            try:
                for done in [pool.submit(_feed, p, waiting, common, lock, stop, on_progress) for p in processes]:
                    done.result()
            except BaseException:
                stop.set()
                for process in processes:
                    process.terminate()
                raise


def _tokenizer_file(tokenizer: Tokenizer, folder: Path) -> dict[str, str | None]:
    """The tokenizer in a form that the processes can open, whatever it was opened from."""
    if isinstance(tokenizer, ByteTokenizer):
        return {"name": "bytes", "eos_token": None}
    place = folder / "tokenizer"
    tokenizer.save(place)
    if isinstance(tokenizer, FastTokenizer):  # this file alone needs no transformers
        return {
            "name": str(place / "tokenizer.json"),
            "eos_token": tokenizer.backend.id_to_token(tokenizer.eos_token_id),
        }
    return {"name": str(place), "eos_token": None}


@contextlib.contextmanager
def _worker(workers: int):
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": threads}
    with subprocess.Popen(
        command(__name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield process


def _feed(process: subprocess.Popen, waiting: queue.SimpleQueue, common: dict, lock, stop, on_progress) -> None:
    """Send one job after another to a process and forward its progress; close its stdin after the last job."""
    assert process.stdin and process.stdout
    while not stop.is_set():
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            break
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job | common) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            answer = json.loads(line)
            if "error" in answer:
                raise ValueError(answer["error"])
            if "done" in answer:
                break
            with lock:
                on_progress(TokenizeProgress(**answer))
        else:
            raise RuntimeError(f"a tokenising process ended before its work was done (exit status {process.wait()})")
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def main() -> None:
    """Serve jobs from stdin until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with answers
    tokenizer = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if tokenizer is None:
                for module in job["modules"]:  # readers registered by the user
                    import_named(module)
                tokenizer = open_tokenizer(**job["tokenizer"])
                tokenizer.eos_token_id, tokenizer.bos_token_id = job["ends"]
            items = [Item(**item) for item in job["items"]]
            encode_part(
                items,
                job["number"],
                Path(job["folder"]),
                tokenizer,
                ReadRules(**job["rules"]),
                job["add_bos"],
                lambda progress: print(json.dumps(asdict(progress)), file=out),
            )
        except (ValueError, OSError) as wrong:
            said = (
                f"shards cannot be written in {job['folder']}: {wrong.strerror}"
                if isinstance(wrong, OSError)
                else str(wrong)
            )
            print(json.dumps({"error": said}), file=out)
            return
        print(json.dumps({"done": job["number"]}), file=out)
