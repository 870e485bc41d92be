"""The API reference, from docstrings. mkdocs calls `on_page_markdown`; without mkdocs, `python docs/api_reference.py` prints the page.

A line `::: package` in a page becomes every name of that package's `__all__`: signature, docstring, examples, public methods.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import re
from typing import Any

WIDTH = 100  # of a signature on one line
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
        public = [
            f"```python\n{name}.{n}{signature(f, name)}\n```\n\n{text(f)}" for n, f in own if not n.startswith("_")
        ]
        return "\n\n".join([head, f"A module. {text(thing)}", *public])
    if not callable(thing):
        return f"{head}\n\n{constant(thing)}"
    parts = [head, f"```python\n{name}{signature(thing, name)}\n```", text(thing)]
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
        if isinstance(function, property):
            found.append(f"**`.{name}`**\n\n{text(described)}")
        else:
            found.append(f"```python\n.{name}{signature(described, name)}\n```\n\n{text(described)}")
    return found


def signature(thing: Any, name: str = "") -> str:
    """As Python writes it, with every default, without module names; one parameter per line where it is long."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(...)"
    factories = (
        {f.name: f.default_factory for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else {}
    )
    parameters = [parameter(p, factories.get(getattr(p, "name", ""))) for p in whole(thing, found)]
    end = (
        ""
        if inspect.isclass(thing) or found.return_annotation is found.empty
        else f" -> {short(found.return_annotation)}"
    )
    line = f"({', '.join(parameters)}){end}"
    return line if len(name + line) <= WIDTH else "(\n" + "".join(f"    {p},\n" for p in parameters) + f"){end}"


def whole(thing: Any, found: inspect.Signature) -> list[Any]:
    """Parameters with the markers / and *; those of a config take the place of **fields."""
    shown, before = [], None
    listed = list(found.parameters.values())
    if thing in fields_of():
        own = inspect.signature(fields_of()[thing]).parameters
        listed = [*listed[:-1], *(p.replace(kind=p.KEYWORD_ONLY) for n, p in own.items() if n not in found.parameters)]
    for p in listed:
        if before is not None and before.kind is p.POSITIONAL_ONLY and p.kind is not p.POSITIONAL_ONLY:
            shown.append("/")
        if p.kind is p.KEYWORD_ONLY and (before is None or before.kind not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)):
            shown.append("*")
        shown.append(p)
        before = p
    if before is not None and before.kind is before.POSITIONAL_ONLY:
        shown.append("/")
    return shown


@functools.cache
def fields_of() -> dict[Any, Any]:
    """Classes whose **fields are those of a config."""
    from mnemos.memory import NeuralMemory, NeuralMemoryConfig

    return {NeuralMemory: NeuralMemoryConfig}


def parameter(p: Any, factory: Any) -> str:
    """One parameter: name, annotation, default. factory: makes the default of a dataclass' field."""
    if isinstance(p, str):
        return p
    prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    annotation = "" if p.annotation is p.empty else f": {short(p.annotation)}"
    if p.default is p.empty:
        return prefix + p.name + annotation
    has_factory = factory not in (None, dataclasses.MISSING)
    return f"{prefix}{p.name}{annotation}{' = ' if annotation else '='}{made_by(factory) if has_factory else default(p.default)}"


def short(annotation: Any) -> str:
    """An annotation without module names and quotes."""
    written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(\w+)", r"\1", written.replace("'", "")).replace("NoneType", "None")


def made_by(factory: Any) -> str:
    """The call that makes a default; a lambda is called, to show the value that it returns."""
    return default(factory()) if factory in (list, dict) or factory.__name__ == "<lambda>" else f"{factory.__name__}()"


def default(value: Any) -> str:
    """A default as Python writes it; of a function or class, the name."""
    if inspect.isfunction(value) or inspect.isclass(value):
        return "..." if value.__name__ == "<lambda>" else value.__name__
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return re.sub(r"<([\w.]+)[^<>]* at 0x[0-9a-f]+>", r"<\1>", repr(value))


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
