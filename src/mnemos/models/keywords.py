"""Checks of keyword names: an unknown one raises an error that suggests the nearest valid name."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable)
LISTED = 40  # longer lists of valid names are left out of an error


@dataclass(frozen=True)
class Unsupported:
    """A keyword of another implementation without a counterpart here. off: values that switch the feature off, which are accepted."""

    reason: str
    off: tuple[Any, ...] = ()

    def is_off(self, value: Any) -> bool:
        return any(type(value) is type(off) and value == off for off in self.off)


def refuse_unknown(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a ValueError for names in `given` that are not in `known`.

    >>> refuse_unknown("NeuralMemory", ["omega_windw"], ["omega_window", "poly_mode"])
    Traceback (most recent call last):
    ValueError: NeuralMemory has no keyword 'omega_windw' (did you mean 'omega_window'?)
    """
    known = sorted(set(known))
    unknown = [name for name in given if name not in known]
    if unknown:
        found = [difflib.get_close_matches(str(name), known, n=1) for name in unknown]
        named = [
            f"{name!r:.80}" + (f" (did you mean {near[0]!r}?)" if near else "") for name, near in zip(unknown, found)
        ]
        rest = "" if all(found) or len(known) > LISTED else f"; it takes {', '.join(known)}"
        raise ValueError(f"{owner} has no keyword {', '.join(named)}{rest}")


def accept(
    owner: str, given: Mapping[str, Any], known: Iterable[str], unsupported: Mapping[str, Unsupported] | None = None
) -> dict[str, Any]:
    """`given` without unsupported keywords that are off. Unknown names, and unsupported ones that are on, raise a ValueError.

    >>> table = {"use_flex_attn": Unsupported("attention has one implementation", off=(False,))}
    >>> accept("Model", {"dim": 8, "use_flex_attn": False}, ["dim"], table)
    {'dim': 8}
    """
    known, unsupported = set(known), unsupported or {}
    refuse_unknown(owner, (name for name in given if name not in unsupported), known)
    for name in given:
        entry = unsupported.get(name)
        if entry is not None and name not in known and not entry.is_off(given[name]):
            raise ValueError(f"{owner} does not support {name}={given[name]!r:.80}: {entry.reason}")
    return {name: value for name, value in given.items() if name in known}


def strict(unsupported: Mapping[str, Unsupported] | None = None) -> Callable[[Function], Function]:
    """Check the keywords of a function or of a class (its `__init__`) by `accept`, before Python does.

    >>> @strict()
    ... def scaled(x, factor=1.0):
    ...     return factor * x
    >>> scaled(3, factr=2)
    Traceback (most recent call last):
    ValueError: scaled has no keyword 'factr' (did you mean 'factor'?)
    """

    def decorate(target):
        if inspect.isclass(target):
            target.__init__ = decorate(target.__init__)
            return target
        names = list(inspect.signature(target).parameters)

        @functools.wraps(target)
        def checked(*args, **kwargs):
            if any(name not in names for name in kwargs):
                method = names[0] == "self"
                owner = type(args[0]).__name__ if method else target.__name__
                owner += f".{target.__name__}" if method and target.__name__ != "__init__" else ""
                kwargs = accept(owner, kwargs, (name for name in names if name != "self"), unsupported)
            return target(*args, **kwargs)

        return checked

    return decorate


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None]:
    """Rename keywords in errors raised inside: `names` maps our names to those of the caller.

    >>> with renamed({"window": "context_window"}):
    ...     raise ValueError("window=0 must be a whole number >= 1")
    Traceback (most recent call last):
    ValueError: context_window=0 must be a whole number >= 1
    """
    try:
        yield
    except ValueError as error:
        text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        raise ValueError(text) from None
