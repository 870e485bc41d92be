"""Perplexity of ordinary text with an adapter: attention sees a window, and memories hold facts that were told before.

Beside it: the same window without memories, without writes, and the base model with all tokens in its attention. Each text is the
held-out end of a file. "first": the tokens inside the window, where base and window are the same; "rest": those behind it.

python perplexity.py ADAPTER --text FILE ... [--length 4096] [--pieces 2] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dialogues import Texts, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mnemos.attach import load_adapter, smollm

SLICE = 512


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--pieces", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json")
    options = parser.parse_args()
    folder = smollm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    pieces = {}
    for path in options.text:
        texts, draw = Texts([Path(path)], (0.9, 1.0)), random.Random(0)
        rows = [
            tokens(tokenizer, texts.piece(draw, 8 * options.length))[: options.length] for _ in range(options.pieces)
        ]
        pieces[Path(path).stem] = torch.tensor(rows)
    from transformers import DynamicCache

    found: dict[str, dict[str, Tensor]] = {name: {} for name in pieces}
    for name, ids in pieces.items():
        found[name]["base"] = losses(base, ids, DynamicCache(config=base.config))
    model = load_adapter(base, options.adapter).eval()
    window = model.attach_config.window
    for name, ids in pieces.items():
        found[name]["memory"] = losses(model, ids, model.new_cache())
        for what, label in (("writes", "no writes"), ("reads", "window alone")):
            with model.memory.knock_out(what):
                found[name][label] = losses(model, ids, model.new_cache())
    results = {}
    for name, kinds in found.items():
        first = {kind: round(math.exp(x[:, : window - 1].mean()), 3) for kind, x in kinds.items()}
        rest = {kind: round(math.exp(x[:, window - 1 :].mean()), 3) for kind, x in kinds.items()}
        results[name] = {"first": first, "rest": rest}
        print(name, json.dumps(results[name]), flush=True)
    if options.json:
        record = {
            "adapter": Path(options.adapter).name,
            "length": options.length,
            "pieces": options.pieces,
            "dtype": options.dtype,
        }
        Path(options.json).write_text(json.dumps(record | {"perplexity": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
