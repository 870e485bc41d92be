"""The API reference, from docstrings. mkdocs calls `on_page_markdown`; without mkdocs, `python docs/api_reference.py` prints the page.

A line `::: package` in a page becomes every name of that package's `__all__`: signature, docstring, examples, public methods.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

PLACE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """mkdocs' hook: fill in every place."""
    return PLACE.sub(lambda found: package(found[1]), markdown)


def package(name: str) -> str:
    """All public names of a package as Markdown."""
    module = importlib.import_module(name)
    parts = [text(module)]
    for public in sorted(module.__all__, key=lambda n: (n[0].islower(), n)):
        parts.append(entry(name, public, getattr(module, public)))
    return "\n\n".join(part for part in parts if part)


def entry(module: str, name: str, thing: Any) -> str:
    """One name: a heading that can be linked to, its signature, its docstring."""
    head = f"### `{name}` {{ #{module}.{name} }}"
    if inspect.ismodule(thing):
        own = [(n, f) for n, f in vars(thing).items() if inspect.isfunction(f) and f.__module__ == thing.__name__]
        public = [f"**`{name}.{n}{signature(f)}`**\n\n{text(f)}" for n, f in own if not n.startswith("_")]
        return "\n\n".join([head, f"A module. {text(thing)}", *public])
    if not callable(thing):
        return f"{head}\n\n{constant(thing)}"
    parts = [head, f"```text\n{name}{signature(thing)}\n```", text(thing)]
    if inspect.isclass(thing):
        parts += methods(thing)
    return "\n\n".join(part for part in parts if part)


def methods(cls: type) -> list[str]:
    """Public methods and properties that the class itself defines and describes."""
    found = []
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        described = function.fget if isinstance(function, property) else function
        if name.startswith("_") or not inspect.isfunction(described) or not described.__doc__:
            continue
        call = "" if isinstance(function, property) else signature(described)
        found.append(f"**`.{name}{call}`**\n\n{text(described)}")
    return found


def signature(thing: Any) -> str:
    """As Python writes it, without the annotations' module names."""
    try:
        written = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r"'([^']*)'(?=[,)\s]|$)", r"\1", re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", written))


def text(thing: Any) -> str:
    """A docstring as Markdown: examples and indented formulas keep their form."""
    lines, code = [], False
    for line in (inspect.getdoc(thing) or "").splitlines():
        example = line.startswith((">>>", "...")) or (code and line.strip() != "")
        formula = line.startswith("    ")
        if (example or formula) != code:
            lines.append("```text" if not code else "```")
            code = not code
        lines.append(line)
    return "\n".join([*lines, "```"] if code else lines)


def constant(thing: Any) -> str:
    """What a table or a tuple of names holds."""
    names = list(thing) if isinstance(thing, dict | tuple | list) else [thing]
    return "Holds: " + ", ".join(f"`{name}`" for name in names[:60]) + "."


if __name__ == "__main__":
    from pathlib import Path

    print(on_page_markdown(Path(__file__).with_name("api.md").read_text()))
