"""The registry of commands: a name, one line of help, and a function, whose module is imported when the command runs."""

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

    name: the word after `mnemos`. about: one line of help. function: takes the options as its parameters and documents them in
    its docstring; a function of this package is given as "module:function", so that the registry imports nothing.
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
        Command(
            "ablate",
            "Switch off one component of a preset at a time, and measure the effect on a task.",
            "ablate:ablate",
        ),
        Command(
            "analyze",
            "Write a page about a run (or several, to compare): losses, gates, memory norms, validation, generations, health.",
            "analyze:analyze",
        ),
        Command(
            "attach",
            "Attach memories to a pretrained model: a folder that transformers opens, or an adapter file.",
            "attach:attach",
        ),
        Command(
            "audit",
            "Test any causal language model: causality, caches, batches, padding, state, gradients, memory, recall.",
            "audit:audit",
        ),
        Command(
            "backends",
            "Print the backend that computes each preset's memory on this machine, and the reason.",
            "backends:backends",
        ),
        Command(
            "chat",
            "Chat with a model whose memory lasts: sessions are saved, resumed and forked.",
            "chat:chat",
        ),
        Command("data", "Tokenise or show training data.", "data:data"),
        Command(
            "demo",
            "Train a small memory model, a sliding-window and a full-attention Transformer of the same size, and compare their recall.",
            "demo:demo",
        ),
        Command(
            "eval",
            "Evaluate a model, or compare several: runs, folders that transformers can open, or hub names.",
            "eval:evaluate",
        ),
        Command(
            "export",
            "Write the model of a run as a transformers folder, with a model card (README.md).",
            "export:export",
        ),
        Command("generate", "Continue a prompt.", "generate:generate"),
        Command(
            "inspect",
            "Read a text with a model and write a page: surprise, lr, retain, momentum, gate and routing of every token and layer.",
            "inspect:inspect",
        ),
        Command(
            "presets",
            "Print the tables of presets with purposes, papers and parameter counts, or the config of one preset as JSON.",
            "presets:presets",
        ),
        Command("runs", "List runs with their losses, or compare some of them in a table and a plot.", "runs:runs"),
        Command(
            "serve",
            "Serve a model over HTTP: OpenAI's interface, sessions whose memory lasts, and a page for the browser.",
            "serve:serve",
        ),
        Command("tokenizer", "Train or show tokenizers.", "tokenizer:tokenizer"),
        Command(
            "train",
            "Train a model on Python's own documentation (no download), on your files, or on hub datasets.",
            "train:run_train",
            parses_arguments=True,
        ),
    )
}


def register_command(name: str) -> Callable[[Function], Function]:
    """Decorator: registers a function as the command `mnemos NAME`. Its parameters become options, its docstring the help.

    A whole number that the function returns is the exit status.

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
    """The command of this name; raises an error that lists the valid names for an unknown one."""
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    return COMMANDS[name]
