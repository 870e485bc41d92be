"""What a kill leaves is cleaned at the next start, and nothing that was done is done again; small files stay small in memory."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import mnemos
from mnemos.data import DataConfig, open_data
from mnemos.train import Trainer
from mnemos.train.checkpoints import Checkpoints, Contents, problem_of
from mnemos.train.distributed import World
from mnemos.train.runs import export
from small import small

ALONE = World(0, 1, torch.device("cpu"))


class Killed(BaseException):
    """What stands for SIGKILL: nothing of ours catches it."""


def open_checkpoints(run: Path, keep_last: int = 9) -> Checkpoints:
    return Checkpoints(run / "checkpoints", ALONE, keep_last, asynchronous=False, say=print)


def save(checkpoints: Checkpoints, step: int, best: float | None = None) -> None:
    assert checkpoints.save({"x": torch.full((3,), float(step))}, Contents(step, {}, {}), best)


def newest(checkpoints: Checkpoints) -> int:
    found = checkpoints.load(lambda: {"x": torch.zeros(3)})
    assert found is not None
    return int(found[0].name.removeprefix("step-"))


def kill_at(monkeypatch, number: int) -> None:
    """End the process, as it were, before its `number`-th removal of a file or folder."""
    count = itertools.count()

    def dying(function):
        def call(*args, **kwargs):
            if next(count) >= number:
                raise Killed
            return function(*args, **kwargs)

        return call

    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))


# ---- checkpoints


def test_a_checkpoint_that_holds_a_file_of_someone_else_can_be_replaced(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    save(checkpoints, 100, best=2.0)
    (checkpoints.path(100) / ".DS_Store").write_text("not ours")
    save(checkpoints, 100, best=1.0)
    assert checkpoints.best() == {"step": 100, "val_loss": 1.0} and not problem_of(checkpoints.path(100))
    assert (checkpoints.path(100) / ".DS_Store").read_text() == "not ours"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000100"]


@pytest.mark.parametrize("number", range(3))
def test_a_kill_while_a_checkpoint_is_replaced_leaves_one_of_both(tmp_path, monkeypatch, number):
    checkpoints = open_checkpoints(tmp_path)
    save(checkpoints, 100)
    count, rename = itertools.count(), Path.rename

    def dying(path, target):
        if "step-" in path.name and next(count) >= number:
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        if number < 2:
            with pytest.raises(Killed):
                save(checkpoints, 100)
        else:
            save(checkpoints, 100)
    again = open_checkpoints(tmp_path)
    assert newest(again) == 100
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000100"]


def test_a_checkpoint_that_cannot_take_its_name_leaves_the_old_one(tmp_path, monkeypatch):
    checkpoints = open_checkpoints(tmp_path)
    save(checkpoints, 100)
    rename = Path.rename

    def failing(path, target):
        if path.name.endswith(".part"):
            raise OSError("no space")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        assert not checkpoints.save({"x": torch.zeros(3)}, Contents(100, {}, {}), None, wait=True)
    assert newest(open_checkpoints(tmp_path)) == 100


@pytest.mark.parametrize("number", range(6))
def test_a_kill_while_a_checkpoint_is_removed_leaves_nothing_after_the_next_start(tmp_path, monkeypatch, number):
    checkpoints = open_checkpoints(tmp_path)
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.keep_last = 1
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, number)
        checkpoints._prune()
    again = open_checkpoints(tmp_path)
    assert again.steps()[-1] == 3 and not any(problem_of(again.path(step)) for step in again.steps())
    assert {p.name for p in again.folder.iterdir()} == {f"step-{step:06d}" for step in again.steps()}


@pytest.mark.parametrize("number", range(13))
def test_a_kill_while_a_course_is_given_up_never_brings_it_back(tmp_path, monkeypatch, number):
    checkpoints = open_checkpoints(tmp_path)
    for step in (2, 4, 6, 8):
        save(checkpoints, step)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, number)
        checkpoints.forget_after(2)
    again = open_checkpoints(tmp_path)
    assert newest(again) == 2 and again.steps() == [2]
    assert {p.name for p in again.folder.iterdir()} == {"step-000002"}


def test_the_best_of_a_course_that_was_given_up_is_kept_but_no_run_goes_on_from_it(tmp_path):
    checkpoints = open_checkpoints(tmp_path, keep_last=3)
    for step in (2, 4, 6):
        save(checkpoints, step, best=0.5 if step == 6 else None)
    checkpoints.forget_after(2)
    again = open_checkpoints(tmp_path, keep_last=3)
    assert again.steps() == [2, 6] and newest(again) == 2
    for step in (3, 4, 5):
        save(again, step)
    assert again.steps() == [3, 4, 5, 6] and newest(again) == 5
    save(again, 6, best=0.4)  # the same step, of the course that goes on
    assert newest(open_checkpoints(tmp_path)) == 6


def test_leftovers_are_removed_and_files_of_others_are_not(tmp_path):
    result = Trainer(small(tmp_path, steps=2)).train()
    run, hexa = result.path, "0123456789abcdef"
    ours = [run / f".metrics.jsonl.{hexa}.part", run / f".best.json.{hexa}.part"]
    ours += [run / "tokenizer" / f".tokenizer.json.{hexa}.part", run / "checkpoints" / "step-000001" / "state.json"]
    ours += [run / "checkpoints" / ".step-000001.part" / f".state.json.{hexa}.part"]
    others = [run / "thesis.part", run / f".thesis.{hexa}.part", run / "checkpoints" / "step-one" / "state.json"]
    for file in (*ours, *others):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
    Trainer(small(tmp_path, steps=2), resume=True).train()
    assert [file.name for file in ours if file.exists()] == [] and all(file.exists() for file in others)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-one"]


def test_an_export_removes_what_a_killed_one_left(tmp_path):
    pytest.importorskip("tokenizers")
    run = Trainer(small(tmp_path, steps=1)).train().path
    old, young = (tmp_path / f".out.{digit * 16}.part" for digit in "ab")
    for folder in (old, young):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    os.utime(old, (0, 0))
    export(run, tmp_path / "out")
    assert not old.exists() and young.exists()


def test_parts_of_shards_and_tokenizers_are_removed(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question\n" * 99)
    config = DataConfig(sources=(str(tmp_path / "a.txt"),), tokenizer="bpe:270", cache_dir=str(tmp_path), seq_len=16)
    open_data(config)
    (shards,) = (p for p in (tmp_path / "shards").iterdir() if p.is_dir())
    (trained,) = (p for p in (tmp_path / "tokenizers").iterdir() if p.is_dir())
    (shards / "index.json").unlink()
    (trained / "tokenizer_config.json").unlink()
    left = [shards / ".00000.bin.0123456789abcdef.part", trained / ".tokenizer.json.0123456789abcdef.part"]
    for file in left:
        file.touch()
    open_data(config)
    assert not any(file.exists() for file in left)


# ---- records


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_samples_beyond_the_checkpoint_are_cut_off_on_resume(tmp_path):
    watch = {"sample_every": 2, "sample_tokens": 3}
    run = Trainer(small(tmp_path, steps=8, checkpoint={"every": 3}, watch=watch)).train().path
    assert steps_of(run / "samples.jsonl") == [2, 4, 6, 8]
    whole = (run / "samples.jsonl").read_text()
    for step in (6, 8):
        (run / "checkpoints" / f"step-{step:06d}" / "manifest.json").unlink()
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"step": 9, "te')
    Trainer(small(tmp_path, steps=8, checkpoint={"every": 3}, watch=watch), resume=True).train()
    assert (run / "samples.jsonl").read_text() == whole


def test_resuming_a_finished_run_repeats_nothing(tmp_path, capsys):
    watch = {"validate_every": 3, "sample_tokens": 3}
    done = Trainer(small(tmp_path, steps=4, watch=watch)).train()
    state = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in done.path.rglob("*") if p.suffix in (".jsonl", ".json")}
    again = Trainer(small(tmp_path, steps=4, watch=watch), resume=True, display=True).train()
    assert again.saved and not again.stopped and (again.step, again.val_loss) == (4, done.val_loss)
    assert "is finished" in capsys.readouterr().out
    for path, (content, changed) in state.items():
        assert path.read_bytes() == content, path
        assert "checkpoints" not in path.parts or path.stat().st_mtime_ns == changed, path


def test_a_run_killed_before_its_last_sample_makes_only_that(tmp_path):
    watch = {"validate_every": 3, "sample_tokens": 3}
    run = Trainer(small(tmp_path, steps=4, watch=watch)).train().path
    sample = (run / "samples.jsonl").read_text()
    (run / "samples.jsonl").unlink()
    validated = (run / "metrics.jsonl").read_text().count('"kind": "validate"')
    Trainer(small(tmp_path, steps=4, watch=watch), resume=True).train()
    assert steps_of(run / "samples.jsonl") == [4] == [json.loads(sample)["step"]]
    assert (run / "metrics.jsonl").read_text().count('"kind": "validate"') == validated


def test_a_finished_run_can_be_trained_further(tmp_path):
    Trainer(small(tmp_path, steps=2)).train()
    assert Trainer(small(tmp_path, steps=4), resume=True).train().step == 4


# ---- parquet

READ = """
import resource, sys
from mnemos.data.parquet import open_parquet
from mnemos.data.reader import Item
from mnemos.data.readers import ReadRules, read
from mnemos.data.report import ReadReport
open_parquet(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
report, rows, size = ReadReport(), 0, 0
try:
    for piece in read(Item("parquet", sys.argv[1]), ReadRules(), report):
        rows, size = rows + 1, size + len(piece.text)
        if rows == 40:
            break
except ValueError as no:
    print(no)
print(rows, size, dict(report.skipped))
"""


def read_in_little_memory(path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(mnemos.__file__).parents[1])}
    environment |= {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}  # pools of its own reserve addresses
    done = subprocess.run([sys.executable, "-c", READ, str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bomb(path: Path, size: int, rows: int, **options) -> Path:
    """Rows that share one long value: a kilobyte of file."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cells = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array(["x" * size]))
    options = {
        "compression": "zstd",
        "compression_level": 19,
        "write_statistics": False,
        "store_schema": False,
    } | options
    parquet.write_table(pyarrow.table({"text": cells}), path, **options)
    return path


@pytest.mark.parametrize("options", [{}, {"data_page_version": "2.0"}, {"store_schema": True}], ids=str)
def test_a_kilobyte_that_expands_to_gigabytes_is_read_row_by_row(tmp_path, options):
    path = bomb(tmp_path / "a.parquet", 2**24, 1000, **options)
    assert path.stat().st_size < 3000
    assert read_in_little_memory(path) == f"40 {40 * 2**24} {{}}\n"


@pytest.mark.slow
def test_long_rows_that_are_all_there_are_read_row_by_row(tmp_path):
    """No dictionary: each row is a page of its own, packed a thousand times smaller than it is."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    schema = pyarrow.schema([("text", pyarrow.string())])
    with parquet.ParquetWriter(path, schema, compression="zstd", use_dictionary=False, write_batch_size=1) as writer:
        writer.write_table(pyarrow.table({"text": ["x" * 2**24] * 64}, schema), row_group_size=64)
    assert read_in_little_memory(path) == f"40 {40 * 2**24} {{}}\n"


def test_one_gigantic_value_is_refused_with_the_limit(tmp_path):
    path = bomb(tmp_path / "a.parquet", 2**29, 1)
    said = read_in_little_memory(path)
    assert f"has a value of {2**29 + 4} bytes, more than {2**26}: write it with shorter rows" in said
    assert len(said.splitlines()) == 2


def test_a_column_that_holds_no_text_is_not_unpacked(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cells = pyarrow.ListArray.from_arrays([0, 10**8], pyarrow.array(numpy.full(10**8, 7, numpy.int8)))
    parquet.write_table(pyarrow.table({"text": cells}), tmp_path / "a.parquet", compression="zstd")
    assert read_in_little_memory(tmp_path / "a.parquet") == "0 0 {'no_text': 1}\n"


@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "none"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_pages_of_every_kind_of_file_are_found(tmp_path, compression, version):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from mnemos.data.parquet_pages import read_pages

    texts = [f"{i} " * (1 + i % 50) for i in range(3000)] + ["y" * 70_000]
    path = tmp_path / "a.parquet"
    options = {"compression": compression, "data_page_version": version, "data_page_size": 4000}
    parquet.write_table(pyarrow.table({"text": texts}), path, use_dictionary=False, write_batch_size=10, **options)
    chunk = parquet.ParquetFile(path).metadata.row_group(0).column(0)
    with open(path, "rb") as file:
        pages = read_pages(file, chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size)
    assert sum(page.values for page in pages) == 3001 and 70_000 < max(page.bytes for page in pages) < 80_000
    assert abs(sum(page.bytes for page in pages) - sum(4 + len(text) for text in texts)) < 50 * len(pages)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64])
def test_the_most_that_rows_can_take_is_that_of_the_pages_they_touch(rows):
    from mnemos.data.parquet_pages import Page, bytes_of_rows

    pages = [Page(10 + 7 * i % 31, 1 + 5 * i % 9, False) for i in range(40)]
    place = [i for i, page in enumerate(pages) for _ in range(page.values)]
    windows = [set(place[first : first + rows]) for first in range(len(place) - rows + 1)]
    assert bytes_of_rows(pages, rows) == max(sum(pages[i].bytes for i in window) for window in windows)


def test_a_damaged_page_header_is_one_sentence(tmp_path):
    path = bomb(tmp_path / "a.parquet", 1000, 10)
    raw = bytearray(path.read_bytes())
    raw[4:12] = b"\xff" * 8
    path.write_bytes(raw)
    assert "is damaged: " in read_in_little_memory(path)
