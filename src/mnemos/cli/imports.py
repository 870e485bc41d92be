"""`--import MODULE`, for every command: modules that register user-defined components, imported before the command runs."""

from __future__ import annotations

from collections.abc import Sequence

from ..data.modules import import_named

FLAG = "--import"


def take_imports(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without --import, and the modules it names, in order.

    >>> take_imports(["eval", "runs/x", "--import", "a", "--import=./b.py", "--seed", "1"])
    (['eval', 'runs/x', '--seed', '1'], ['a', './b.py'])
    """
    rest: list[str] = []
    modules: list[str] = []
    items = list(arguments)
    while items:
        item = items.pop(0)
        flag, equals, value = item.partition("=")
        if item == "--":
            return [*rest, item, *items], modules
        if flag != FLAG:
            rest.append(item)
            continue
        if not equals and not items:
            raise ValueError(f"{FLAG} needs a module")
        modules.append(value if equals else items.pop(0))
    return rest, modules


def import_all(modules: Sequence[str]) -> None:
    """Import each module; an error message begins with the flag."""
    for name in modules:
        try:
            import_named(name)
        except ValueError as wrong:
            raise ValueError(f"{FLAG} {name:.200}: {wrong}") from wrong
