"""Checkpoints as files: what is kept, what is never replaced, what a kill at a bad moment leaves."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from filelock import FileLock

from mnemos.train.checkpoints import Checkpoints, Contents, problem_of
from mnemos.train.distributed import World
from mnemos.train.records import list_runs
from mnemos.train.runs import _claim, check_free, prepare_folder
from mnemos.train.telemetry import Metrics, read_metrics
from small import small

ALONE = World(0, 1, torch.device("cpu"))


class Named:
    """A tokenizer, as far as a run's folder needs one."""

    def save(self, folder) -> None:
        (folder / "tokenizer.json").write_text("{}")


def open_checkpoints(tmp_path, keep_last: int = 9) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", ALONE, keep_last, asynchronous=False, say=print)


def save(checkpoints: Checkpoints, step: int, value: float, best: float | None = None) -> bool:
    return checkpoints.save({"x": torch.full((3,), value)}, Contents(step, {}, {}), best)


def read(checkpoints: Checkpoints, step: int) -> float:
    x = torch.zeros(3)
    found = checkpoints.load(lambda: {"x": x}, step)
    assert found is not None and found[0] == checkpoints.path(step)
    return x[0].item()


def test_the_best_is_not_replaced_by_a_later_visit_to_its_step(tmp_path):
    """A run that goes back past its best comes to the same step again, with other weights."""
    checkpoints = open_checkpoints(tmp_path)
    assert save(checkpoints, 4, 1.0, best=0.5)
    assert save(checkpoints, 4, 2.0)
    assert read(checkpoints, 4) == 1.0
    assert save(checkpoints, 4, 3.0, best=0.4)
    assert read(checkpoints, 4) == 3.0


def test_a_course_that_was_given_up_leaves_only_its_best(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    for step in (2, 4, 6, 8):
        save(checkpoints, step, float(step), best=0.5 if step == 6 else None)
    checkpoints.forget_after(2)
    assert checkpoints.steps() == [2, 6]


def test_a_checkpoint_that_was_whole_but_for_its_name_is_not_lost(tmp_path):
    """Killed between the removal of the old folder of a step and the renaming of the new one."""
    checkpoints = open_checkpoints(tmp_path)
    save(checkpoints, 3, 1.0)
    checkpoints.path(3).rename(tmp_path / "checkpoints" / ".step-000003.part")
    (tmp_path / "checkpoints" / "step-000003" / "tensors").mkdir(parents=True)  # a removal that was cut off
    again = open_checkpoints(tmp_path)
    assert again.steps() == [3] and not problem_of(again.path(3)) and read(again, 3) == 1.0
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_full_disk_holds_lines_back_and_does_not_end_a_run(tmp_path):
    said: list[str] = []
    metrics = Metrics(tmp_path, [], say=said.append)
    metrics.log(1, "train", loss=3.0)
    with open("/dev/full", "ab", buffering=0) as full:
        kept, metrics.file = metrics.file, full
        metrics.log(2, "train", loss=2.0)
        metrics.log(3, "train", loss=1.0)
        metrics.file = kept
    assert len(said) == 1 and "No space left on device; training continues" in said[0]
    metrics.log(4, "train", loss=0.5)
    metrics.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_run_that_another_process_trains_is_left_alone(tmp_path):
    config = small(tmp_path)
    path, lock = prepare_folder(config, ALONE, False, Named())
    assert lock is not None
    lock.release()
    theirs = '{"step": 1, "kind": "train"}\n'
    (path / "metrics.jsonl").write_text(theirs)
    code = "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); input()"
    command = [sys.executable, "-c", code, str(path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="is being trained by another process"):
            prepare_folder(config, ALONE, False, Named())
        assert (path / "metrics.jsonl").read_text() == theirs
        other.kill()
    _, lock = prepare_folder(config, ALONE, False, Named())  # a lock dies with its process
    assert isinstance(lock, FileLock)
    lock.release()


def test_a_new_run_takes_nothing_from_what_a_killed_one_left(tmp_path):
    config = small(tmp_path)
    left = open_checkpoints(tmp_path / "runs" / "a")
    save(left, 3, 1.0)
    left.path(3).rename(left.folder / ".step-000003.part")
    path, lock = prepare_folder(config, ALONE, False, Named())
    assert lock is not None
    lock.release()
    assert open_checkpoints(path).steps() == []


def test_two_runs_that_ask_at_once_get_two_names(tmp_path):
    assert [_claim(tmp_path / "runs", "atlas-mag-nano") for _ in range(3)] == [
        "atlas-mag-nano",
        "atlas-mag-nano-2",
        "atlas-mag-nano-3",
    ]


def test_a_run_that_cannot_be_read_does_not_hide_the_others(tmp_path):
    small(tmp_path).save(_folder(tmp_path, "good") / "config.yaml")
    (_folder(tmp_path, "bad") / "config.yaml").write_text("no_such_field: 1")
    problems: list[str] = []
    assert [run.name for run in list_runs(tmp_path / "runs", problems.append)] == ["good"]
    assert len(problems) == 1 and "no_such_field" in problems[0]


def test_a_name_that_is_taken_is_refused_before_anything_is_read(tmp_path):
    config = small(tmp_path)
    checkpoints = open_checkpoints(tmp_path / "runs" / "a")
    check_free(config)
    save(checkpoints, 1, 1.0)
    with pytest.raises(ValueError, match="holds a run already: continue it with --resume"):
        check_free(config)
    assert json.loads((checkpoints.path(1) / "state.json").read_text())["step"] == 1


def _folder(tmp_path, name: str):
    path = tmp_path / "runs" / name
    path.mkdir(parents=True)
    return path
