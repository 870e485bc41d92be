"""Fuzz loading and use of files: `python tests/fuzz/run.py --kind state --seed 1 --seconds 20`; one case again with `--case 4567`.

Every case is a function of (kind, seed, case) alone. A worker process runs the cases one after the other, under a limit of memory
and of time per case; a supervisor reads from shared memory which case a dead worker had begun, and starts another behind it.
A case is well handled if it ends in one ValueError or OSError of one sentence, or if all that is done with the loaded object works.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import json
import math
import mmap
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"
KINDS = ("state", "cache", "model", "config", "mixed")
CASE_SECONDS = 20
MEMORY_BYTES = 4 << 30  # on top of what the process has mapped at its start
LONGEST_MESSAGE = 600  # characters; a list of all choices of a memory has about 450
HANGS = (signal.SIGPROF, signal.SIGALRM)


def target_of(kind: str):
    """The target of a kind; imports torch and mnemos."""
    if kind == "state":
        from fuzz_states import States as Kind
    elif kind == "cache":
        from fuzz_caches import Caches as Kind
    elif kind == "model":
        from fuzz_models import Models as Kind
    elif kind == "mixed":
        from fuzz_mixed import Mixed as Kind
    else:
        from fuzz_configs import Configs as Kind
    return Kind()


# One case -----------------------------------------------------------------------------------------------------------


def fault_of(error: BaseException, folder: Path) -> str | None:
    """What is wrong with an error as an answer to a bad file; None if it is a clear refusal."""
    message = str(error).replace(str(folder), "")
    if not isinstance(error, ValueError | OSError):
        return f"{type(error).__name__}: {message[:300]}"
    if not message.strip():
        return f"{type(error).__name__} without a message"
    if "\n" in message.strip() or "Traceback" in message:
        return f"{type(error).__name__} of several lines: {message[:300]!r}"
    if len(message) > LONGEST_MESSAGE:
        return f"{type(error).__name__} of {len(message)} characters: {message[:300]}"
    return None


def place_of(error: BaseException) -> str:
    """The innermost line of mnemos, or of the target, that the error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "mnemos" in f.filename and "/fuzz/" not in f.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"


def run_case(target, seed: int, case: int, folder: Path, named: str | None = None) -> tuple[str, str | None]:
    """(outcome, fault) of one case; the fault is None where the property holds. named: the file is that of this name."""
    from fuzz_target import Overflow

    rng = Random(f"{target.kind}/{seed}/{case}")
    target.stage = "start"
    if named is None:
        target.mutate(rng, folder)
    else:
        from fuzz_regressions import write_named

        write_named(target, named, folder)
    try:
        target.use(rng, folder)
    except KeyboardInterrupt:
        raise
    except Overflow:
        return "overflow", None
    except BaseException as error:  # a panic of Rust code is no Exception
        fault = fault_of(error, folder)
        if fault is None:
            return f"refused after {target.stage}" if target.stage != "start" else "refused", None
        return "failed", f"{fault} [{target.stage}, {place_of(error)}]"
    return "usable", None


# Worker -------------------------------------------------------------------------------------------------------------


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def watch(seconds: float) -> None:
    """End the process after so much work, or after much more time without: a busy machine is no hang. 0: no longer."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)


def work(args: argparse.Namespace) -> None:
    """Run cases from --case on; write the number of each into --progress before it begins."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    target, names, plans = target_of(args.kind), (), 1
    if args.named:
        from fuzz_regressions import NAMED
        from fuzz_regressions import PLANS as plans

        names = NAMED[args.kind]
    if not args.unlimited:  # sanitizers map terabytes, and tell more of a crash than Python does
        limit_memory()
        faulthandler.enable()
    for hang in HANGS:
        signal.signal(hang, signal.SIG_DFL)
        faulthandler.register(hang, chain=True)  # the stack of what hangs, then the end
    outcomes: collections.Counter[str] = collections.Counter()
    folder = Path(args.progress).with_name("cases")
    with open(args.progress, "r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        started, case = time.monotonic(), args.case
        shared[8:16] = struct.pack("<q", 1)  # the corpus is ready
        while case < args.end and time.monotonic() - started < args.seconds:
            shared[0:8] = struct.pack("<q", case)
            watch(args.case_seconds)
            outcome, fault = run_case(target, args.seed, case, folder, names[case // plans] if names else None)
            watch(0)
            outcomes[outcome] += 1
            if fault is not None:
                print(json.dumps({"case": case, "fault": fault}), flush=True)
            case += 1
            if case % 256 == 0:
                print(json.dumps({"outcomes": outcomes}), flush=True)
                outcomes.clear()
        shared[0:8] = struct.pack("<q", -1)
        print(json.dumps({"outcomes": outcomes, "next": case}), flush=True)


# Supervisor ---------------------------------------------------------------------------------------------------------


class Report:
    """Counts of outcomes, and one example of each fault."""

    def __init__(self, kind: str, seed: int):
        self.kind, self.seed = kind, seed
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.faults: dict[str, list] = {}
        self.every: list[tuple[int, str]] = []
        self.seconds = 0.0

    def add_fault(self, case: int, fault: str) -> None:
        self.every.append((case, fault))
        kind, place = re.match(r"\w*", fault), re.search(r"\[.*?\]$|died .*", fault)
        same = (
            f"{kind and kind[0]} {place and place[0]}"
            if "Mismatch" not in fault
            else re.sub(r"[0-9.]+", "#", fault)[:60]
        )
        self.faults.setdefault(same, [0, case, fault])[0] += 1

    @property
    def cases(self) -> int:
        return sum(self.outcomes.values())

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {name}" for name, n in sorted(self.outcomes.items()))
        rate = self.cases / max(self.seconds, 1e-9)
        lines = [
            f"{self.kind}: {self.cases} cases of seed {self.seed} in {self.seconds:.0f} s ({rate:.0f}/s): {counts}"
        ]
        for count, case, fault in sorted(self.faults.values(), reverse=True):
            lines.append(f"  {count}x {fault}\n     --kind {self.kind} --seed {self.seed} --case {case}")
        return "\n".join(lines)


def supervise(
    kind: str,
    seed: int,
    *,
    seconds: float,
    first: int = 0,
    end: int = 2**62,
    most_faults: int = 100,
    command: list[str] | None = None,
    environment: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
) -> Report:
    """Run cases in worker processes until the time is over, `end` is reached, or there are `most_faults` kinds of faults."""
    report = Report(kind, seed)
    env = (os.environ if environment is None else environment) | {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(HERE), *filter(None, [env.get("PYTHONPATH")])])
    case = first
    base = (
        "/dev/shm" if os.path.isdir("/dev/shm") else None
    )  # in memory; the supervisor's own, for a dead worker cleans nothing
    with tempfile.TemporaryDirectory(dir=base) as name:
        progress = Path(name) / "progress"
        while case < end and report.seconds < seconds and len(report.faults) < most_faults:
            progress.write_bytes(struct.pack("<qq", case, 0))
            worker = [*(command or [sys.executable, str(HERE / "run.py")]), "--worker", str(progress)]
            worker += ["--kind", kind, "--seed", str(seed), "--case", str(case), "--end", str(end), *options]
            worker += ["--seconds", str(seconds - report.seconds)]
            started = time.monotonic()
            with (Path(name) / "errors").open("w+b") as errors:
                process = subprocess.Popen(worker, stdout=subprocess.PIPE, stderr=errors, env=env, text=True)
                finished, counted = None, report.cases
                assert process.stdout is not None
                with process.stdout as lines:
                    for line in lines:
                        with contextlib.suppress(ValueError):
                            said = json.loads(line)
                            report.outcomes.update(said.get("outcomes", {}))
                            finished = said.get("next", finished)
                            if "fault" in said:
                                report.add_fault(said["case"], said["fault"])
                status = process.wait()
                errors.seek(0)
                text = errors.read().decode(errors="replace")
            report.seconds += time.monotonic() - started
            if finished is not None and status == 0:
                break
            at, ready = struct.unpack("<qq", progress.read_bytes())
            if not ready:
                report.add_fault(case, f"the worker did not start: {text.strip()[-600:]}")
                break
            how = f"status {status}" if status >= 0 else signal.Signals(-status).name
            if -status in HANGS:
                how = "hangs"
            report.outcomes["not told apart"] += at - case - (report.cases - counted)
            report.outcomes["died"] += 1
            report.add_fault(at, f"process died ({how}): {summary_of(text)}")
            case = at + 1
    return report


def run_named(kind: str, names: str = "all", options: tuple[str, ...] = (), **arguments) -> dict[str, str | None]:
    """The fault of each file of the regression corpus, or of those whose names are given (comma between them); None: well handled."""
    from fuzz_regressions import NAMED, PLANS

    faults: dict[str, str | None] = {}
    if kind not in NAMED:
        raise SystemExit(f"--named goes with --kind {', '.join(NAMED)}")
    asked = [i for i, name in enumerate(NAMED[kind]) if names == "all" or name in names.split(",")]
    for first, end in [(0, len(NAMED[kind]))] if names == "all" else [(i, i + 1) for i in asked]:
        report = supervise(
            kind,
            0,
            seconds=3600,
            first=first * PLANS,
            end=end * PLANS,
            options=("--named", "all", *options),
            **arguments,
        )
        for i in range(first, end):
            found = [fault for case, fault in report.every if i * PLANS <= case < (i + 1) * PLANS]
            faults[NAMED[kind][i]] = found[0] if found else None
    return faults


def summary_of(text: str) -> str:
    """The lines of a dead worker's errors that say where it was."""
    said = [line.strip() for line in text.splitlines() if "ERROR: AddressSanitizer" in line or "runtime error:" in line]
    places = re.findall(r'File "[^"]*/([^/"]+)", line (\d+) in (\w+)', text)
    frames = re.findall(r"#\d+ 0x\w+ in (.*?) (\S+?\.(?:cpp|h):\d+)", text)
    said += [f"{name} {Path(place).name}" for name, place in frames[:3]]
    return "; ".join([*said[:4], *(f"{file}:{line} {name}" for file, line, name in places[:4])]) or text.strip()[-300:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, default=None, help="this case alone")
    parser.add_argument("--cases", type=int, default=None, help="so many cases")
    parser.add_argument("--named", help="files of the regression corpus: names with commas between them, or all")
    parser.add_argument("--seconds", type=float, default=None, help="stop after this time (60; with --cases, none)")
    parser.add_argument("--case-seconds", type=float, default=CASE_SECONDS)
    parser.add_argument("--unlimited", action="store_true", help="no limit of memory (for sanitizers)")
    parser.add_argument("--worker", dest="progress", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.progress:
        return work(args)
    first, end = args.case or 0, 2**62
    if args.named:
        sys.path.insert(0, str(SOURCE))
        report = run_named(args.kind, args.named)
        print("\n".join(f"{name}: {fault or 'well handled'}" for name, fault in report.items()))
        sys.exit(any(report.values()))
    if args.case is not None:
        end = args.case + 1
    elif args.cases is not None:
        end = args.cases
    options = (*(["--unlimited"] if args.unlimited else []), "--case-seconds", str(args.case_seconds))
    seconds = args.seconds or (60.0 if args.cases is None else math.inf)
    report = supervise(args.kind, args.seed, seconds=seconds, first=first, end=end, options=options)
    print(report)
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
