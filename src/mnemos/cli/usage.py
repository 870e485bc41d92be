"""Usage errors as one sentence: tyro reports them in a box of several lines."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from typing import Any

from ..choices import nearest

KINDS = {"INT": "a whole number", "FLOAT": "a number", "{None}": "None", "{True,False}": "True or False"}
PLURALS = {"INT": "whole numbers", "FLOAT": "numbers"}
RULE = re.compile(r"[\s│╭╮╰╯─|+-]*")


def parsed(parse: Callable[[], Any], help_from: str) -> Any:
    """The result of `parse`; raises a ValueError instead of tyro's error and exit. help_from: the command whose --help the error names.

    >>> parsed(lambda: sys.exit(print("Value error\\n---\\nError parsing --steps: invalid literal for int() with base 10: 'a'",
    ...     file=sys.stderr) or 2), "mnemos x")
    Traceback (most recent call last):
    ValueError: --steps 'a' must be a whole number (mnemos x --help lists all options)
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            done = parse()
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(f"{sentence(printed.getvalue())} ({help_from} --help lists all options)") from None
    sys.stderr.write(printed.getvalue())
    return done


def sentence(box: str) -> str:
    """The error in one of tyro's boxes, in one line."""
    _title, *sections = _sections(box) if box.strip() else ["", "the arguments cannot be read"]
    body, rest = sections[0] if sections else _title, " ".join(sections[1:])
    if match := re.match(r"Error parsing (\S+): (.*)", body):
        return _bad_value(match[1], match[2], rest)
    if match := re.match(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*?),?\)", body, re.I):
        choices = re.findall(r"'([^']*)'", match[3])
        close = nearest(match[1], choices)
        hint = f"did you mean {close}? Choose" if close else "choose"
        return f"{match[2]} {match[1]!r} is unknown; {hint} one of {', '.join(choices)}"
    if match := re.match(r"Unrecognized options: ([^,\s]+)", body):
        if not match[1].startswith("-"):
            return f"{match[1]!r} is not expected there" + _after(rest, "Available subcommands:", "; there are")
        close = re.search(r"Perhaps you meant:.*?(--[\w.-]+)", rest)
        return f"there is no option {match[1]}" + (f"; did you mean {close[1]}?" if close else "")
    if match := re.match(r"Missing from (.*?): (\S+) *(.*)", body):
        return f"{match[1]} needs {match[2]}: {match[3].replace(' (required)', '')}".rstrip(".: ")
    if match := re.match(r"Expected one of \{(.*)\}", body):
        return f"a command is missing: choose one of {match[1]}"
    return body.rstrip(".")


def _sections(box: str) -> list[str]:
    """The sections of a box, each as one line."""
    found: list[list[str]] = [[]]
    for line in box.splitlines():
        if title := re.match(r"\s*╭─ (.*?) ─*╮?$", line):
            found += [[title[1]], []]
        elif RULE.fullmatch(line):
            found.append([])
        else:
            found[-1].append(line.strip().removeprefix("│").removesuffix("│").strip())
    return [" ".join(part) for part in found if part]


def _bad_value(flag: str, why: str, about: str) -> str:
    if match := re.match(r"invalid literal for int\(\) with base 10: (.*)", why):
        return f"{flag} {match[1]} must be a whole number"
    if match := re.match(r"could not convert string to float: (.*)", why):
        return f"{flag} {match[1]} must be a number"
    if match := re.match(r"no type matching (\S+) could be instantiated from \[(.*?)\]", why):
        kinds = sorted(match[1].split("|"), key=lambda kind: kind == "{None}")
        return f"{flag} {match[2]} must be {' or '.join(KINDS.get(kind, kind) for kind in kinds)}"
    if match := re.match(r"Could not (?:find valid parse for|parse) arguments:? \[(.*?)\]", why):
        kind = next((f" as {words}" for word, words in PLURALS.items() if word in about), "")
        return f"{flag} {match[1]} cannot be read{kind}"
    return f"{flag}: {why}" if flag.startswith("-") or flag.isupper() else why


def _after(text: str, start: str, words: str) -> str:
    _, found, rest = text.partition(start)
    return f"{words} {rest.partition('For full helptext')[0].strip()}" if found else ""
