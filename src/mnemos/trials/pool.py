"""Independent pieces of work in parallel processes; each result is yielded as soon as it is ready.

Plain processes, not multiprocessing: that would search the working folder for modules first, and import the user's script again.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from ..interpreter import command


def run_all(
    work: Callable[..., dict[str, Any]], pieces: Sequence[tuple], workers: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Call work(*piece) for every piece; yield index and result in order of completion.

    work: a function of a module that can be imported. A piece that raises has {"error": message} as its result; the others continue.
    workers: number of processes, one per core by default; each uses an equal share of the cores as threads, at most OMP_NUM_THREADS.
    """
    if not pieces:
        return
    cores = os.cpu_count() or 1
    workers = min(len(pieces), workers or cores)
    threads = max(1, min(cores // workers, int((os.environ.get("OMP_NUM_THREADS") or str(cores)).split(",")[0])))
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    done: queue.SimpleQueue = queue.SimpleQueue()
    for index, piece in enumerate(pieces):
        waiting.put((index, pickle.dumps((work, piece))))
    with contextlib.ExitStack() as stack:
        for _ in range(workers):
            process = stack.enter_context(_worker(threads))
            threading.Thread(target=_feed, args=(process, waiting, done), daemon=True).start()
        for _ in pieces:
            index, result = done.get()
            if result is None:
                raise ValueError(
                    "a worker process was killed, perhaps because memory ran out; finished cells are kept: try fewer workers"
                )
            yield index, result


@contextlib.contextmanager
def _worker(threads: int) -> Generator[subprocess.Popen]:
    with subprocess.Popen(command(__name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):
                _send(process.stdin, threads)
            yield process
        finally:
            process.kill()


def _feed(process: subprocess.Popen, waiting: queue.SimpleQueue, done: queue.SimpleQueue) -> None:
    """Send one piece after another to a process and collect its results; None for the piece at which the process ended."""
    assert process.stdin and process.stdout
    while True:
        try:
            index, piece = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            _send(process.stdin, piece)
            done.put((index, pickle.load(process.stdout)))
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            done.put((index, None))
            return


def _send(pipe, value: Any) -> None:
    pickle.dump(value, pipe)
    pipe.flush()


def main() -> None:
    """Serve pieces from stdin until it closes, which happens when the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries goes to stderr: stdout carries results
    pieces: queue.SimpleQueue = queue.SimpleQueue()
    threads = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_receive, args=(pieces,), daemon=True).start()
    import torch

    torch.set_num_threads(threads)
    while True:
        _send(out, _result(pieces.get()))


def _receive(pieces: queue.SimpleQueue) -> None:
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            pieces.put(pickle.load(sys.stdin.buffer))
    os._exit(1)


def _result(piece: bytes) -> dict[str, Any]:
    try:
        work, arguments = pickle.loads(piece)
        result = work(*arguments)
        pickle.dumps(result)
        return result
    except Exception as failed:
        return {"error": f"{type(failed).__name__}: {failed}"}
