"""Perplexity of ordinary text with an adapter: attention sees a window, and memories hold facts that were told before.

Without ADAPTER, of the base with all tokens in its attention and of the base with the window alone; with it, of the adapter as it is and
with nothing read from its memory. Each text is the held-out end of a file. "first": the tokens inside the window, where base and window are
the same; "rest": those behind it. What OUT has already stays in it.

python perplexity.py [ADAPTER] --text FILE ... [--length 4096] [--pieces 2] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dialogues import Texts, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from mnemos.attach import attach, load_adapter, smollm

SLICE = 512
WINDOW = 256


@torch.no_grad()
def losses(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Cross-entropy of every token of ids (B, T) but the first: (B, T - 1)."""
    found, last = [], None
    for start in range(0, ids.shape[1], SLICE):
        part = ids[:, start : start + SLICE]
        logits = model(part, past_key_values=cache, use_cache=True).logits.float()
        before = logits[:, :-1] if last is None else torch.cat([last, logits[:, :-1]], 1)
        target = part[:, 1:] if last is None else part
        found.append(F.cross_entropy(before.transpose(1, 2), target, reduction="none"))
        last = logits[:, -1:]
    return torch.cat(found, 1)


def columns(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Names of columns, and what computes the losses of ids (B, T)."""
    base = AutoModelForCausalLM.from_pretrained(smollm(), dtype=getattr(torch, options.dtype)).eval()
    if options.adapter is None:
        yield "base", lambda ids: losses(base, ids, DynamicCache(config=base.config))
        model = attach(base, layers=[0], memory="deltanet", window=WINDOW)
        with model.memory.knock_out("reads"):
            yield "window alone", lambda ids: losses(model, ids, model.new_cache())
    else:
        model = load_adapter(base, options.adapter).eval()
        assert model.attach_config.window == WINDOW
        yield "adapter", lambda ids: losses(model, ids, model.new_cache())
        with model.memory.knock_out("reads"):
            yield "adapter, nothing read", lambda ids: losses(model, ids, model.new_cache())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", nargs="?")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--pieces", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(smollm())
    path = None if options.json is None else Path(options.json)
    record = {name: getattr(options, name) for name in ("length", "pieces", "dtype")} | {"perplexity": {}}
    if path is not None and path.exists():
        found = json.loads(path.read_text())
        if any(found[name] != value for name, value in record.items() if name != "perplexity"):
            parser.error(f"{path} was measured with other options")
        record = found
    pieces = {}
    for name in options.text:
        texts, draw = Texts([Path(name)], (0.9, 1.0)), random.Random(0)
        rows = [
            tokens(tokenizer, texts.piece(draw, 8 * options.length))[: options.length] for _ in range(options.pieces)
        ]
        pieces[Path(name).stem] = torch.tensor(rows)
    for column, measure in columns(options):
        for name, ids in pieces.items():
            found = measure(ids)
            parts = {"first": found[:, : WINDOW - 1], "rest": found[:, WINDOW - 1 :]}
            row = record["perplexity"].setdefault(name, {"first": {}, "rest": {}})
            for part, x in parts.items():
                row[part][column] = round(math.exp(x.mean()), 3)
            print(name, column, *(row[part][column] for part in parts), flush=True)
            if path is not None:
                path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
