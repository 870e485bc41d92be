"""`mnemos chat`: a conversation with a model that keeps its state between turns and between days."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def chat(
    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None,
    /,
    session: str | None = None,
    store: Path | None = None,
    memory: bool = True,
    max_new_tokens: int = 256,
    temperature: float | None = None,
    seed: int | None = None,
    system: str = "",
    device: str = "cpu",
) -> None:
    """Chat with a model whose memory lasts: sessions are saved, resumed and forked.

    Without MODEL: SmolLM2 with its memory if that is installed, else the demo's small model, which is trained in about a minute at first
    use and plays a game of facts. /help in the chat lists its commands.

    Args:
        model: folder of a run (runs/x), of an exported model, or of an attached model; demo: the demo's model.
        session: name of the session to continue or to begin; by default a new one, named after the time.
        store: folder of the sessions; by default mnemos/sessions in the user's data folder.
        memory: --no-memory answers every turn from an empty state, for comparison.
        max_new_tokens: largest number of tokens of an answer.
        temperature: sampling temperature; 0 for the likeliest token. By default 0 for SmolLM2 with its memory, else 0.7.
        seed: random seed, for answers that can be repeated.
        system: system prompt of a new session.
        device: torch device.
    """
    import sys
    from io import TextIOWrapper
    from typing import Any

    from transformers.utils import logging

    from ..sessions import Sampling, Session, SessionStore, check_name
    from .chat_loop import ChatLoop, default_name, default_store, size_text
    from .chat_models import open_chat_model

    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed}
    options |= {} if temperature is None else {"temperature": temperature}
    Sampling(**options)
    name = check_name(session or default_name())
    folder = SessionStore(store or default_store())
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):  # text of any encoding is shown and read, with replacement characters
            stream.reconfigure(errors="replace")
    logging.disable_progress_bar()
    opened = open_chat_model(model, device)
    options = {"temperature": opened.temperature} | options
    mode = "write" if memory else "off"
    if folder.exists(name):
        current = Session.load(opened.model, opened.tokenizer, folder, name, memory=mode)
    else:
        current = Session(opened.model, opened.tokenizer, folder, name, system=system, memory=mode)
    print(opened.about)
    if current.tokens_read:
        print(f"session {name}: {current.tokens_read:,} tokens read, state {size_text(current.state_bytes)}")
    else:
        print(f"new session {name}; /help lists the commands")
    arguments = [*([model] if model else []), *(["--store", str(store)] if store else [])]
    ChatLoop(current, options, opened.is_game, arguments).run()
