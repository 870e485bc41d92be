"""Speed of the working tree compared with an old commit: training, decoding, and the memory layer.

    python benchmarks/compare.py be9471b                                  # every case, about 12 minutes on one core
    python benchmarks/compare.py HEAD~5 --only train --presets titans-mag swa
    python benchmarks/compare.py HEAD~5 --only decode --presets titans-mac titans-mal atlas-mag
    python benchmarks/compare.py HEAD~5 --only layer --backend torch --json layer.json

The script checks out BASE into a temporary git worktree and starts one worker process per version. The workers run the same
steps on the same inputs in turn, one at a time and in alternating order, so that the load of a shared machine affects both.

train   forward, backward, clipping and AdamW step of a preset in size nano, 2 sequences of 512 tokens
decode  20 tokens of a preset in size nano, one per call, greedy, with a cache that starts behind a prompt of 100 tokens
layer   forward and backward of `NeuralMemory` at the five shapes of benchmarks/speed.py; also peak memory (Linux)

Networks decay towards 0 and attention has no convolution, as in old versions; `atlas-mag` is another rule since it commits after
every token.

The speed-up is the median over rounds of old time / new time: above 1 the working tree is faster. Times are wall-clock times.
The 95 % interval is a bootstrap over rounds. The speed-up in CPU time is printed beside it: on a busy machine it is the steadier one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

KINDS = ("train", "decode", "layer")
TRAINED = ("titans-mag", "titans-lmm", "omeganet", "atlas-mag", "titans-mac", "swa")
DECODED = ("titans-lmm", "titans-mag")
LAYERS = (  # batch, length, dim, heads, chunk, Newton–Schulz
    (2, 1024, 384, 1, 64, False),
    (2, 1024, 384, 4, 64, False),
    (1, 4096, 256, 4, 64, False),
    (1, 4096, 256, 4, 16, False),
    (2, 1024, 384, 1, 64, True),
)
TRAIN_SHAPE = (2, 512)  # sequences, tokens
PROMPT_TOKENS, DECODED_TOKENS = 100, 20
PAIRS_PER_ROUND = {"train": 1, "decode": 10, "layer": 1}  # decoding steps are short: more pairs in the same time
WARM_STEPS = {"train": 2, "decode": 5, "layer": 2}  # decoding: beyond the end of a chunk
BOOTSTRAP_SAMPLES = 2000
REPOSITORY = Path(__file__).resolve().parents[1]

Step = Callable[[], float]  # one step; returns a number that both versions should agree on


# The worker: one version of the package


def worker() -> None:
    """Answer each request, a line of JSON on standard input, with a line of JSON on standard output."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints go to standard error
    import mnemos

    assert Path(os.environ["PYTHONPATH"]) in Path(mnemos.__file__).parents, f"another version runs: {mnemos.__file__}"
    step: Step | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "prepare":
                step = None  # frees the previous case
                step = prepare(**request["case"])
                first, *_ = [step() for _ in range(WARM_STEPS[request["case"]["kind"]])]
                reply = {"result": first}
            elif step is None:
                raise RuntimeError("no case is prepared")
            else:
                reply = timed(step) if request["do"] == "step" else {"peak": peak_memory(step)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def timed(step: Step) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def peak_memory(step: Step) -> float | None:
    """MB that a step needs beyond the memory in use before it, or None if the system does not report it."""
    from harness import extra_memory

    try:
        return max(extra_memory(step), extra_memory(step))
    except OSError:
        return None


def prepare(kind: str, **case) -> Step:
    return {"train": training, "decode": decoding, "layer": layer}[kind](**case)


def nano_model(preset: str):
    """A model of the preset, and a generator for inputs that does not depend on how a version draws its weights."""
    import torch

    from mnemos.models import MnemosForCausalLM, presets

    torch.manual_seed(0)
    config = presets.config(preset, size="nano")
    options = {}
    if config.has_memory and hasattr(config.memory_config, "retention"):  # old versions have "zero" alone
        options["memory_retention"] = "zero"
    if hasattr(config, "attention_conv_width"):  # old versions have none
        options["attention_conv_width"] = 0
    return MnemosForCausalLM(presets.config(preset, size="nano", **options)), torch.Generator().manual_seed(1)


def training(preset: str) -> Step:
    import torch

    model, generator = nano_model(preset)
    model.train()
    ids = torch.randint(0, 256, TRAIN_SHAPE, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def decoding(preset: str) -> Step:
    import torch

    model, generator = nano_model(preset)
    model.eval()
    with torch.no_grad():
        cache = model.state(torch.randint(0, 256, (1, PROMPT_TOKENS), generator=generator))
    token = torch.zeros(1, 1, dtype=torch.long)
    if not hasattr(cache, "inplace"):
        raise RuntimeError("the cache has no attribute inplace, which generate sets: give its new name here")

    @torch.no_grad()
    def step() -> float:
        nonlocal cache, token
        for _ in range(DECODED_TOKENS):
            cache.inplace = True  # as generate does
            output = model(token, past_key_values=cache, use_cache=True)
            cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1)
        return output.logits.abs().mean().item()

    return step


def layer(
    batch: int, length: int, dim: int, heads: int, chunk: int, newton_schulz: bool, backend: str = "auto"
) -> Step:
    import torch

    from mnemos.memory import NeuralMemory, NeuralMemoryConfig

    torch.manual_seed(0)
    options = {"rule": "muon" if newton_schulz else "gd"}
    if hasattr(NeuralMemoryConfig(dim=dim), "retention"):  # old versions have "zero" alone
        options["retention"] = "zero"
    memory = NeuralMemory(dim=dim, heads=heads, chunk_size=chunk, backend=backend, **options)
    x = torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def step() -> float:
        y, _ = memory(x)
        y.square().mean().backward()
        memory.zero_grad()
        x.grad = None
        return y.detach().abs().mean().item()

    return step


# The parent: two workers in turn


class Worker:
    """A process that runs the cases with the package in `source`."""

    def __init__(self, source: Path):
        environment = os.environ | {"PYTHONPATH": str(source), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, do: str, **request) -> dict:
        """The reply to a request; RuntimeError if the worker reports an error or ends."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        reply = json.loads(line) if line else {"error": f"the worker ended with exit code {self.process.wait()}"}
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def checked_out(base: str) -> Generator[Path, None, None]:
    """A temporary git worktree of the commit `base`, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mnemos-compare-") as folder:
        path = Path(folder, "base")
        git("worktree", "add", "--quiet", "--detach", str(path), base)
        try:
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


def git(*arguments: str) -> str:
    """Output of a git command in the repository; ValueError with git's last line if it fails."""
    done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {arguments[0]} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return done.stdout.strip()


def cases(kinds: list[str], presets: list[str] | None, backend: str) -> dict[str, dict]:
    """The chosen cases by name. Each case holds the keywords of `prepare`."""
    found: dict[str, dict] = {}
    for kind, defaults in (("train", TRAINED), ("decode", DECODED)):
        if kind in kinds:
            found |= {f"{kind} {name}": {"kind": kind, "preset": name} for name in presets or defaults}
    if "layer" in kinds:
        for batch, length, dim, heads, chunk, newton_schulz in LAYERS:
            name = f"layer ({batch},{length},{dim}), {heads} head{'s' * (heads > 1)}, chunk {chunk}"
            name += (", Newton–Schulz" if newton_schulz else "") + (f", {backend}" if backend != "auto" else "")
            shape = dict(batch=batch, length=length, dim=dim, heads=heads, chunk=chunk, newton_schulz=newton_schulz)
            found[name] = {"kind": "layer", **shape, "backend": backend}
    return found


def measure(case: dict, workers: dict[str, Worker], rounds: int) -> dict:
    """Times of one case in alternation, and the speed-up. `workers` are old and new, in this order."""
    results = {version: worker.ask("prepare", case=case)["result"] for version, worker in workers.items()}
    seconds: dict[str, list[dict]] = {version: [] for version in workers}
    for i in range(rounds * PAIRS_PER_ROUND[case["kind"]]):
        for version in list(workers) if i % 2 else reversed(workers):
            seconds[version].append(workers[version].ask("step"))
    wall, cpu = (
        {version: [s[clock] for s in taken] for version, taken in seconds.items()} for clock in ("wall", "cpu")
    )
    found = {
        "old_ms": 1e3 * statistics.median(wall["old"]),
        "new_ms": 1e3 * statistics.median(wall["new"]),
        "speedup": statistics.median(ratios(wall)),
        "interval": interval(bootstrap(ratios(wall))),
        "cpu_speedup": statistics.median(ratios(cpu)),
        "results": results,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
    }
    if case["kind"] == "layer":
        found["peak_mb"] = {version: worker.ask("peak")["peak"] for version, worker in workers.items()}
    return found


def ratios(seconds: dict[str, list[float]]) -> list[float]:
    """Old time / new time of every pair of steps."""
    return [old / max(new, 1e-9) for old, new in zip(seconds["old"], seconds["new"])]


def bootstrap(values: list[float], seed: int = 0) -> list[float]:
    """Medians of `BOOTSTRAP_SAMPLES` resamples of the values."""
    draw = random.Random(seed)
    return [statistics.median(draw.choices(values, k=len(values))) for _ in range(BOOTSTRAP_SAMPLES)]


def interval(samples: list[float]) -> tuple[float, float]:
    """Ends of the middle 95 % of the samples.

    >>> interval([float(i) for i in range(1000)])
    (25.0, 974.0)
    """
    ordered, tail = sorted(samples), round(0.025 * len(samples))
    return ordered[tail], ordered[-1 - tail]


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean logarithm.

    >>> round(geometric_mean([0.5, 2.0]), 9)
    1.0
    """
    return math.exp(statistics.fmean(math.log(value) for value in values))


def summary(found: dict[str, dict]) -> dict:
    """Geometric mean and smallest of the speed-ups of all cases that ran in both versions; empty if none did."""
    ran = {name: case for name, case in found.items() if "error" not in case}
    if not ran:
        return {}
    samples = [bootstrap(ratios(case["wall_seconds"]), seed) for seed, case in enumerate(ran.values())]
    smallest = min(ran, key=lambda name: ran[name]["speedup"])
    return {
        "geometric_mean": geometric_mean(case["speedup"] for case in ran.values()),
        "interval": interval([geometric_mean(draw) for draw in zip(*samples)]),
        "smallest": ran[smallest]["speedup"],
        "smallest_case": smallest,
    }


def spread(ends: tuple[float, float]) -> str:
    """The interval as text; "–" for a single pair of steps, which has none."""
    return f"{ends[0]:.3f} to {ends[1]:.3f}" if ends[0] < ends[1] else "–"


def report(found: dict[str, dict], total: dict) -> str:
    """The table of all cases, and the lines below it."""
    from harness import table

    rows, notes = [], []
    for name, case in found.items():
        if "error" in case:
            rows.append([name, "–", "–", "–", "–", "–", "–"])
            notes.append(f"{name} did not run. {case['error']}")
            continue
        peaks = case.get("peak_mb", {})
        has_peaks = bool(peaks) and None not in peaks.values()
        rows.append(
            [
                name,
                f"{case['old_ms']:.1f}",
                f"{case['new_ms']:.1f}",
                f"{case['speedup']:.3f}",
                spread(case["interval"]),
                f"{case['cpu_speedup']:.3f}",
                f"{peaks['old']:.0f}, {peaks['new']:.0f}" if has_peaks else "–",
            ]
        )
        old, new = case["results"]["old"], case["results"]["new"]
        if not math.isclose(old, new, rel_tol=1e-3):
            notes.append(f"{name}: the first step's results differ, {old:.6g} and {new:.6g}")
    header = ["case", "old ms", "new ms", "speed-up", "95 % interval", "in CPU time", "peak memory MB, old, new"]
    if total:
        notes.append(
            f"geometric mean {total['geometric_mean']:.3f} (95 % interval {spread(total['interval'])}), "
            f"smallest {total['smallest']:.3f} ({total['smallest_case']})"
        )
    return "\n".join([table(header, rows), "", *notes])


def compare(base: str, chosen: dict[str, dict], rounds: int) -> dict:
    """Measure the chosen cases in the working tree and at the commit `base`."""
    from harness import machine

    try:
        old = git("rev-parse", "--verify", "--quiet", "--short", f"{base}^{{commit}}")
    except ValueError:
        raise ValueError(f"BASE={base!r:.60} is not a commit of the repository {REPOSITORY}") from None
    versions = {"old": old, "new": git("describe", "--always", "--dirty")}
    print(f"{machine()}; old {versions['old']}, new {versions['new']}", flush=True)
    found: dict[str, dict] = {}
    with checked_out(base) as folder, contextlib.ExitStack() as stack:
        workers = {"old": Worker(folder / "src"), "new": Worker(REPOSITORY / "src")}
        for worker in workers.values():
            stack.callback(worker.close)
        for name, case in chosen.items():
            try:
                found[name] = measure(case, workers, rounds)
            except RuntimeError as error:
                found[name] = {"error": str(error)}
            print(f"  {name}: {found[name].get('error') or round(found[name]['speedup'], 3)}", flush=True)
    total = summary(found)
    print(f"\n{report(found, total)}")
    return {"machine": machine(), "versions": versions, "rounds": rounds, "cases": found, "summary": total}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", metavar="BASE", help="the old commit: a hash, a tag, HEAD~5")
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, help="kinds of cases (default: all; with --presets no layers)"
    )
    parser.add_argument(
        "--presets", nargs="+", metavar="NAME", help="models to train and to decode with, by preset name"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="steps of each version (default 15; decoding: ten times as many)"
    )
    parser.add_argument("--backend", choices=("auto", "torch"), default="auto", help="backend of the layer cases")
    parser.add_argument("--json", metavar="FILE", help="also write every number to a JSON file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker()
        return
    if options.base is None:
        parser.error("BASE is missing: name the commit to compare with, such as HEAD~5")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    kinds = options.only or (["train", "decode"] if options.presets else list(KINDS))
    try:
        found = compare(options.base, cases(kinds, options.presets, options.backend), options.rounds)
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does: ends the workers and removes the worktree
    main()
