"""Mutated states, caches and model folders: one sentence, or an object that works. run.py says how, and replays one case."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from pathlib import Path

import pytest
import run
import sanitized
from fuzz_regressions import NAMED

SECONDS = {"state": 15, "cache": 20, "model": 15, "config": 10}  # a minute together
HERE = Path(__file__).parent
SANITIZED_CASES = {"state": 3000, "cache": 1500, "model": 100}
MEMORY_TESTS = tuple(f"test_{name}.py" for name in ("layer", "muon", "state", "reads_and_gates", "windowed", "start"))

needs_sanitizers = pytest.mark.skipif(
    sanitized.unavailable_reason() is not None, reason=sanitized.unavailable_reason() or ""
)


def fuzz(kind: str, seed: int, seconds: float, capsys) -> None:
    report = run.supervise(kind, seed, seconds=seconds)
    with capsys.disabled():
        print(f"\n{str(report).splitlines()[0]}", flush=True)
    assert not report.faults, f"python tests/fuzz/run.py with\n{report}"
    assert report.cases > seconds / 10 and report.outcomes["usable"] and report.outcomes["refused"], report


@pytest.mark.parametrize("kind", SECONDS)
def test_mutated_files_are_refused_in_a_sentence_or_usable(kind, capsys):
    fuzz(kind, 0, SECONDS[kind], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SECONDS)
def test_an_hour_of_mutated_files_finds_nothing(kind, capsys):
    fuzz(kind, random.randrange(1, 2**31), 60 * SECONDS[kind], capsys)


@functools.cache
def regressions(kind: str) -> dict[str, str | None]:
    return run.run_named(kind)


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in NAMED.items() for name in names])
def test_a_file_that_was_mishandled_is_not_again(kind, name):
    fault = regressions(kind)[name]
    assert fault is None, f"{fault}\npython tests/fuzz/run.py --kind {kind} --named {name}"


def test_every_case_is_a_function_of_its_seed(tmp_path):
    from fuzz_states import States

    made = []
    for place in ("a", "b"):
        target, folder = States(), tmp_path / place
        folder.mkdir()
        made.append([])
        for case in range(60):
            target.mutate(random.Random(f"state/0/{case}"), folder)
            made[-1].append((folder / "state").read_bytes())
    assert made[0] == made[1] and len(set(made[0])) > 50


# Sanitizers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sanitized")


@needs_sanitizers
@pytest.mark.slow
def test_the_kernels_run_their_grid_under_the_sanitizers(kernels_cache):
    tests = [HERE.parent / "kernels", *(HERE.parent / "memory" / name for name in MEMORY_TESTS)]
    done = subprocess.run(
        [sys.executable, str(HERE / "sanitized.py"), "-q", "-m", "not slow", *map(str, tests)],
        env=sanitized.environment(kernels_cache),
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
    )
    found = run.summary_of(done.stdout + done.stderr)
    assert done.returncode == 0, f"{found}\n{done.stdout[-3000:]}"


@needs_sanitizers
@pytest.mark.slow
@pytest.mark.parametrize("kind", SANITIZED_CASES)
def test_mutated_files_meet_no_undefined_behaviour(kind, kernels_cache):
    report = run.supervise(
        kind,
        0,
        seconds=3600,
        end=SANITIZED_CASES[kind],
        command=[sys.executable, str(HERE / "sanitized.py"), "run.py"],
        environment=sanitized.environment(kernels_cache),
        options=("--unlimited", "--case-seconds", "200"),
    )
    assert not report.faults and report.cases == SANITIZED_CASES[kind], f"under {sanitized.SANITIZE}:\n{report}"


@needs_sanitizers
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["state", "cache"])
def test_files_that_were_mishandled_meet_no_undefined_behaviour(kind, kernels_cache):
    faults = run.run_named(
        kind,
        command=[sys.executable, str(HERE / "sanitized.py"), "run.py"],
        environment=sanitized.environment(kernels_cache),
        options=("--unlimited", "--case-seconds", "200"),
    )
    assert not any(faults.values()), {name: fault for name, fault in faults.items() if fault}
