"""What the benchmarks share: medians with spread, peak memory of one call, the machine's matmul peak, tables."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch


def machine() -> str:
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    return f"{model}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}"


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def times(function: Callable[[], object], runs: int = 7, warm: int = 2) -> list[float]:
    """Seconds of each of `runs` calls, after `warm` calls."""
    for _ in range(warm):
        function()
    result = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        result.append(time.perf_counter() - start)
    return sorted(result)


def median(values: list[float]) -> float:
    return statistics.median(values)


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    picker = random.Random(0)
    found = sorted(median(picker.choices(values, k=len(values))) for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


def memory(field: str) -> float:
    """VmRSS or VmHWM of this process, in MB."""
    return next((int(line.split()[1]) / 1024 for line in _lines("/proc/self/status") if line.startswith(field)), 0.0)


def extra_memory(function: Callable[[], object]) -> float:
    """MB that one call needs beyond what the process holds before it (Linux)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = memory("VmRSS")
    function()
    return memory("VmHWM") - before


def matmul_peak(size: int = 2048) -> float:
    """GFLOP/s of the machine's best large float32 matmul."""
    x = torch.randn(size, size)
    return 2 * size**3 / min(times(lambda: x @ x, runs=9)) / 1e9


def isolated(script: str, *arguments: str, timeout: float = 1800) -> dict:
    """Run this script again in a process of its own and read the JSON it ends with; {"error": ...} where it dies."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"exit {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
