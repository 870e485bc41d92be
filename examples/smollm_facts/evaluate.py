"""Ask SmolLM2 with attached memories for facts that were stated thousands of tokens before.

Every row states facts, reads text, and is asked for all of its facts at each distance. Names, templates and text are not those of
training. Beside the model: memories emptied before the question ("nothing written"), memories of another row ("swapped"), and no
reads at all ("window alone").

python evaluate.py ADAPTER --text FILE ... [--distances 1000 4000 16000] [--rows 8] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from dialogues import answered, asked, draw_facts, stated
from transformers import AutoModelForCausalLM, AutoTokenizer

from mnemos.attach import load_adapter, smollm
from train import Text, padded

SLICE = 1024


@torch.no_grad()
def read(model, ids: torch.Tensor, cache, mask=None):
    """The cache after ids (B, T), in slices."""
    for start in range(0, ids.shape[1], SLICE):
        part = None if mask is None else mask[:, start : start + SLICE]
        model(ids[:, start : start + SLICE], part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.no_grad()
def answers(model, tokenizer, prompts: list[str], caches: list, most: int = 20) -> list[str]:
    """Greedy answers, one prompt and one cache of a row at a time; the caches stay as they are."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    found = []
    for prompt, cache in zip(prompts, caches):
        cache, ids, out = cache.clone(), tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids, []
        for _ in range(most):
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            token = int(logits.argmax())
            if token == end:
                break
            out.append(token)
            ids = torch.tensor([[token]])
        found.append(tokenizer.decode(out).strip())
    return found


def emptied(cache):
    cache = cache.clone()
    cache.reset_memory()
    return cache


def swapped(caches: list) -> list:
    """Every cache with the memories of the next one."""
    new = [cache.clone() for cache in caches]
    for i, cache in enumerate(new):
        cache.memory = caches[(i + 1) % len(caches)].clone().memory
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--distances", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--facts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--split", default="test")
    parser.add_argument("--json")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    folder = smollm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_adapter(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), options.adapter).eval()
    text = Text(tokenizer, [Path(p) for p in options.text], (0.9, 1.0))
    facts = [draw_facts(draw, options.facts, options.split) for _ in range(options.rows)]
    ids, mask = padded(tokenizer, [stated(draw, some, options.split) for some in facts])
    cache, begin, results, place = read(model, ids, model.new_cache(), mask), time.time(), [], 0
    between = text.pieces(draw, options.rows, max(options.distances))
    for distance in options.distances:
        cache = read(model, between[:, place:distance], cache)
        place = distance
        rows = [cache.select([r]) for r in range(options.rows)]
        variants = {"memory": rows, "nothing written": [emptied(c) for c in rows], "swapped": swapped(rows)}
        row = {"distance": distance, "questions": options.rows * options.facts}
        for name, caches in variants.items():
            row[name] = score(model, tokenizer, options, facts, caches)
        with model.memory.knock_out("reads"):
            row["window alone"] = score(model, tokenizer, options, facts, rows)
        results.append(row)
        print(json.dumps(row), f"{time.time() - begin:.0f} s", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


def score(model, tokenizer, options, facts, caches: list) -> float:
    """The share of questions whose answer is exactly the expected sentence."""
    draw, right, total = random.Random(options.seed + 1), 0, 0
    for some, cache in zip(facts, caches):
        for fact in some:
            (found,) = answers(model, tokenizer, [asked(draw, fact, options.split)], [cache])
            right += found == answered(fact)
            total += 1
    return right / total


if __name__ == "__main__":
    main()
