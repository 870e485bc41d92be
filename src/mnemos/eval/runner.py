"""Runs suites into one results file. A suite that the file has with the same settings is not run again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..data.tasks.background import is_text, text_files
from ..models.fingerprint import fingerprint as fingerprint
from .files import read_json, write_json
from .model_adapter import LanguageModel
from .settings import EvalSettings
from .suites import SUITES, Context, check_names

RESULTS_FORMAT = "mnemos.eval/1"
TEXTS = ("text", "haystack")  # settings that are files, folders or texts
OnSuite = Callable[
    [str, str, int | None], object
]  # suite, "reused" | "running" | "done" | "failed: ...", units of its progress


def run_suites(
    model: Any,
    tokenizer: Any,
    names: Sequence[str],
    settings: EvalSettings | None = None,
    output: str | os.PathLike | None = None,
    about: dict[str, Any] | None = None,
    fresh: bool = False,
    progress: Callable[[int], object] | None = None,
    report: OnSuite | None = None,
    training_tokens: int | None = None,
) -> dict[str, Any]:
    """Run suites. Returns {"format", "model", "parameters", "training_tokens", "suites": {name: {"settings", "seconds", "rows"} or {"error"}}}.

    output: results file, written atomically after every suite. A suite that it already has, of the same model with the same settings, is
    not run again unless `fresh`. training_tokens: tokens that the model has read in training, if known. A suite that cannot run (no text, no data) records its error, and the others continue.
    """
    settings = settings or EvalSettings()
    settings.check()
    chosen = check_names(names)
    tell = report or (lambda suite, what, work: None)
    lm = LanguageModel.of(model, tokenizer)
    context = Context(lm, settings, has_text=tokenizer is not None or isinstance(model, LanguageModel))
    identity = about if about is not None else {"model": fingerprint(lm.model)}
    if output is not None and not Path(output).is_file():  # before hours of work
        folder = Path(output).parent
        if os.path.isdir(output) or not os.path.isdir(folder):
            wrong = "is a folder" if os.path.isdir(output) else f"cannot be written: {folder} is not a folder"
            raise ValueError(f"output={str(output)!r:.200} {wrong}; give a file, such as eval.json")
    parameters = sum(p.numel() for p in lm.model.parameters()) if hasattr(lm.model, "parameters") else None
    results: dict[str, Any] = {"format": RESULTS_FORMAT, "model": identity, "parameters": parameters}
    results |= {"training_tokens": training_tokens, "suites": {}}
    if output is not None and Path(output).is_file():
        old = read_json(output)
        if not isinstance(old, dict) or old.get("format") != RESULTS_FORMAT:
            raise ValueError(
                f"{output} is not a results file of this version ({RESULTS_FORMAT}); choose another output"
            )
        if old["model"] == json.loads(json.dumps(identity)):
            results["suites"] = old["suites"]
    used = json.loads(json.dumps(dataclasses.asdict(settings)))
    used |= {name: _about(used[name]) for name in TEXTS if used[name] is not None and is_text(used[name])}
    files = {name: stamp(used[name]) for name in TEXTS if used[name] is not None}
    for suite in chosen:
        kept = results["suites"].get(suite.name, {})
        same = kept.get("settings") == used and (not suite.reads_text or kept.get("files") == files)
        if not fresh and same and "rows" in kept:
            tell(suite.name, "reused", None)
            continue
        began = time.perf_counter()
        entry: dict[str, Any] = {"settings": used} | ({"files": files} if suite.reads_text else {})
        try:
            tell(suite.name, "running", None)
            if suite.reads_text and not context.has_text:
                without = " and ".join(name for name, other in SUITES.items() if not other.reads_text)
                raise ValueError(f"the model has no tokenizer, so it cannot read text; {without} need none")
            tell(suite.name, "running", suite.work(context))
            entry["rows"] = suite.run(context, progress)
        except ValueError as wrong:
            entry["error"] = str(wrong)
        except ImportError as missing:
            entry["error"] = f"{suite.name} needs {missing.name}, which is not installed: pip install 'mnemos[all]'"
        except OSError as wrong:  # an unreadable file, or an unreachable hub
            entry["error"] = (str(wrong).strip().splitlines() or [type(wrong).__name__])[0]
        entry["seconds"] = round(time.perf_counter() - began, 3)
        results["suites"][suite.name] = entry
        if output is not None:
            write_json(output, results)
        tell(suite.name, f"failed: {entry['error']}" if "error" in entry else "done", None)
    return results


def _about(text: str) -> str:
    """A text as its length and hash: results do not contain the text."""
    return (
        f"a text of {len(text):,} characters, sha256 {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"
    )


def stamp(path: str) -> str:
    """A fingerprint of a file, or of a folder's texts, that changes when they are written again."""
    place = Path(path)
    files = text_files(place) if os.path.isdir(path) else [place] if os.path.isfile(path) else []
    about = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]
