"""Imports Python modules that a user names: from Python's path, or by the path of a file."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType


def import_named(name: str) -> ModuleType:
    """Import a module by its name on Python's path, or a file by its path (`./parts.py` becomes the module `parts`).

    The working folder is not searched; only an explicit path runs a file in it.

    >>> import_named("nosuchmodule")
    Traceback (most recent call last):
    ValueError: there is no module nosuchmodule on Python's path; name a file by its path: ./nosuchmodule.py
    """
    if is_file_name(name):
        return _import_file(name)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r:.80} is not the name of a module; name a file by its path: ./parts.py")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise ValueError(f"module {name} needs {missing.name}, which is not installed") from None
        raise ValueError(
            f"there is no module {missing.name} on Python's path; name a file by its path: ./{name.replace('.', '/')}.py"
        ) from None
    except SyntaxError as wrong:
        raise ValueError(f"module {name} is not Python: {wrong}") from None


def is_file_name(name: str) -> bool:
    return name.endswith(".py") or os.sep in name or "/" in name


def home_of(module: str) -> str | None:
    """The name or path with which `import_named` finds a module of this process in another one; None for a script or a notebook.

    >>> home_of("json"), home_of("__main__")
    ('json', None)
    """
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if module == "__main__" or spec is None:
        return None
    if "." in module:
        return module
    found = importlib.machinery.PathFinder.find_spec(module)
    return module if found is not None and found.origin == spec.origin else spec.origin


def _import_file(path: str) -> ModuleType:
    place = os.path.abspath(os.path.expanduser(path))
    name = os.path.basename(place).removesuffix(".py")
    if not place.endswith(".py") or not os.path.isfile(place):
        raise ValueError(f"{path:.200} is not a Python file")
    if not name.isidentifier():
        raise ValueError(f"{path:.200} cannot be imported: {name!r} is not a Python name; rename the file")
    known = sys.modules.get(name)
    if known is not None and getattr(known.__spec__, "origin", None) == place:
        return known
    if known is not None or importlib.util.find_spec(name) is not None:
        raise ValueError(f"{path:.200} cannot be imported: there is another module {name}; rename the file")
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as wrong:
        del sys.modules[name]
        if isinstance(wrong, SyntaxError):
            raise ValueError(f"{path:.200} is not Python: {wrong}") from None
        if isinstance(wrong, ModuleNotFoundError):
            raise ValueError(f"{path:.200} needs {wrong.name}, which is not installed") from None
        raise
    return module
