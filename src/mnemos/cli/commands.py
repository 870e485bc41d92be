"""The table of commands: a name, one line of help, and the function behind it, whose module is imported when the command runs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..choices import unknown

Function = TypeVar("Function", bound=Callable)


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    name: the word behind `mnemos`. about: one line of help. function: takes the options as its parameters and documents them in
    its docstring; a function of this package is named "module:function", so that the table imports nothing.
    parses_arguments: the function takes the list of arguments instead, and returns the exit status.
    """

    name: str
    about: str
    function: Callable[..., Any] | str
    parses_arguments: bool = False

    def load(self) -> Callable[..., Any]:
        """The function; imports its module."""
        if not isinstance(self.function, str):
            return self.function
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(f".{module}", __package__), name)


COMMANDS = {
    command.name: command
    for command in (
        Command("ablate", "Which of a preset's choices does a task need?", "ablate:ablate"),
        Command(
            "analyze",
            "Write a page about a run (or several, to compare): losses, gates, memory norms, validation, generations, health.",
            "analyze:analyze",
        ),
        Command(
            "backends",
            "Print which backend computes each preset's memory on this machine, and why.",
            "backends:backends",
        ),
        Command("data", "Prepare or look at training data.", "data:data"),
        Command(
            "demo",
            "Train a small memory model and a sliding-window Transformer of its size, and compare what they recall.",
            "demo:demo",
        ),
        Command(
            "eval",
            "Measure a model: a run's folder, a folder that transformers can open, or a hub's name.",
            "eval:evaluate",
        ),
        Command(
            "export",
            "Write the model of a run, whatever number of processes trained it, as one folder for transformers.",
            "export:export",
        ),
        Command("generate", "Continue a prompt.", "generate:generate"),
        Command(
            "inspect",
            "Read a text with a model, and write a page: every token by surprise, lr, retain, momentum, gate and routing, layer by layer.",
            "inspect:inspect",
        ),
        Command(
            "presets",
            "Print the table of presets with their parameter counts, or one preset's whole config as JSON.",
            "presets:presets",
        ),
        Command("runs", "List runs with their losses, or compare some of them in a table and a plot.", "runs:runs"),
        Command("tokenizer", "Make or look at tokenizers.", "tokenizer:tokenizer"),
        Command(
            "train",
            "Train a model: on text that is on every machine, on your files, or on datasets of the hub.",
            "train:run_train",
            parses_arguments=True,
        ),
    )
}


def register_command(name: str) -> Callable[[Function], Function]:
    """Decorate a function to make it the command `mnemos NAME`. Its parameters become options, its docstring the help.

    >>> @register_command("greet")
    ... def greet(who: str = "you") -> None:
    ...     '''Greet somebody.'''
    >>> COMMANDS.pop("greet").about
    'Greet somebody.'
    """
    if not name or name.startswith("-") or name.split() != [name]:
        raise ValueError(f"the name of a command must be one word that does not begin with -, but is {name!r:.80}")
    if name in COMMANDS:
        raise ValueError(f"command {name!r} is registered already: choose another name")

    def register(function: Function) -> Function:
        about = (inspect.getdoc(function) or "").partition("\n")[0]
        COMMANDS[name] = Command(name, about, function)
        return function

    return register


def find_command(name: str) -> Command:
    """The command of this name; an error that lists the valid ones where there is none."""
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    return COMMANDS[name]
