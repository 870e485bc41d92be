"""Code that lies in the working folder is not run, whatever its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mnemos
from mnemos.data import ByteTokenizer, open_tokenizer
from mnemos.interpreter import command

SRC = str(Path(mnemos.__file__).parents[1])
STANDARD = (
    "json",
    "pickle",
    "multiprocessing",
    "subprocess",
    "queue",
    "struct",
    "random",
    "contextlib",
    "sitecustomize",
)
INSTALLED = ("numpy", "torch", "tokenizers", "transformers", "filelock", "safetensors", "rich", "yaml", "tyro")
HOSTILE = "import os\nopen(os.path.join({folder!r}, 'ran-' + __name__), 'w').close()\nraise ImportError('hostile')\n"
COMMAND_LINE = "import sys; from mnemos.cli import main; sys.exit(main())"  # what the `mnemos` script holds
POOL = "from mnemos.trials import run_all; assert dict(run_all(dict, [([('a', 1)],)] * 2, 2))[1] == {'a': 1}"
SMALL_PARTS = "from mnemos.data import build, sharding; sharding.PART_BYTES, build.MIN_BYTES_FOR_PROCESSES = 4000, 0; "


@pytest.fixture
def trap(tmp_path):
    """A folder full of modules that leave a file `ran-…` in it when they run."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in STANDARD + INSTALLED:
        (folder / f"{name}.py").write_text(HOSTILE.format(folder=str(folder)))
    return folder


def run(code: str | None, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a script that lies elsewhere, as `mnemos` itself does, or (None) `python -m mnemos`."""
    script = folder.parent / "elsewhere" / "script.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(code or "")
    start = [str(script)] if code else ["-m", "mnemos"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment = kept | {"PYTHONPATH": SRC, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, *start, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def marks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("ran-*"))


def test_processes_that_tokenise_run_nothing_of_the_working_folder(trap, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(4):
        (corpus / f"{i}.txt").write_text("so it goes, " * 300)
    arguments = ["data", "build", str(corpus), "--workers", "2", "--cache-dir", str(tmp_path / "cache")]
    done = run(SMALL_PARTS + COMMAND_LINE, *arguments, "--seq-len", "64", folder=trap)
    assert marks(trap) == [] and done.returncode == 0, done.stderr
    assert len(list((tmp_path / "cache" / "shards").glob("*/*.bin"))) == 4


def test_processes_of_ablations_and_experiments_run_nothing_of_the_working_folder(trap):
    done = run(POOL, folder=trap)
    assert marks(trap) == [] and done.returncode == 0, done.stderr


def test_the_command_line_runs_nothing_of_the_working_folder(trap):
    assert run(COMMAND_LINE, "presets", folder=trap).returncode == 0
    assert marks(trap) == []


def test_python_m_takes_no_installed_package_from_the_working_folder(trap):
    """Python has the working folder first on its path until our first line runs; then it goes."""
    for name in STANDARD:
        (trap / f"{name}.py").unlink()
    done = run(None, "presets", folder=trap)
    assert marks(trap) == [] and done.returncode == 0, done.stderr


def test_a_worker_has_the_path_of_its_parent_and_no_other(trap, monkeypatch):
    monkeypatch.chdir(trap)
    monkeypatch.setattr(sys, "path", ["", *sys.path, "relative"])
    code = command("mnemos.x")[-1]
    paths = eval(code.partition("sys.path[:] = ")[2].partition("; from")[0])
    assert str(trap) not in paths and "" not in paths
    assert paths[-1] == str(trap / "relative") and set(map(os.path.abspath, filter(None, sys.path))) <= set(paths)


def test_a_folder_named_as_a_tokenizer_or_a_source_of_ours_is_not_taken_for_it(trap, monkeypatch):
    from mnemos.data.readers import ReadRules
    from mnemos.data.sources import resolve

    monkeypatch.chdir(trap)
    for name in ("bytes", "embedded", "python-edu"):
        (trap / name).mkdir()
        (trap / name / "tokenizer_config.json").write_text("{}")
    assert isinstance(open_tokenizer("bytes"), ByteTokenizer)
    assert [source.items[0].kind for source in resolve(("embedded", "python-edu"), ReadRules())] == ["embedded", "hub"]
