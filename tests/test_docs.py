"""Every example in the docs and docstrings runs, every command is understood, and the site builds."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import functools
import importlib
import importlib.util
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mnemos
from mnemos import cli
from mnemos.audit import CHECKS
from mnemos.cli.train import read_arguments
from mnemos.data.readers import READERS
from mnemos.eval import SUITES
from mnemos.memory import NeuralMemory, NeuralMemoryConfig
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
RUN_BY_ANOTHER_TEST = {"data.md", "attach.md"}  # tests/data/test_data_page.py, tests/train/test_attached_page.py


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
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: p.name)
def test_every_command_of_a_page_is_understood(page, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"```yaml\n# (\S+)\n(.*?)```", page.read_text(), re.DOTALL):
        Path(name).write_text(content)
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


RUN_WHERE = {  # language of a block -> the pages that may have one, and why it runs or need not
    "python": None,  # on any page: run by this file
    "bash": None,  # run by this file, or by RUN_BY_ANOTHER_TEST
    "text": None,  # output, formulas, and conversations with trained models
    "py": {"serving.md"},  # with "sh" run by tests/serve/test_serve_docs.py, against a server
    "sh": {"serving.md"},
    "yaml": {"attach.md"},  # the config of its commands, which run
    "bibtex": {"papers.md"},  # citations
}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_block_of_a_page_runs_or_has_a_reason_not_to(page):
    fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0 and set(fences[1::2]) <= {""}
    for language in fences[::2]:
        assert language in RUN_WHERE, f"nothing runs a block of {language!r}"
        assert RUN_WHERE[language] is None or page.name in RUN_WHERE[language], language


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_extra_that_a_page_installs_exists(page):
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2], re.MULTILINE)
    for line in lines_of_code(page):
        for named in re.findall(r"(?:\.|mnemos|\.whl)\[([\w,]+)\]", line if "pip" in line else ""):
            assert {*named.split(",")} <= {*extras}, line


def test_completion_knows_the_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--tyro-print-completion", "bash"])
    printed = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert name in printed


def notebook() -> dict:
    return json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())


def test_the_cells_of_the_tutorial_run(capsys, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    matplotlib.use("Agg")
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(notebook()["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"tutorial, cell {number}", "exec"), names)
    assert names["accuracy"][True] > 0.9 > 0.5 > names["accuracy"][False]
    printed = capsys.readouterr().out
    kept = [o for cell in notebook()["cells"] for o in cell.get("outputs", ())]
    streams = "".join("".join(output["text"]) for output in kept if output["output_type"] == "stream")
    digits = re.compile(r"[\d.,e-]+")
    assert digits.sub("", printed) == digits.sub(
        "", streams
    )  # the notebook shows what its cells print, but for numbers


def test_the_notebook_is_valid_and_without_errors():
    nbformat = pytest.importorskip("nbformat", reason="the extra docs is not installed")
    nbformat.validate(nbformat.from_dict(notebook()))
    code = [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    assert not [o for cell in code for o in cell["outputs"] if o["output_type"] == "error" or o.get("name") == "stderr"]


def hook(name: str = "api_reference"):
    """A module of docs/, which mkdocs calls while it builds the site."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_page_has_every_public_name_with_its_description():
    made = hook().on_page_markdown((ROOT / "docs" / "api.md").read_text())
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


@dataclasses.dataclass
class Example:
    decay: float = 0.999
    name: str = "gd"
    rows: list[int] = dataclasses.field(default_factory=list)
    long_name_of_a_field_that_makes_the_line_long: int | None = None


def test_signatures_are_whole():
    def function(x: torch.Tensor, /, size: int = 3, *, work=lambda: 0, **fields: Any) -> None: ...

    signature = hook().signature
    assert signature(function) == "(x: Tensor, /, size: int = 3, *, work=..., **fields: Any) -> None"
    lines = signature(Example).splitlines()
    assert lines[1:4] == ["    decay: float = 0.999,", '    name: str = "gd",', "    rows: list[int] = [],"]
    memory = signature(NeuralMemory, "NeuralMemory")
    for field in dataclasses.fields(NeuralMemoryConfig):
        assert f"    {field.name}: " in memory, field.name
    assert "retain_init: float = 0.999," in memory


def test_docstrings_keep_their_examples_and_formulas():
    def example():
        """First line.

            W = W + S

        After.

        >>> 1 + 1
        2
        """

    expected = "First line.\n\n```text\n    W = W + S\n```\n\nAfter.\n\n```text\n>>> 1 + 1\n2\n```"
    assert hook().text(example) == expected


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("material", reason="the extra docs is not installed")
    if hook("formulas").source() is None:
        pytest.skip("jupyter-server-mathjax is not installed; `make docs` installs it")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    assert "mnemos.memory.NeuralMemory" in (site / "api.html").read_text()
    assert (site / "images" / "demo-recall.svg").exists()
    tutorial = (site / "tutorial.html").read_text()
    assert "with test-time learning 99%" in tutorial and (site / "images" / "tutorial-0.png").exists()
    # Opened as files: search has its index as a script, formulas have MathJax, and nothing is loaded from a network.
    assert (site / "search" / "search_index.js").read_text().startswith("var __index")
    assert (site / "mathjax" / "MathJax.js").exists() and "arithmatex" in (site / "memory.html").read_text()
    for page in site.glob("*.html"):
        loaded = re.findall(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)="?(https?:[^">\s]+)""", page.read_text())
        assert not loaded, (page.name, loaded)


# Phrases that confused readers, and what to write instead.
UNCLEAR = {
    "goes on with": "resumes, continues",
    "go on with": "resume, continue",
    "its start": "initial weights",
    "learned start": "learned initial weights",
    "what was told": "writes",
    "is worth": "gain",
    "silenced": "memory off",
    "next to empty": "near zero",
    "so many tokens": "the number",
    "is refused": "raises an error",
    "are refused": "raise an error",
    "says so": "prints a warning",
}
RECORDS = {"log.md", "results.md"}  # dated, or made from results
LONG_LINES = {"log.md", "architecture.md", "attach.md", "chat-page.md", "serving.md"}  # several to a line


def prose(page: Path) -> list[str]:
    """Lines of text: no code, tables, headings or formulas."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", "", page.read_text(), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip() and not line.startswith(("|", "#", "    ", "!["))]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in RECORDS], ids=lambda p: p.name)
def test_pages_avoid_unclear_phrases(page):
    text = page.read_text().lower()
    assert not [f"{phrase!r}: use {better}" for phrase, better in UNCLEAR.items() if phrase in text]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in LONG_LINES], ids=lambda p: p.name)
def test_a_line_of_a_page_is_one_sentence(page):
    ends = re.compile(r"(?<![A-Z.])(?<!\beq)(?<!\bcf)[a-z0-9)`*][.?!] +(?=[A-Z][a-z ])")
    several = [line for line in prose(page) if ends.search(re.sub(r"^\d+\. |\([^()]*\)|`[^`]*`", "x", line))]
    assert not several


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"- {page.name}" in menu, page.name
