"""Conversion between dataclasses and nested dictionaries. Unknown fields and wrong types raise a ValueError."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
import types
import typing
from typing import Any

from ..deprecation import current_names, old_names

SHORT_REPR = reprlib.Repr()  # bounded: YAML aliases let a few lines expand without limit
SHORT_REPR.maxlevel, SHORT_REPR.maxlist, SHORT_REPR.maxdict, SHORT_REPR.maxstring, SHORT_REPR.maxother = 3, 4, 4, 40, 40


def short(value: Any) -> str:
    """A short form of a value for error messages.

    >>> short("ten"), short([[[[1]]]]), short(list(range(100)))
    ("'ten'", '[[[[...]]]]', '[0, 1, 2, 3, ...]')
    """
    return SHORT_REPR.repr(value)[:60]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(x) for key, x in value.items()}
    return [plain(x) for x in value] if isinstance(value, tuple | list) else value


def under_new_names(cls, fields: Any, where: str = "") -> Any:
    """Nested dictionaries of a dataclass with old names of fields replaced by the new ones."""
    if not isinstance(fields, dict):
        return fields
    fields, hints = current_names("a config", fields, old_names(cls), where), typing.get_type_hints(cls)
    return {
        name: under_new_names(hints[name], value, f"{where}{name}.")
        if dataclasses.is_dataclass(hints.get(name))
        else value
        for name, value in fields.items()
    }


def build(cls, fields: Any, where: str):
    """A dataclass, nested ones included, from a dictionary; lists become tuples if the field is a tuple."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where.rstrip('.') or 'the config'} must hold names and values, not {short(fields)}")
    fields = current_names("a config", fields, old_names(cls), where)
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for name, value in fields.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ValueError(f"a config has no field {where}{name}; {hint}")
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            values[name] = build(kind, {} if value is None else value, f"{where}{name}.")
        else:
            values[name] = _typed(kind, value, where + name)
    return cls(**values)


def _typed(kind, value: Any, where: str) -> Any:
    """`value` converted to the field's type: YAML writes tuples as lists, and 1e-3 without a point as a string."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if value is None and type(None) in options:
            return None
        for option in options:
            if option is not type(None):
                try:
                    return _typed(option, value, where)
                except ValueError:
                    continue
        raise ValueError(
            f"{where}={short(value)} must be {' or '.join('nothing' if o is type(None) else getattr(o, '__name__', str(o)) for o in options)}"
        )
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}={short(value)} must be a list")
        inner = typing.get_args(kind)
        inner = inner[:1] * len(value) if len(inner) == 2 and inner[1] is Ellipsis else inner
        if len(inner) != len(value):
            raise ValueError(f"{where} must have {len(inner)} values, not {len(value)}")
        return tuple(_typed(k, x, where) for k, x in zip(inner, value))
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if kind in (int, bool, str, float) and type(value) is not kind:
        raise ValueError(f"{where}={short(value)} must be of type {kind.__name__}")
    if origin is typing.Literal and value not in typing.get_args(kind):
        raise ValueError(
            f"{where}={short(value)} is unknown; choose one of {', '.join(map(str, typing.get_args(kind)))}"
        )
    return value


def check_choices(part) -> None:
    for name, kind in typing.get_type_hints(type(part)).items():
        if typing.get_origin(kind) is typing.Literal:
            _typed(kind, getattr(part, name), name)


def whole(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number >= {least}")
