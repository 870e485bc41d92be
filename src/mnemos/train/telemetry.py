"""Metrics of a run: metrics.jsonl, and the trackers in the config.

metrics.jsonl holds one object per line, each with "step", "kind" ("train", "validate", "probe", "event") and numbers.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..atomic_io import write_text
from ..choices import unknown

if TYPE_CHECKING:
    import torch

    from ..memory import MemorySpec, NeuralMemoryConfig


class Tracker(Protocol):
    """A destination for metrics."""

    def log(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TrackerFactory(Protocol):
    """Opens a tracker: a class or function of the run's folder, its name and its config."""

    def __call__(self, folder: Path, name: str, config: dict) -> Tracker: ...


Factory = TypeVar("Factory", bound=TrackerFactory)
TRACKERS: dict[str, TrackerFactory] = {}


def register_tracker(name: str) -> Callable[[Factory], Factory]:
    """Decorator: registers a class or function (folder, name, config) -> `Tracker` under a name.

    >>> @register_tracker("nowhere")
    ... class Nowhere:
    ...     def __init__(self, folder, name, config): ...
    ...     def log(self, step, numbers): ...
    ...     def close(self): ...
    >>> TRACKERS.pop("nowhere").__name__
    'Nowhere'
    """
    if name in TRACKERS:
        raise ValueError(f"tracker {name!r} is registered already: choose another name")

    def register(factory: Factory) -> Factory:
        TRACKERS[name] = factory
        return factory

    return register


@register_tracker("tensorboard")
class TensorBoard:
    """TensorBoard event files, in the run's folder."""

    extra = "track"

    def __init__(self, folder: Path, name: str, config: dict):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for key, value in numbers.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbLike:
    """The common part of Weights & Biases and trackio. api: the module, with `log` and `finish`."""

    extra = "track"
    api: Any

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.api.log(numbers, step=step)

    def close(self) -> None:
        self.api.finish()


@register_tracker("wandb")
class Wandb(WandbLike):
    """Weights & Biases. WANDB_MODE=offline needs no network."""

    def __init__(self, folder: Path, name: str, config: dict):
        self.api = importlib.import_module("wandb")
        place = zlib.crc32(str(folder.resolve()).encode())  # runs of the same name in two places are two runs
        self.run = self.api.init(
            project="mnemos", name=name, config=config, dir=str(folder), resume="allow", id=f"{name}-{place:08x}"
        )


@register_tracker("trackio")
class Trackio(WandbLike):
    """trackio, which stores its records on this machine."""

    def __init__(self, folder: Path, name: str, config: dict):
        self.api = importlib.import_module("trackio")
        self.run = self.api.init(project="mnemos", name=name, config=config)


def check_trackers(kinds: Iterable[str]) -> None:
    """Raise a ValueError that lists the valid trackers for an unknown one.

    >>> check_trackers(["wanddb"])
    Traceback (most recent call last):
    ValueError: tracker 'wanddb' is unknown; did you mean wandb? Choose one of tensorboard, wandb, trackio, or name the module that registers it: --import MODULE
    """
    for kind in kinds:
        if kind not in TRACKERS:
            wrong = unknown("tracker", kind, TRACKERS)
            raise ValueError(f"{wrong}, or name the module that registers it: --import MODULE")


def open_tracker(kind: str, folder: Path, name: str, config: dict) -> Tracker:
    """Open a tracker by name; raises a ValueError with the install command if its package is missing."""
    check_trackers([kind])
    try:
        return TRACKERS[kind](folder, name, config)
    except ImportError as missing:
        extra = getattr(TRACKERS[kind], "extra", None)
        needed = (
            f"{missing.name}, which is not installed"
            if extra is None
            else f"the extra {extra}: pip install 'mnemos[{extra}]'"
        )
        raise ValueError(f"the tracker {kind} needs {needed}") from None


class Metrics:
    """The run's own record. After a resume, lines from after the checkpoint are removed, because they are written again.

    Lines that cannot be written, for instance on a full disk, are kept for the next write; `say` is called once.
    """

    def __init__(
        self,
        folder: Path,
        trackers: list[Tracker],
        from_step: int | None = None,
        say: Callable[[str], None] = lambda sentence: None,
    ):
        self.path, self.trackers, self.say = folder / "metrics.jsonl", trackers, say
        self.unwritten, self.told = b"", False
        if from_step is not None:
            cut_after(self.path, from_step)
        self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def log(self, step: int, kind: str, **values: Any) -> None:
        record = {"step": step, "kind": kind, "time": round(time.time(), 3)} | values
        self.unwritten += json.dumps(_finite(record)).encode() + b"\n"
        self._write()
        numbers = {
            f"{kind}/{key}": float(value)
            for key, value in flatten(values).items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for tracker in self.trackers if numbers else ():
            tracker.log(step, numbers)

    def _write(self) -> None:
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) or 0 :]
        except OSError as wrong:
            if not self.told:
                self.say(
                    f"{self.path} cannot be written: {wrong.strerror}; training continues, and its lines are written later"
                )
            self.told = True

    def close(self) -> None:
        self._write()
        self.file.close()
        for tracker in self.trackers:
            tracker.close()


def cut_after(path: Path, step: int) -> None:
    """Remove the lines of later steps, and invalid lines, from a file of JSON lines."""
    if path.exists():
        kept = [
            line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if _step_of(line) <= step
        ]
        write_text(path, "".join(f"{line}\n" for line in kept))


def read_metrics(folder: str | os.PathLike, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a run; a last line that a crash truncated is skipped."""
    return [r for r in read_lines(Path(folder) / "metrics.jsonl") if kind is None or r.get("kind") == kind]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, such as samples.jsonl; invalid lines are skipped."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ()
    return [json.loads(line) for line in lines if math.isfinite(_step_of(line))]


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one level, with slashes in the names.

    >>> flatten({"gates": {"0": {"mean": 0.5}}})
    {'gates/0/mean': 0.5}
    """
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{prefix}{key}/")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _finite(value: Any) -> Any:
    """`value` with NaN and infinity replaced by None: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    """The step of a record; infinity for an invalid line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf


class Speed:
    """Tokens per second, time spent waiting for data, model-FLOPs utilisation and peak memory since the last call."""

    def __init__(self, device: torch.device, flops_per_token: float, dtype: str):
        import torch

        self.device, self.flops_per_token = device, flops_per_token
        self.peak = matmul_peak(device, getattr(torch, dtype))
        self.start()

    def start(self) -> None:
        self.began, self.tokens, self.waited, self.paused = time.perf_counter(), 0, 0.0, 0.0

    def look(self) -> dict[str, float]:
        """The numbers since `start`; starts again."""
        seconds = max(1e-9, time.perf_counter() - self.began - self.paused)
        rate = self.tokens / seconds
        found = {
            "tokens_per_second": rate,
            "data_wait": self.waited / seconds,
            "mfu": rate * self.flops_per_token / self.peak,
            "peak_memory_mb": peak_memory(self.device),
        }
        self.start()
        return found


def matmul_peak(device: torch.device, dtype: torch.dtype, size: int = 512) -> float:
    """FLOP/s of a large matrix product on this device, the reference of the utilisation. Measured, not from a data sheet."""
    import torch

    size = 4096 if device.type == "cuda" else size
    x = torch.randn(size, size, device=device, dtype=dtype)
    best = math.inf
    for _ in range(6):
        start = time.perf_counter()
        x @ x
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def peak_memory(device: torch.device) -> float:
    """Peak memory in MB: of the GPU's allocator, or of the process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def flops_per_token(model, length: int) -> float:
    """Model FLOPs per token in training: 6 per weight that multiplies it, 12 per attended key and channel, and for a memory of M fast
    weights 24 M (forward, error, gradient and read, 2 M each, and twice that in the backward pass), plus 6 M if its initial weights are
    read too. Muon: also three times its Newton–Schulz steps, once per commit."""
    from ..models.mixer import BLOCKS

    config = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "persistent" not in name)
    total = 6.0 * weights  # a tied embedding counts once, as the head
    for kind in config.blocks:
        span = BLOCKS[kind].attention_span(config)
        if span != 0:
            total += attention_flops(span, length, config.num_attention_heads, config.attention_head_dim)
        if BLOCKS[kind].has_memory:
            total += memory_flops(config.memory_config)
    return total


def attention_flops(span: int | None, length: int, heads: int, dim: int) -> float:
    """FLOPs per token of one attention layer in training, without its linear maps. span: its window; None: full attention."""
    seen = length / 2 if span is None else min(length, span)
    return 12 * seen * heads * dim


def memory_flops(memory: NeuralMemoryConfig) -> float:
    """FLOPs per token of one memory in training, without its linear maps."""
    from ..memory.rules import Muon

    fast = memory.head_count * sum(a * b for a, b in memory.spec.shapes)
    total: float = (30 if memory.has_w0_branch else 24) * fast
    if isinstance(memory.spec.update_rule, Muon):
        total += 3 * memory.head_count * _commit_flops(memory.spec) / memory.spec.commit
    return total


def _commit_flops(spec: MemorySpec) -> int:
    """FLOPs of Newton–Schulz for all maps of a head; with steps in the window's low-rank space, five products of (c, c) an iteration."""
    if spec.windowed:
        return len(spec.shapes) * spec.ns_steps * 10 * spec.window**3
    return sum(newton_schulz_flops(a, b, spec.ns_steps) for a, b in spec.shapes)


def newton_schulz_flops(a: int, b: int, steps: int) -> int:
    """FLOPs of Newton–Schulz for one matrix: in each step the Gram matrix, its square, and their product with the matrix.

    >>> newton_schulz_flops(2, 4, 1) == 2 * 2 * 2 * 4 + 2 * 2**3 + 2 * 2 * 2 * 4
    True
    """
    short, long = sorted((a, b))
    return steps * (4 * short**2 * long + 2 * short**3)
