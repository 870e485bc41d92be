"""The wheel and the sdist hold what they should and work without the repository; files about the project agree with each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import mnemos

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()  # Python 3.10 has no tomllib
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)


def run(*words: object, **options) -> str:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def sources() -> dict[str, Path]:
    """Files of the package by their name in the wheel."""
    files = [p for p in (ROOT / "src").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {p.relative_to(ROOT / "src").as_posix(): p for p in files if p.suffix != ".pyc"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    pytest.importorskip("hatchling", reason="the extra dev is not installed")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of executables of an environment that has the wheel, and the packages of this environment except mnemos."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("environment")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    # Of a folder that a .pth file names, Python reads no .pth files: the editable mnemos of this environment stays unseen.
    (packages / "others.pth").write_text("\n".join(p for p in sys.path if Path(p).name.endswith("-packages")) + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    return folder / "bin"


def outside(tmp_path: Path) -> dict:
    """Keywords for subprocess: an empty working folder and home, and no variable that leads to the repository."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MNEMOS", "XDG", "VIRTUAL_ENV"))}
    (tmp_path / "home").mkdir()
    (tmp_path / "empty").mkdir()
    return {"cwd": tmp_path / "empty", "env": kept | {"HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}}


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if ".dist-info/" not in n]
        assert sorted(names) == sorted(sources())
        assert all(archive.read(name) == path.read_bytes() for name, path in sources().items())
    data = {Path(name).suffix for name in names} - {".py"}
    assert {".css", ".js", ".json", ".cpp", ".h"} <= data and "mnemos/py.typed" in names


def test_the_metadata_of_the_wheel_is_that_of_the_project(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
        assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())
    assert metadata["Version"] == mnemos.__version__
    assert metadata["License-Expression"] == "MIT"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert (metadata.get_payload() or "") == (ROOT / "README.md").read_text()


def test_the_wheel_works_in_an_empty_folder_without_the_repository(installed, tmp_path):
    where = outside(tmp_path)
    found = run(installed / "python", "-c", "import mnemos; print(mnemos.__file__)", **where).strip()
    assert Path(found).is_relative_to(installed.parent)
    help_text = run(installed / "mnemos", "--help", **where)
    assert "presets" in help_text
    assert run(installed / "mnemos", "--version", **where).split() == ["mnemos", mnemos.__version__]
    assert "titans-mag" in run(installed / "mnemos", "presets", **where)
    assert not any((tmp_path / "empty").iterdir())


@pytest.mark.slow  # compiles the kernels, half a minute
def test_the_wheel_reads_its_data_files(installed, tmp_path):
    """A model is built, reads a text, and becomes a page: style, scripts, kernels and presets come from the wheel."""
    script = """
import torch, mnemos.backends.cpu
from pathlib import Path
from mnemos.data import open_tokenizer
from mnemos.models import MnemosForCausalLM, presets
from mnemos.report import inspect, inspect_page
model = MnemosForCausalLM(presets.config("titans-mag", "nano", num_hidden_layers=1)).eval()
Path("page.html").write_text(inspect_page([inspect(model, open_tokenizer("bytes"), "To be or not to be.")]))
print(len(list(Path(mnemos.backends.cpu.__file__).parent.glob("*.cpp"))))
"""
    where = outside(tmp_path)
    assert int(run(installed / "python", "-c", script, **where)) > 3
    page = (tmp_path / "empty" / "page.html").read_text()
    assert "<style>" in page and "<script" in page


def test_the_sdist_has_all_that_tests_and_documentation_need(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    top = {name.split("/")[0] for name in names}
    assert {f"src/{name}" for name in sources()} <= names
    assert {"tests/test_packaging.py", "docs/index.md", "examples/demo.py", "experiments/run.py"} <= names
    assert {"README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "Makefile", "constraints.txt", ".github"} <= top
    assert not top & {".venv", "runs", "site", "dist", "build", ".git"}
    assert not [name for name in names if "__pycache__" in name]


def test_the_workflow_runs_make_test_on_every_supported_python():
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert jobs["cpu"]["strategy"]["matrix"]["python"] == PYTHONS
    assert re.search(r'requires-python = ">=(.+)"', PYPROJECT)[1] == PYTHONS[0]
    for job in jobs.values():
        assert job["steps"][-1]["run"] == "make test"
    assert "workflow_dispatch" in jobs["gpu"]["if"]  # never by itself


def test_pre_commit_runs_the_checks_of_make_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert all(repo["repo"] == "local" for repo in config["repos"])
    assert all(hook["language"] == "system" for hook in hooks)
    lint = re.search(r"^lint:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    commands = re.findall(r"\$\(BIN\)/(\w+ \w+)", lint)
    assert [hook["entry"].removeprefix(".venv/bin/").split(" --")[0] for hook in hooks] == commands


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert citation["version"] == mnemos.__version__ == latest
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "MIT"
    cited = {i["value"].removeprefix("arXiv:") for r in citation["references"] for i in r["identifiers"]}
    assert cited == set(re.findall(r"arxiv\.org/abs/([\d.]+)", PYPROJECT))
    papers = (ROOT / "docs/papers.md").read_text()
    assert all(number in papers for number in cited)


def test_templates_are_forms_that_ask_for_something():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert form["name"] and form["description"], path.name
            assert any(part.get("validations", {}).get("required") for part in form["body"]), path.name
