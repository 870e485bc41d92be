"""Runs checks on a model, one after the other; `AuditResult` holds their outcomes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shlex
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from ..choices import unknown
from ..data.tasks.text import check_tokenizer
from . import checks as _registered  # noqa: F401 — importing it registers the checks of the package
from .caching import kind_of
from .probe import Probe
from .prompts import Prompt, read_prompts
from .registry import CHECKS as CHECKS
from .registry import FAIL, Check, Outcome, choose, failed, not_applicable, with_needs
from .result import AuditResult, Row
from .settings import AuditSettings
from .watch import Watch

OUT_OF_MEMORY = ("can't allocate memory", "out of memory")


def run(
    model: Any,
    tokenizer: Any = None,
    checks: Sequence[str] | None = None,
    settings: AuditSettings | None = None,
    prompts: str | os.PathLike | Iterable[Mapping[str, Any] | Prompt] | None = None,
    name: str | None = None,
    flags: Sequence[str] = (),
    watch: Watch | None = None,
    **options: Any,
) -> AuditResult:
    """Audit a causal language model: run checks, and return their outcomes.

    model: see `Subject`; it is left as it was. tokenizer: for the checks with texts. checks: names in `CHECKS` (default: all); checks
    that these need run too. settings: `AuditSettings`, or its fields as keywords. prompts: see `read_prompts`. name: MODEL of the
    command line, for the commands that repeat a check; flags: of the command, beside those of the settings. watch: follows the checks while
    they run, see `Watch`.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2))
    >>> run(model, checks=["causality"], length=16).statuses
    {'calls': 'pass', 'causality': 'pass'}
    """
    if settings is not None and options:
        raise ValueError("give an AuditSettings, or its fields as keywords, not both")
    settings = _settings(options) if settings is None else settings
    settings.check()
    chosen = with_needs(choose(checks))
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    source = prompts if prompts is not None else settings.prompts
    given = None if source is None else read_prompts(source)
    watch = Watch() if watch is None else watch
    rows: dict[str, Row] = {}
    began = time.perf_counter()
    with evaluated(model):
        probe = Probe(model, tokenizer, settings, watch, given)
        about = about_of(probe, name)
        watch.started(about, [check.name for check in chosen])
        for check in chosen:
            watch.running(check.name)
            start = time.perf_counter()
            outcome = _outcome(check, probe)
            probe.outcomes[check.name] = outcome
            seconds = round(time.perf_counter() - start, 3)
            command = command_of(check.name, settings, name, flags)
            rows[check.name] = Row(check.name, check.about, command=command, seconds=seconds, **vars(outcome))
            watch.finished(rows[check.name])
    return AuditResult(about | {"seconds": round(time.perf_counter() - began, 3)}, list(rows.values()))


def assert_passes(
    model: Any, tokenizer: Any = None, checks: Sequence[str] | None = None, **options: Any
) -> AuditResult:
    """Audit a model inside a test: raises an AssertionError that lists every failed check. Arguments as those of `run`.

    >>> assert_passes(lambda input_ids: torch.eye(20)[input_ids.roll(-1, 1)], checks=["causality"], length=16)
    Traceback (most recent call last):
    AssertionError: 1 of 2 checks failed
      causality: in one call, logits of token 0 change with tokens from 1 on, of 16
    """
    __tracebackhide__ = True
    result = run(model, tokenizer, checks, **options)
    if not result.ok:
        lines = "".join(f"\n  {row.check}: {row.text}" for row in result.failures)
        raise AssertionError(f"{len(result.failures)} of {len(result.rows)} checks failed{lines}")
    return result


def _settings(options: dict[str, Any]) -> AuditSettings:
    known = [f.name for f in dataclasses.fields(AuditSettings)]
    wrong = [option for option in options if option not in known]
    if wrong:
        raise unknown("option", wrong[0], known)
    return AuditSettings(**options)


@contextlib.contextmanager
def evaluated(model: Any) -> Generator[None]:
    """The model in evaluation mode; every module gets back the mode that it had."""
    modes = [(m, m.training) for m in model.modules()] if isinstance(model, nn.Module) else []
    if isinstance(model, nn.Module):
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _outcome(check: Check, probe: Probe) -> Outcome:
    """The outcome of a check: not applicable if a check that it needs has failed; an exception of the model is a fault."""
    first = next((n for n in check.needs if probe.status_of(n) == FAIL or n in probe.blocked), None)
    if first is not None:
        probe.blocked.add(check.name)
        return not_applicable(f"not tested: {first} must hold first")
    try:
        return check.run(probe)
    except MemoryError:
        raise
    except Exception as wrong:  # a stranger's model may raise anything
        if any(words in str(wrong) for words in OUT_OF_MEMORY):
            raise
        lines = [line.strip() for line in str(wrong).splitlines() if line.strip()] or ["without a message"]
        return failed(f"the model raised {type(wrong).__name__}: {lines[0]:.200}")


def command_of(check: str, settings: AuditSettings, name: str | None, flags: Sequence[str] = ()) -> str:
    """The command, or without a name the call, that repeats one check with the same settings."""
    changed = {
        f.name: getattr(settings, f.name)
        for f in dataclasses.fields(settings)
        if getattr(settings, f.name) != f.default
    }
    if name is None:
        options = "".join(f", {key}={value!r}" for key, value in changed.items())
        return f"mnemos.audit.run(model, tokenizer, checks=[{check!r}]{options})"
    words = ["mnemos", "audit", name, *flags, "--checks", check]
    for key, value in changed.items():
        words += [f"--{key.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    return shlex.join(words)


def about_of(probe: Probe, name: str | None) -> dict[str, Any]:
    """The model, and how it was measured."""
    own = probe.own
    return {
        "model": name or type(own.model).__name__,
        "class": type(own.model).__name__,
        "parameters": probe.size,
        "vocabulary": own.vocab_size,
        "dtype": kind_of(own),
        "rounding": "float64" if probe.is_wide else kind_of(own),
        "tokens": probe.length,
        "sizes": probe.sizes,
        "device": str(own.device),
        "mnemos": version("mnemos"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
