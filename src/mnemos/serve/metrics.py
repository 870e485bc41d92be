"""`Metrics`: counters, gauges and histograms in Prometheus' text format. They hold no names of sessions or owners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ABOUT = {
    "mnemos_requests_total": "Answered HTTP requests, by route, method and status.",
    "mnemos_tokens_total": "Tokens, by kind: prompt (read), cached (not read again), generated.",
    "mnemos_turns_total": "Turns of sessions that were saved.",
    "mnemos_save_errors_total": "Turns that could not be saved.",
    "mnemos_cancelled_total": "Answers that the client left.",
    "mnemos_log_errors_total": "Lines of the log that could not be written.",
    "mnemos_first_token_seconds": "Time from the arrival of a request to its first token.",
    "mnemos_step_seconds": "Time of one decoding step of all answers.",
    "mnemos_piece_seconds": "Time to read one piece of a prompt.",
    "mnemos_save_seconds": "Time to write a session to disk.",
    "mnemos_answering": "Answers that are generated now.",
    "mnemos_reading": "Prompts that are read now.",
    "mnemos_waiting": "Requests that wait for a place.",
    "mnemos_warm_sessions": "Sessions whose state is in memory.",
    "mnemos_warm_bytes": "Bytes of these states.",
    "mnemos_resident_bytes": "Memory of this process.",
}


class Metrics:
    """Values by name and labels.

    >>> metrics = Metrics()
    >>> metrics.count("mnemos_tokens_total", 3, kind="prompt")
    >>> "mnemos_tokens_total{kind=\\"prompt\\"} 3" in metrics.text()
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, dict[str, float]] = {}
        self._histograms: dict[str, tuple[list[int], list[float]]] = {}
        self._gauges: dict[str, Callable[[], float]] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter. Values of labels come from fixed lists, never from a request."""
        assert name in ABOUT
        key = ",".join(f'{label}="{value}"' for label, value in labels.items())
        with self._lock:
            values = self._counters.setdefault(name, {})
            values[key] = values.get(key, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """Add to a histogram."""
        assert name in ABOUT
        bucket = next((i for i, most in enumerate(SECONDS) if seconds <= most), len(SECONDS))
        with self._lock:
            counts, total = self._histograms.setdefault(name, ([0] * (len(SECONDS) + 1), [0.0]))
            counts[bucket] += 1
            total[0] += seconds

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """A value that is read when somebody asks."""
        assert name in ABOUT
        self._gauges[name] = read

    def value(self, name: str, **labels: str) -> float:
        """The value of a counter."""
        key = ",".join(f'{label}="{value}"' for label, value in labels.items())
        return self._counters.get(name, {}).get(key, 0)

    def text(self) -> str:
        """All values, in Prometheus' text format 0.0.4."""
        lines: list[str] = []
        with self._lock:
            for name, values in sorted(self._counters.items()):
                lines += _head(name, "counter")
                lines += [f"{name}{f'{{{key}}}' if key else ''} {amount:g}" for key, amount in sorted(values.items())]
            for name, (counts, total) in sorted(self._histograms.items()):
                lines += [*_head(name, "histogram"), *_buckets(name, counts, total[0])]
        for name, read in sorted(self._gauges.items()):
            lines += [*_head(name, "gauge"), f"{name} {read():g}"]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str) -> list[str]:
    return [f"# HELP {name} {ABOUT[name]}", f"# TYPE {name} {kind}"]


def _buckets(name: str, counts: Sequence[int], total: float) -> list[str]:
    lines, below = [], 0
    for most, count in zip((*map(str, SECONDS), "+Inf"), counts):
        below += count
        lines.append(f'{name}_bucket{{le="{most}"}} {below}')
    return [*lines, f"{name}_sum {total:.6f}", f"{name}_count {below}"]


def resident_bytes() -> float:
    """Memory of this process; 0 on systems without /proc."""
    try:
        with open("/proc/self/statm") as file:
            return float(file.read().split()[1]) * 4096
    except (OSError, ValueError, IndexError):
        return 0.0
