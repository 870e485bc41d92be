"""Choice of the backend that computes an operation.

A backend is a module under `mnemos.backends` that registers kernels: functions for operations, each with `supports`, which takes
the arguments of the choice and returns None, or the reason why the kernel cannot compute this call. `find` returns the first kernel
that supports a call. While torch compiles, it considers only kernels that are torch operations or operators registered with torch.
An operation under `@operation` has a plain torch form, computed if no backend supports the call.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.modules import module as module_calls

MODULES = {"cpu": "mnemos.backends.cpu", "torch": "mnemos.backends.torch"}  # in the order in which they are asked
BACKENDS = ("auto", *reversed(MODULES))
DEPRECATED = {"cpp": "cpu"}  # former names of backends, in saved configs

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")


class Kernel(NamedTuple):
    """A backend's implementation of an operation. supports: None, or why it cannot compute a call. compiles: torch can trace both."""

    backend: str
    function: Callable[..., Any]
    supports: Callable[..., str | None]
    compiles: bool


OPERATIONS: dict[str, Callable[..., Any]] = {}  # the plain torch forms, by name
_KERNELS: dict[str, list[Kernel]] = {}  # by operation, in the order in which they are asked


def kernel(
    operation: str, backend: str, supports: Callable[..., str | None], compiles: bool = False
) -> Callable[[Function], Function]:
    """Decorator: register the function as an implementation of `operation` by `backend`, asked after its earlier ones."""

    def register(function: Function) -> Function:
        kernels = _KERNELS.setdefault(operation, [])
        kernels.append(Kernel(backend, function, supports, compiles))
        kernels.sort(key=lambda one: list(MODULES).index(one.backend))
        return function

    return register


def check_backend(backend: str) -> str:
    """The backend's present name. Raises a ValueError for an unknown one."""
    backend = DEPRECATED.get(backend, backend)
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r:.60} is unknown; choose one of {', '.join(map(repr, BACKENDS))}")
    return backend


def find(operation: str, backend: str, *arguments, **keywords) -> Callable[..., Any] | None:
    """The first implementation of `operation` that supports a call with these arguments; None if there is none.

    backend: "auto", or the one backend to ask before "torch". A ValueError if that one is not available on this machine.

    >>> find("rms_norm", "torch", torch.ones(3), None, None) is None
    True
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        load()
    for name, function, supports, compiles in _KERNELS.get(operation, ()):
        if (backend in ("auto", name) or name == "torch") and (compiles or not compiling):
            if supports(*arguments, **keywords) is None:
                return function
            if backend == name and (reason := unavailable_reason(name)) is not None:
                raise ValueError(f"backend={name!r} is not available: {reason}; use 'auto' or 'torch'")
    return None


def unavailable_reason(backend: str) -> str | None:
    """Why a backend is not available on this machine, or None if it is."""
    return importlib.import_module(MODULES[backend]).unavailable_reason()


def reasons(operation: str, *arguments) -> dict[str, str | None]:
    """For each backend that implements the operation: None if it supports the call, else the reason why not."""
    load()
    found: dict[str, str | None] = {}
    for name, _, supports, _ in _KERNELS.get(operation, ()):
        if found.get(name, "") is not None:  # else a kernel of this backend supports it
            found[name] = supports(*arguments)
    return found


@functools.cache
def load() -> None:
    """Import all backends. Compiled code cannot import: call this before it runs."""
    for module in MODULES.values():
        importlib.import_module(module)


def decode(
    module: torch.nn.Module, x: torch.Tensor, state: Any, backend: str = "auto"
) -> tuple[torch.Tensor, Any] | None:
    """One token x (B, 1, dim) of a module by a kernel: y (B, 1, dim) and its state after it; None if no backend has a kernel for it.

    Of a residual block also a piece of several tokens, x (B, T, dim).
    """
    found = find("decode", backend, module, x, state)
    return None if found is None else found(module, x, state)


def operation(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator: a torch function for which backends may have kernels, under its name. It takes `backend` as a further keyword."""

    name: str = function.__name__  # ty: ignore[missing-attribute]
    OPERATIONS[name] = function

    @functools.wraps(function)
    def dispatched(*arguments, backend: str = "auto", **keywords):
        if backend != "torch":
            found = find(name, backend, *arguments, **keywords)
            if found is not None:
                return found(*arguments, **keywords)
        return function(*arguments, **keywords)

    return dispatched


def is_unmodified(*modules: torch.nn.Module | None) -> bool:
    """Whether the parameters of these modules may be read instead of calling them.

    False for modules of other packages (adapters, quantised or parametrised maps), and for modules with hooks or a replaced `forward`.
    """
    if module_calls._global_forward_hooks or module_calls._global_forward_pre_hooks:
        return False
    for module in modules:
        if module is None:
            continue
        if not type(module).__module__.startswith("mnemos.") or "forward" in module.__dict__:
            return False
        if module._forward_hooks or module._forward_pre_hooks:
            return False
    return True
