"""`mnemos serve`: an HTTP server with OpenAI's interface and sessions whose memory lasts."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Generator
from pathlib import Path
from typing import Annotated

import tyro

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def serve(
    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None,
    /,
    host: str = "127.0.0.1",
    port: int = 8000,
    store: Path | None = None,
    api_keys: Path | None = None,
    allow_anyone: bool = False,
    name: str | None = None,
    ttl: str | None = None,
    quota: str | None = None,
    max_sessions: int | None = None,
    max_batch: int = 16,
    max_waiting: int = 256,
    max_per_key: int = 64,
    max_tokens: int = 4096,
    max_prompt_tokens: int = 262144,
    max_body: str = "8M",
    max_import: str = "512M",
    timeout: str = "15m",
    warm: str = "1G",
    prefill_tokens: int = 256,
    prefill_budget: float = 1.5,
    grace: str = "30s",
    log_contents: bool = False,
    threads: int | None = None,
    device: str = "cpu",
) -> None:
    """Serve a model over HTTP: OpenAI's interface, sessions whose memory lasts, and a page for the browser.

    It listens on this machine alone unless --host names another address, which needs --api-keys.

    Args:
        model: folder of a run (runs/x), of an exported model, or of an attached model; by default the model of `mnemos chat`.
        host: address to listen on.
        port: port to listen on; 0 for any free one, which is printed.
        store: folder of the sessions, shared by all processes that serve the model; by default mnemos/sessions in the user's data folder.
        api_keys: file of keys, one line NAME KEY per user; each sees their own sessions only. The key of the name metrics reads /metrics.
        allow_anyone: serve an address that others can reach without keys.
        name: name of the model for clients; by default that of its folder.
        ttl: delete sessions that were not used for this time, such as 30d or 12h.
        quota: bytes of all sessions of one key, such as 500M.
        max_sessions: number of sessions of one key.
        max_batch: answers that are generated at the same time.
        max_waiting: requests that wait for a place; more get 429.
        max_per_key: requests of one key that run or wait.
        max_tokens: largest number of tokens of an answer.
        max_prompt_tokens: largest number of new tokens of a request.
        max_body: largest body of a request.
        max_import: largest file of an imported session.
        timeout: longest time of an answer.
        warm: memory for the states of sessions between turns; other states are read from disk.
        prefill_tokens: largest piece of a prompt that is read at once.
        prefill_budget: time for the prompts of others between two tokens of an answer, in decoding steps.
        grace: time for running answers after SIGTERM.
        log_contents: write texts and names of sessions to the log too.
        threads: threads of torch.
        device: torch device.
    """
    with _no_collections():
        try:
            from ..serve import Keys, Limits, Log, Service, is_loopback
            from ..serve import serve as run
        except ImportError as missing:
            if (missing.name or "").split(".")[0] not in ("fastapi", "uvicorn", "starlette", "pydantic"):
                raise
            raise ValueError("mnemos serve needs the extra serve: pip install 'mnemos[serve]'") from None
        import torch
        from transformers.utils import logging

        from ..sessions import SessionStore, model_hash
        from .chat_loop import default_store
        from .chat_models import open_chat_model

        if not 0 <= port <= 65535:
            raise ValueError(f"port={port} must be from 0 to 65535")
        if api_keys is None and not is_loopback(host) and not allow_anyone:
            raise ValueError(
                f"host {host} can be reached by others: give --api-keys FILE, or --allow-anyone to let everybody use the server"
            )
        keys = Keys({}) if api_keys is None else Keys.load(api_keys)
        limits = Limits(
            max_batch=max_batch,
            max_waiting=max_waiting,
            max_per_owner=max_per_key,
            max_choices=min(8, max_batch),
            max_tokens=max_tokens,
            max_prompt_tokens=max_prompt_tokens,
            max_body_bytes=size_of("max-body", max_body),
            max_import_bytes=size_of("max-import", max_import),
            request_seconds=seconds_of("timeout", timeout),
            warm_bytes=size_of("warm", warm),
            prefill_tokens=prefill_tokens,
            prefill_budget=prefill_budget,
            grace_seconds=seconds_of("grace", grace),
        )
        if threads is not None:
            if threads < 1:
                raise ValueError(f"threads={threads} must be at least 1")
            torch.set_num_threads(threads)
        logging.disable_progress_bar()
        sessions = SessionStore(
            store or default_store(),
            max_bytes=None if quota is None else size_of("quota", quota),
            max_sessions=max_sessions,
            ttl=None if ttl is None else seconds_of("ttl", ttl),
        )
        opened = open_chat_model(model, device)
        chosen = name or (Path(model).resolve().name if model is not None else "mnemos")
        service = Service(
            opened.model,
            opened.tokenizer,
            sessions,
            name=chosen,
            limits=limits,
            keys=keys,
            log=Log(contents=log_contents),
        )
        model_hash(opened.model)  # once; sessions are bound to it
        service.engine.warm_up()
    run(service, host, port)


@contextlib.contextmanager
def _no_collections() -> Generator[None]:
    """No garbage collections while modules are imported and a model is loaded; later ones leave out what lives now."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def seconds_of(option: str, text: str) -> float:
    """Seconds of a time such as 90s, 15m, 12h or 30d.

    >>> seconds_of("ttl", "12h")
    43200.0
    """
    return float(_number(option, text, UNITS, "a time such as 90s, 15m, 12h or 30d"))


def size_of(option: str, text: str) -> int:
    """Bytes of a size such as 500M or 2G.

    >>> size_of("quota", "2k")
    2048
    """
    return int(_number(option, text, SIZES, "a size in bytes such as 500M or 2G"))


def _number(option: str, text: str, units: dict[str, int], expected: str) -> float:
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]?)b?", text.strip().lower())
    if found is None or found[2] not in units or not float(found[1]):
        raise ValueError(f"--{option} {text!r:.40} is not valid: give {expected}")
    return float(found[1]) * units[found[2]]
