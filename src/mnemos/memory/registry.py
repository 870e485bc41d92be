"""Registries of the parts of a memory: small classes under a name, with numbers as options, such as "huber(delta=0.5)"."""

from __future__ import annotations

import functools
import inspect
import math
import re
from typing import Any, Generic, TypeVar

Part = TypeVar("Part")
Class = TypeVar("Class", bound=type)
MAX_CHARACTERS = 120  # of a choice: names come from files too
CHOICE = re.compile(r"([\w+-]+)(?:\((.+)\))?")
OPTION = re.compile(r"\s*(\w+)\s*=\s*([-+.\w]+)\s*")


class Registry(dict[str, type[Part]], Generic[Part]):
    """Classes by their `name`. kind: the field of a config that chooses one, for messages.

    >>> colours: Registry = Registry("colour")
    >>> @colours.register
    ... class Grey:
    ...     name = "grey"
    ...     def __init__(self, level: float = 0.5):
    ...         self.level = level
    >>> colours.make("grey").level, colours.make("grey(level=0.2)").level
    (0.5, 0.2)
    >>> colours.make("gray")
    Traceback (most recent call last):
    ValueError: colour='gray' is unknown; choose one of 'grey'
    """

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def register(self, cls: Class) -> Class:
        """Make a class available under its `name`; usable as a decorator."""
        self[cls.name] = cls  # ty: ignore[missing-attribute, invalid-assignment]
        return cls

    def choose(self, choice: Any) -> tuple[type[Part], dict[str, float]]:
        """The class and the options that a choice names; a ValueError for anything else."""
        found = CHOICE.fullmatch(choice) if isinstance(choice, str) and len(choice) <= MAX_CHARACTERS else None
        if found is None or found[1] not in self:
            raise ValueError(f"{self.kind}={choice!r:.40} is unknown; choose one of {', '.join(map(repr, self))}")
        cls, options = self[found[1]], {}
        for text in found[2].split(",") if found[2] else ():
            option = OPTION.fullmatch(text)
            value = None if option is None else _number(option[2])
            if option is None or value is None:
                raise ValueError(
                    f"{self.kind}={choice!r} must have options of the form name=number, such as {found[1]}(p=3)"
                )
            options[option[1]] = value
        known = option_names(cls)
        wrong = [name for name in options if name not in known]
        if wrong:
            has = f"has the options {', '.join(known)}" if known else "has no options"
            raise ValueError(f"{self.kind}={choice!r}: {found[1]} {has}, not {wrong[0]}")
        return cls, options

    def make(self, choice: str) -> Part:
        """The part that a choice names."""
        cls, options = self.choose(choice)
        return cls(**options)


def name_of(choice: Any) -> Any:
    """The name of a choice without its options; anything that is no choice as it is.

    >>> name_of("lp(p=3)"), name_of("l2"), name_of(None)
    ('lp', 'l2', None)
    """
    found = CHOICE.fullmatch(choice) if isinstance(choice, str) and len(choice) <= MAX_CHARACTERS else None
    return choice if found is None else found[1]


@functools.cache
def option_names(cls: type) -> tuple[str, ...]:
    """The numbers that a part takes: keywords of its constructor with a default that is a number."""
    if cls.__init__ is object.__init__:
        return ()
    parameters = inspect.signature(cls).parameters.values()
    return tuple(p.name for p in parameters if isinstance(p.default, float))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
