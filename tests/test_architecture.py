"""The layers of the package, read from its syntax trees: imports go downwards, nothing imports in a circle, files stay short.

And nothing but a registered class itself depends on its name: `test_no_module_compares_a_registered_name`.
"""

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
    "attach",
    "data",
    "train",
    "eval",
    "trials",
    "report",
    "demo",
    "sessions",
    "serve",
    "ablate",
    "cli",
]
ENTRANCES = {"mnemos", "mnemos.__main__", "mnemos.compat"}  # names for users, which nothing in the package imports
LONGEST = 400
# Identifiers that hold the name of a registered part.
HOLDERS = {
    "block": {"layers", "block", "blocks", "kind", "kinds"},
    "gate": {"gate_mode", "gate", "mode"},
    "loss": {"objective", "loss"},
    "rule": {"rule", "update_rule"},
    "structure": {"structure", "network"},
    "features": {"features"},
    "suite": {"suite", "suites"},
    "reader": {"reader", "kind"},
    "tracker": {"tracker", "trackers"},
}
TRANSLATIONS = (  # data about the package's own parts: tables of presets, and the arguments of other implementations
    "mnemos.models.presets",
    "mnemos.models.compat",
)


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
    assert lines <= LONGEST, f"{name} has {lines} lines"


@functools.cache
def registered() -> dict[str, dict[str, str]]:
    """For each kind of part: the module of each registered name."""
    from mnemos.data.readers import READERS
    from mnemos.eval import SUITES
    from mnemos.memory.features import FEATURES
    from mnemos.memory.losses import LOSSES
    from mnemos.memory.networks import STRUCTURES
    from mnemos.memory.rules import RULES
    from mnemos.models.gate import GATES
    from mnemos.models.mixer import BLOCKS
    from mnemos.train.telemetry import TRACKERS

    classes = {"block": BLOCKS, "gate": GATES, "loss": LOSSES, "rule": RULES, "structure": STRUCTURES}
    classes |= {"features": FEATURES, "tracker": TRACKERS}
    found = {kind: {name: part.__module__ for name, part in parts.items()} for kind, parts in classes.items()}
    found["suite"] = {name: suite.run.__module__ for name, suite in SUITES.items()}
    found["reader"] = {name: type(reader).__module__ for name, reader in READERS.items()}
    return {kind: {n: m for n, m in names.items() if m.startswith("mnemos.")} for kind, names in found.items()}


def test_every_kind_of_part_has_its_holders():
    assert registered().keys() == HOLDERS.keys() and all(registered().values())


def mentions(node: ast.AST) -> set[str]:
    """Identifiers in an expression: names, attributes, and keys as in memory["rule"] and memory.get("rule")."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            found.add(inner.id)
        elif isinstance(inner, ast.Attribute):
            found.add(inner.attr)
        elif isinstance(inner, ast.Subscript):
            found |= literals(inner.slice)
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == "get":
            found |= set().union(*map(literals, inner.args[:1]))
    return found


def literals(node: ast.AST | None) -> set[str]:
    """Strings of a literal, or of a tuple, list, set or the keys of a dict of literals."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    inner = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return set().union(*map(literals, inner))


def comparisons(tree: ast.AST) -> list[tuple[set[str], set[str]]]:
    """Identifiers and literal strings that are compared: by ==, !=, in, not in, set operations, match, or as a key of a dict literal."""
    found = []
    for node in ast.walk(tree):
        sides: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.Sub | ast.BitOr):
            sides = [node.left, node.right]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            sides = [node.value, node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            sides = [node.func.value, *node.args[:1]] if isinstance(node.func.value, ast.Dict) else []
        elif isinstance(node, ast.Match):
            values = [v.value for v in ast.walk(node) if isinstance(v, ast.MatchValue)]
            sides = [node.subject, *values]
        names = [literals(side) for side in sides]
        others = [mentions(side) for side, strings in zip(sides, names) if not strings]
        found.append((set().union(*others), set().union(*names)))
    return found


def compared_names(module: str, tree: ast.AST) -> set[str]:
    """Registered names that a module compares with an identifier of their kind, without registering them itself."""
    found = set()
    for identifiers, strings in comparisons(tree):
        for kind, holders in HOLDERS.items():
            homes = registered()[kind]
            if identifiers & holders:
                found |= {name for name in strings & homes.keys() if homes[name] != module}
    return found


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_module_compares_a_registered_name(name):
    """Others ask the class: a property or a method. A new part then works wherever those of the package do."""
    if name.startswith(TRANSLATIONS):
        return
    found = compared_names(name, ast.parse(modules()[name].read_text()))
    assert not found, f"{name} compares {', '.join(map(repr, sorted(found)))}: use a property of the registered class"


@pytest.mark.parametrize(
    "line, found",
    [
        ("gate.mode == 'additive'", {"additive"}),
        ("'mac' in config.blocks", {"mac"}),
        ("kind not in ('lmm', 'swa', 'other')", {"lmm", "swa"}),
        ("kinds & {'mag', 'mal'}", {"mag", "mal"}),
        ("{'attention': 1, 'mac': 2}.get(kind, 3)", {"attention", "mac"}),
        ("{'muon': 1}[spec.rule]", {"muon"}),
        ("memory['rule'] == 'muon'", {"muon"}),
        ("memory.get('objective') != 'l2'", {"l2"}),
        ("spec.loss.name == 'dot'", {"dot"}),
        ("suite == 'needle'", {"needle"}),
        ("match rule:\n  case 'gd': pass", {"gd"}),
        ("rule == other_rule", set()),
        ("name == 'muon'", set()),
        ("BLOCKS['mag']", set()),
        ("rule == 'unheard-of'", set()),
    ],
)
def test_comparisons_of_registered_names_are_found(line, found):
    assert compared_names("mnemos.other", ast.parse(line)) == found
    assert not compared_names("mnemos.models.memory_mixers", ast.parse("kind == 'lmm'"))


def test_modules_of_tests_have_names_of_their_own():
    names = sorted(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, after in zip(names, names[1:]) if name == after] == []  # pytest imports one of them alone
