"""Old names of config fields: accepted with one warning that gives the new name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
ATTRIBUTE = "_renamed_fields"


def current_names(owner: str, given: Mapping[str, Any], renamed: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """`given` under the new names. renamed: old name -> new name. prefix: put before both names in messages.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     current_names("MemorySpec", {"skip": True, "depth": 2}, {"skip": "residual"})
    {'residual': True, 'depth': 2}
    >>> str(caught[0].message)
    'MemorySpec: skip is called residual now'
    """
    found = {}
    for name, value in given.items():
        new = renamed.get(name, name)
        if new != name:
            if new in given:
                raise ValueError(f"{owner} was given both {prefix}{name} and {prefix}{new}, which are one field")
            message = f"{owner}: {prefix}{name} is called {prefix}{new} now"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
        found[new] = value
    return found


def old_names(cls: type) -> Mapping[str, str]:
    """Old name -> new name of the fields that `renamed_fields` gave to a class; empty for any other class."""
    return getattr(cls, ATTRIBUTE, {})


def renamed_fields(**renamed: str) -> Callable[[Class], Class]:
    """Class decorator: `__init__` also accepts the old names of keywords, given as old="new".

    >>> @renamed_fields(skip="residual")
    ... class Config:
    ...     def __init__(self, residual=False):
    ...         self.residual = residual
    >>> Config(residual=True).residual, old_names(Config)
    (True, {'skip': 'residual'})
    """

    def decorate(cls: Class) -> Class:
        original = cls.__init__

        @functools.wraps(original)
        def initialise(self, *arguments, **keywords):
            if not renamed.keys().isdisjoint(keywords):
                keywords = current_names(cls.__name__, keywords, renamed)
            original(self, *arguments, **keywords)

        cls.__init__ = initialise  # ty: ignore[invalid-assignment]
        setattr(cls, ATTRIBUTE, renamed)
        return cls

    return decorate
