"""Independent pieces of work in parallel processes, each result handed over as it comes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any


def run_all(
    work: Callable[..., dict[str, Any]], pieces: Sequence[tuple], workers: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Call work(*piece) for every piece; yield its index and its result, in the order in which they are done.

    work: a function of a module, for processes are started afresh. A piece that raises has {"error": what it said} as its result; the
    others go on. workers: processes, one per core by default; each has its share of the cores as threads, or what OMP_NUM_THREADS allows.
    """
    if not pieces:
        return
    cores = os.cpu_count() or 1
    workers = min(len(pieces), workers or cores)
    # fork would copy torch's threads, which may hold locks
    context = multiprocessing.get_context("spawn")
    threads = max(1, min(cores // workers, int((os.environ.get("OMP_NUM_THREADS") or str(cores)).split(",")[0])))
    pool = ProcessPoolExecutor(workers, context, initializer=_prepare, initargs=(threads,))
    try:
        waiting = {pool.submit(work, *piece): index for index, piece in enumerate(pieces)}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), _result(future)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _result(future: Any) -> dict[str, Any]:
    try:
        return future.result()
    except BrokenProcessPool:
        raise ValueError(
            "a worker process was killed, perhaps for want of memory; finished cells are kept: try fewer workers"
        ) from None
    except Exception as failed:
        return {"error": f"{type(failed).__name__}: {failed}"}


def _prepare(threads: int) -> None:
    """A worker's threads; and its end, should the process that started it be killed: nothing else would tell it."""
    import torch

    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
