"""Ask SmolLM2 with an adapter for facts that were told thousands of tokens before.

Every row of a batch is a conversation of its own: facts, then texts, then questions at each distance, answered by `generate` with the
window of the adapter. Names, values, sentences and texts are not those of training. Beside the model as it is: no writes, no reads
(its window alone), the memories of another row, and the base model with all tokens in its attention.

python evaluate.py [ADAPTER] --text FILE ... [--distances 1000 4000 16000] [--rows 10] [--facts 12] [--ceiling 8000] [--json OUT]
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from dialogues import SYSTEM, Texts, asked, read, tokens, told
from facts import NEW_RELATIONS, Fact, draw_facts
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mnemos.attach import load_adapter, smollm

SLICE = 512
MOST_NEW = 24  # tokens of an answer; BEGUN of one whose beginning is given
BEGUN = 10


def conversations(tokenizer: Any, draw: random.Random, texts: Texts, facts: list[list[Fact]], length: int, split: str):
    """ids of the told turns, a list per row, and of the turns with text behind them (R, length)."""
    opening = [tokens(tokenizer, SYSTEM + told(draw, some, split)) for some in facts]
    rows = []
    for _ in facts:
        row: list[int] = []
        while len(row) < length:
            row += tokens(tokenizer, read(draw, texts.piece(draw, draw.randrange(800, 2400)), split))
        rows.append(row[:length])
    return opening, torch.tensor(rows)


def padded_left(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """ids and mask (B, T)."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@torch.no_grad()
def feed(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None) -> None:
    """Read ids (R, T) into the cache, in slices."""
    for start in range(0, ids.shape[1], SLICE):
        part = None if mask is None else mask[:, : start + SLICE]
        model(ids[:, start : start + SLICE], part, past_key_values=cache, use_cache=True, logits_to_keep=1)


def generate(model, tokenizer, cache, mask: Tensor | None, prompts: list[list[int]], most: int) -> list[str]:
    """Greedy answers of at most `most` tokens, one prompt per row of the cache, which stays as it is."""
    ids, new = padded_left(prompts)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    options: dict[str, Any] = {"max_new_tokens": most, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
    if mask is not None:  # the base model: its cache is a plain one, and its inputs are those of the cache too
        past = torch.zeros(mask.shape, dtype=ids.dtype)
        ids, new, cache = torch.cat([past, ids], 1), torch.cat([mask, new], 1), copy.deepcopy(cache)
    out = model.generate(ids, attention_mask=new, past_key_values=cache, **options)
    return [tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True).strip() for row in out]


def is_right(answer: str, fact: Fact) -> bool:
    """Whether the answer is exactly the expected sentence."""
    return answer == fact.answer


def has_value(answer: str, fact: Fact) -> bool:
    """Whether the value is in the answer, as words of their own: for the base model, which words answers as it likes."""
    plain = "".join(c if c.isalnum() else " " for c in answer.lower()).split()
    value = fact.value.lower().split()
    return any(plain[i : i + len(value)] == value for i in range(len(plain)))


def ask_all(model: Any, tokenizer: Any, options: Any, facts: list[list[Fact]], cache: Any, mask: Tensor | None = None):
    """Shares of answers that are exact, and that have the value; the first answers."""
    draw, exact, contained, shown = random.Random(options.seed + 1), 0, 0, []
    for i in range(len(facts[0])):
        batch = [some[i] for some in facts]
        begun = [fact.prefix if options.begun else "" for fact in batch]
        prompts = [tokens(tokenizer, asked(draw, fact, options.split) + begin) for fact, begin in zip(batch, begun)]
        answers = generate(model, tokenizer, cache, mask, prompts, BEGUN if options.begun else MOST_NEW)
        for fact, begin, answer in zip(batch, begun, answers):
            answer = f"{begin} {answer}".strip()
            exact += is_right(answer, fact)
            contained += has_value(answer, fact)
            shown.append(f"{fact.answer} | {answer}")
    count = sum(map(len, facts))
    return {"exact": exact / count, "contained": contained / count}, shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", nargs="?", help="without it, --ceiling alone")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--distances", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--facts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--split", default="test")
    parser.add_argument("--new-relations", action="store_true")
    parser.add_argument("--knock-outs", type=int, default=1)
    parser.add_argument("--ceiling", type=int, default=0, help="largest distance at which the base model is asked")
    parser.add_argument("--begun", action="store_true", help='answers are begun: "Anna\'s home city is"')
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json")
    options = parser.parse_args()
    draw, folder = random.Random(options.seed), smollm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    relations = NEW_RELATIONS if options.new_relations else None
    texts = Texts([Path(p) for p in options.text], (0.9, 1.0) if options.split == "test" else (0.0, 0.9))
    facts = [draw_facts(draw, options.facts, options.split, relations) for _ in range(options.rows)]
    opening, between = conversations(tokenizer, draw, texts, facts, max(options.distances), options.split)
    ids, mask = padded_left(opening)
    results = {
        distance: {"distance": distance, "questions": options.rows * options.facts} for distance in options.distances
    }
    begin = time.time()
    if options.ceiling:
        ceiling(base, tokenizer, options, facts, ids, mask, between, results)
        print(f"base model with full attention: {time.time() - begin:.0f} s", flush=True)
    if options.adapter:
        with_memory(load_adapter(base, options.adapter).eval(), tokenizer, options, facts, ids, mask, between, results)
    if options.json:
        names = ("split", "dtype", "seed", "begun", "new_relations")
        record = {"adapter": Path(options.adapter).name} if options.adapter else {}
        record |= {name: getattr(options, name) for name in names} | {"results": list(results.values())}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


def with_memory(model, tokenizer, options, facts, ids, mask, between, results) -> None:
    """The attached model, and its knock-outs."""
    cache, place, begin = model.new_cache(), 0, time.time()
    feed(model, ids, cache, mask)
    for distance in options.distances:
        feed(model, between[:, place:distance], cache)
        place, row = distance, results[distance]
        row["memory"], shown = ask_all(model, tokenizer, options, facts, cache)
        print("\n".join(shown[:: max(1, len(shown) // 12)]), flush=True)
        if options.knock_outs:
            swapped = cache.clone()
            swapped.memory = cache.select([*range(1, options.rows), 0]).memory
            row["memories swapped"], _ = ask_all(model, tokenizer, options, facts, swapped)
            with model.memory.knock_out("reads"):
                row["window alone"], _ = ask_all(model, tokenizer, options, facts, cache)
        print(json.dumps(row), f"{time.time() - begin:.0f} s", flush=True)
    if options.knock_outs:
        no_writes(model, tokenizer, options, facts, ids, mask, between, results)


def no_writes(model, tokenizer, options, facts, ids, mask, between, results) -> None:
    """The whole conversation without writes. Attention reaches layers · window tokens back at most: the last of them are enough."""
    reach, place = 30 * 256, 0
    cache = model.new_cache()
    with model.memory.knock_out("writes"):
        feed(model, ids, cache, mask)
        for distance in options.distances:
            if distance - place > reach:
                place = distance - reach
            feed(model, between[:, place:distance], cache)
            place = distance
            results[distance]["no writes"], _ = ask_all(model, tokenizer, options, facts, cache)
            print(json.dumps(results[distance]), flush=True)


def ceiling(base, tokenizer, options, facts, ids, mask, between, results) -> None:
    """The base model with all tokens in its attention, as far as its context reaches."""
    from transformers import DynamicCache

    cache, place = DynamicCache(config=base.config), 0
    feed(base, ids, cache, mask)
    for distance in [d for d in options.distances if d <= options.ceiling]:
        new = torch.ones(len(ids), distance - place, dtype=mask.dtype)
        mask = torch.cat([mask, new], 1)
        for start in range(place, distance, SLICE):
            stop = min(distance, start + SLICE)
            with torch.no_grad():
                base(between[:, start:stop], mask[:, : ids.shape[1] + stop], past_key_values=cache, logits_to_keep=1)
        place = distance
        results[distance]["base, full context"], shown = ask_all(base, tokenizer, options, facts, cache, mask)
        print("\n".join(shown[::10]), json.dumps(results[distance]), flush=True)


if __name__ == "__main__":
    main()
