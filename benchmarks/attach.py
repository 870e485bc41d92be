"""Cost of memories beside a pretrained model: tokens/s in decoding and training against the base, and resident memory of a long conversation.

    python benchmarks/attach.py                                  # SmolLM2, memory in 6 of 30 layers
    python benchmarks/attach.py --memory titans --long 100000    # another memory; resident memory up to 100,000 tokens

Base and attached model take turns in one run. Decoding: one token per call, each with its own cache, behind 512 tokens. Training:
forward and backward with the memories as what trains, against the base with the attention of the same layers as what trains.
Times are processor time, which other programs on the machine do not change much: run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from harness import machine, median, memory, table
from mnemos.attach import AttachConfig, attach, smollm


def decoding(model: Any, cache: Any, steps: int) -> float:
    """Seconds of processor time per token."""
    token, times = torch.tensor([[100]]), []
    with torch.no_grad():
        for _ in range(steps):
            start = time.process_time()
            model(token, past_key_values=cache, use_cache=True)
            times.append(time.process_time() - start)
    return median(times)


def training(model: Any, ids: torch.Tensor) -> float:
    """Seconds of processor time of a forward and a backward pass."""
    start = time.process_time()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="deltanet")
    parser.add_argument("--layers", default="every:5")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="tokens decoded in a round")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a training step")
    parser.add_argument("--long", type=int, default=0, help="tokens of the long conversation")
    options = parser.parse_args()
    torch.manual_seed(0)
    folder = smollm()
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = AttachConfig(layers=options.layers, window=options.window, memory=options.memory)
    model = attach(AutoModelForCausalLM.from_pretrained(folder), config).eval()
    print(f"{machine()}\n{options.memory} beside layers {', '.join(model.memories)}\n", flush=True)
    trained = list(map(int, model.memories))
    base.requires_grad_(False)
    for i in trained:
        base.model.layers[i].self_attn.requires_grad_(True)
    ids = torch.randint(0, 40_000, (1, options.tokens))
    caches = DynamicCache(config=base.config), model.new_cache()
    with torch.no_grad():
        base(ids, past_key_values=caches[0], use_cache=True)
        model(ids, past_key_values=caches[1], use_cache=True)
    found: dict[str, list[float]] = {"base decoding": [], "decoding": [], "base training": [], "training": []}
    for _ in range(options.rounds):
        found["base decoding"].append(decoding(base, caches[0], options.steps))
        found["decoding"].append(decoding(model, caches[1], options.steps))
        found["base training"].append(training(base, ids))
        found["training"].append(training(model, ids))
    rows = []
    for what, count in (("decoding", 1), ("training", options.tokens)):
        theirs, ours = found[f"base {what}"], found[what]
        ratios = sorted(a / b for a, b in zip(ours, theirs))
        rows.append(
            [
                what,
                f"{count / median(theirs):.1f}",
                f"{count / median(ours):.1f}",
                f"{median(ratios):.2f}",
                f"{ratios[0]:.2f}..{ratios[-1]:.2f}",
            ]
        )
    print(table(["", "base tokens/s", "attached tokens/s", "cost", "spread"], rows), flush=True)
    if options.long:
        print(table(["tokens read", "resident MB", "bytes of the state"], list(long(model, options.long))))


def long(model: Any, tokens: int):
    """Resident memory after 1,000 tokens and after each tenth of `tokens`."""
    cache, marks = model.new_cache(), [1000, *(tokens * i // 10 for i in range(1, 11))]
    with torch.no_grad():
        while cache.length < tokens:
            step = min(500, min(mark for mark in marks if mark > cache.length) - cache.length)
            model(torch.randint(0, 40_000, (1, step)), past_key_values=cache, use_cache=True, logits_to_keep=1)
            if cache.length in marks:
                yield [f"{cache.length:,}", f"{memory('VmRSS'):.0f}", f"{cache.nbytes:,}"]


if __name__ == "__main__":
    main()
