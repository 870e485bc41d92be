"""Parsing of untrusted JSON and YAML: returns the value or raises a ValueError of one sentence."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes, what: str) -> Any:
    """The value of a JSON text. what: its name in error messages.

    >>> parse_json("[" * 5000, "x.json")
    Traceback (most recent call last):
    ValueError: x.json is nested too deeply to be read
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply to be read") from None
    except ValueError as broken:  # also raised for bytes that are not UTF-8
        raise ValueError(f"{what} is not JSON: {broken}") from None


def parse_yaml(text: str, what: str) -> Any:
    """The value of a YAML text. what: its name in error messages.

    >>> parse_yaml("a: [1", "x.yaml")
    Traceback (most recent call last):
    ValueError: x.yaml is not YAML: expected ',' or ']', but got '<stream end>' in line 1, column 6
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply to be read") from None
    except yaml.MarkedYAMLError as broken:
        place = broken.problem_mark or broken.context_mark
        where = "" if place is None else f" in line {place.line + 1}, column {place.column + 1}"
        raise ValueError(f"{what} is not YAML: {broken.problem or broken.context}{where}") from None
    except (yaml.YAMLError, ValueError) as broken:  # an invalid date, such as 2020-99-99, raises a plain ValueError
        raise ValueError(f"{what} is not YAML: {str(broken).splitlines()[0]}") from None
