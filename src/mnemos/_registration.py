"""Registers the models with transformers when transformers is imported, and not before."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import sys


def register_models() -> None:
    """Register now if transformers is imported already, else right after its import."""
    if "transformers" in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    with contextlib.suppress(ImportError):  # importing a transformers that is too old for the models must not fail
        importlib.import_module("mnemos.attach")  # imports mnemos.models too


class _Finder(importlib.abc.MetaPathFinder):
    """Finds transformers, and wraps its loader so that the models are registered once it is loaded."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "transformers":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        self.loader.exec_module(module)
        _register()
