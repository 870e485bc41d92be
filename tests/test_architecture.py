"""The layers of the package, read from its syntax trees: imports go downwards, nothing imports in a circle, files stay short."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src"
# A folder imports only from itself and from folders before it. "" holds the modules beside the folders that all may use.
LAYERS = [
    "",
    "nn",
    "memory",
    "backends",
    "models",
    "data",
    "train",
    "eval",
    "trials",
    "report",
    "demo",
    "ablate",
    "cli",
]
ENTRANCES = {"mnemos", "mnemos.__main__", "mnemos.compat"}  # names for users, which nothing in the package imports
LONGEST = 400
TOO_LONG = {"mnemos.models.model"}  # to be split


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str) -> set[str]:
    """The modules of the package that a module imports, inside functions too, but not for type checkers alone."""
    path = modules()[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree, found = ast.parse(path.read_text()), set()
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{source}.{a.name}" if f"{source}.{a.name}" in modules() else source for a in node.names}
    return {other for other in found if other in modules() and other != name}


@functools.cache
def graph() -> dict[str, set[str]]:
    return {name: imports(name) for name in modules()}


def folder(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and modules()[name].name == "__init__.py") else ""


def test_every_folder_has_its_layer():
    folders = {path.name for path in (ROOT / "mnemos").iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders == set(LAYERS) - {""}


@pytest.mark.parametrize("name", sorted(set(modules()) - ENTRANCES))
def test_imports_go_downwards(name):
    own = LAYERS.index(folder(name))
    above = sorted(other for other in graph()[name] if LAYERS.index(folder(other)) > own or other in ENTRANCES)
    assert not above or (own == len(LAYERS) - 1 and above == ["mnemos"]), f"{name} imports {', '.join(above)}"


def test_no_module_imports_itself_by_way_of_others():
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(graph()[name]):
                walk(other, (*path, name))
            done.add(name)

    for name in modules():
        walk(name, ())


def test_backends_are_looked_up_by_name_alone():
    users = {name for name, others in graph().items() if any(folder(other) == "backends" for other in others)}
    assert {folder(name) for name in users} == {"backends"}


@pytest.mark.parametrize("name", sorted(modules()))
def test_files_are_short(name):
    lines = len(modules()[name].read_text().splitlines())
    assert lines <= LONGEST or name in TOO_LONG, f"{name} has {lines} lines"
