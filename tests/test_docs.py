"""Every example in the docs and docstrings runs, every command is understood, and the site builds."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import functools
import importlib
import importlib.util
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mnemos
from mnemos import cli
from mnemos.audit import CHECKS
from mnemos.cli.train import read_arguments
from mnemos.data.readers import READERS
from mnemos.eval import SUITES
from mnemos.memory.config import GATINGS
from mnemos.memory.features import FEATURES
from mnemos.memory.losses import LOSSES
from mnemos.memory.networks import STRUCTURES
from mnemos.memory.retention import RETENTIONS
from mnemos.memory.rules import RULES
from mnemos.models.gate import GATES
from mnemos.models.mixer import BLOCKS
from mnemos.train.telemetry import TRACKERS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [m.name for m in pkgutil.walk_packages(mnemos.__path__, "mnemos.")]
RUN_BY_ANOTHER_TEST = {"data.md"}  # tests/data/test_data_page.py


@pytest.fixture(autouse=True)
def registries():
    """Examples register parts; every test begins with those of the package."""
    changed: tuple[dict, ...] = (
        cli.COMMANDS,
        SUITES,
        READERS,
        TRACKERS,
        FEATURES,
        LOSSES,
        STRUCTURES,
        RULES,
        RETENTIONS,
        GATINGS,
        CHECKS,
    )
    changed += (BLOCKS, GATES)
    before = [(registry, dict(registry)) for registry in changed]
    yield
    for registry, content in before:
        registry.clear()
        registry.update(content)


def blocks(page: Path, language: str = "python") -> str:
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL))


def lines_of_code(page: Path) -> list[str]:
    """Lines of bash blocks and indented lines: what a reader may copy into a shell."""
    indented = re.findall(r"^    (\S.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return [*blocks(page, "bash").splitlines(), *indented]


def commands(page: Path) -> list[list[str]]:
    """The arguments of every mnemos command of a page."""
    found = []
    for line in lines_of_code(page):
        if line.startswith("mnemos ") or " --no-python mnemos " in line:
            words = shlex.split(line.partition(" > ")[0], comments=True)
            found.append(words[words.index("mnemos") + 1 :])
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_the_examples_of_a_page_run_top_to_bottom(page):
    exec(compile(blocks(page), page.name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_other_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: p.name)
def test_every_command_of_a_page_is_understood(page, monkeypatch, capsys):
    understood = []
    for name, command in cli.COMMANDS.items():

        def instead(*args, _name=name, **kwargs):
            understood.append(_name)

        function = functools.wraps(command.load())(instead)
        monkeypatch.setitem(cli.COMMANDS, name, dataclasses.replace(command, function=function))
    for words in commands(page):
        if words[0] == "train":
            read_arguments(words[1:])
        elif {"--help", "--tyro-print-completion"} & {*words}:
            with pytest.raises(SystemExit) as ended:
                cli.main(words)
            assert ended.value.code in (0, None), words
        else:
            assert cli.main(words) == 0, words
            assert understood.pop() == words[0], words


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_script_and_make_target_of_a_page_exists(page):
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in lines_of_code(page):
        words = [w for w in line.split() if "=" not in w]
        if words[:1] == ["python"] and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists(), line
        if words[:1] == ["make"] and len(words) > 1:
            assert words[1] in targets, line


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "bash") and p.name not in RUN_BY_ANOTHER_TEST], ids=lambda p: p.name
)
def test_the_commands_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch, capsys):
    """As they stand, but for the length of a training: `--recipe debug` comes on top of what the page says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MNEMOS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    for line in filter(None, blocks(page, "bash").splitlines()):
        command, _, file = line.partition(" > ")
        words = shlex.split(command, comments=True)
        assert words[0] == "mnemos"
        shorter = ["--recipe", "debug"] if words[1] == "train" else []
        with contextlib.suppress(SystemExit):
            assert cli.main([*words[1:], *shorter]) == 0, line
        printed = capsys.readouterr().out
        assert printed.strip(), line
        if file:
            (tmp_path / file).write_text(printed)
    assert (tmp_path / "runs" / "first" / "metrics.jsonl").exists()


def test_completion_knows_the_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--tyro-print-completion", "bash"])
    printed = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert name in printed


def reference():
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "docs" / "api_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_page_has_every_public_name_with_its_description():
    made = reference().on_page_markdown((ROOT / "docs" / "api.md").read_text())
    assert ":::" not in made
    packages = re.findall(r"^## (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    public = [name for name in MODULES if hasattr(importlib.import_module(name), "__path__")]
    assert set(packages) >= {name for name in public if hasattr(importlib.import_module(name), "__all__")}
    for package in packages:
        for name in importlib.import_module(package).__all__:
            _, _, entry = made.partition(f"{{ #{package}.{name} }}")
            described = re.sub(r"```.*?```", "", entry.partition("\n### ")[0], flags=re.DOTALL).strip()
            if package != "mnemos.compat":  # names of others, which say themselves what they are
                assert len(described) > 12, f"{package}.{name} has no docstring"


def test_docstrings_keep_their_examples_and_formulas():
    def example():
        """First line.

            W = W + S

        After.

        >>> 1 + 1
        2
        """

    expected = "First line.\n\n```text\n    W = W + S\n```\n\nAfter.\n\n```text\n>>> 1 + 1\n2\n```"
    assert reference().text(example) == expected


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("material", reason="the extra docs is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "api.html").read_text()
    assert "mnemos.memory.NeuralMemory" in page
    assert (tmp_path / "site" / "images" / "demo-recall.png").exists()


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"- {page.name}" in menu, page.name
