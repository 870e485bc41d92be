"""Speed of the models: training steps, decoding, and titans-pytorch's MAC beside ours.

    python benchmarks/models.py                     # everything, several minutes on two cores
    python benchmarks/models.py --only train        # or: mac, decode, flat, batch

float32, byte vocabulary, dim 256, 4 heads. Training: batch 1 x 1,024, depth 2, medians of --runs after two warm steps.
Decoding: one token per call through the cache, depth 4, no compilation. Each measurement has a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time

import torch

from harness import extra_memory, isolated, machine, median, table, times

SHAPE = dict(vocab_size=256, hidden_size=256, num_attention_heads=4)
TRAINED = [
    "swa",
    "transformer",
    "titans-lmm",
    "titans-mag",
    "titans-mal",
    "titans-mac",
    "omeganet",
    "atlas",
    "atlas-mag",
]
DECODED = ["swa", "titans-lmm", "titans-mag", "titans-mal", "titans-mac"]


def make(name: str, depth: int):
    from mnemos.models import MnemosForCausalLM, presets

    torch.manual_seed(0)
    return MnemosForCausalLM(presets.config(name, size="nano", num_hidden_layers=depth, **SHAPE))


def train(job: dict) -> dict:
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (1, job["length"]))
    if job["name"] == "peer":
        peer = importlib.import_module("titans_pytorch")  # in the extra [bench]
        model = peer.MemoryAsContextTransformer(
            num_tokens=256, dim=256, depth=job["depth"], segment_len=128, heads=4, dim_head=64
        )

        def call():
            model(ids, return_loss=True).backward()
            model.zero_grad()
    else:
        model = make(job["name"], job["depth"]).train()

        def call():
            model(ids, labels=ids).loss.backward()
            model.zero_grad()

    extra = extra_memory(call)
    taken = times(call, runs=job["runs"])
    return {"rate": job["length"] / median(taken), "extra": max(extra, extra_memory(call))}


@torch.no_grad()
def decode(job: dict) -> dict:
    model = make(job["name"], 4).eval()
    torch.manual_seed(0)
    cache, read = None, 0
    rates = {}
    for at in job["at"]:
        while read < at:
            n = min(4096, at - read)
            cache = model.state(torch.randint(0, 256, (job["batch"], n)), cache)
            read += n
        tokens = torch.randint(0, 256, (job["batch"], 1))
        taken = []
        for i in range(job["tokens"] + 10):
            start = time.perf_counter()
            output = model(tokens, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            cache.inplace = True  # as generate does with the caches it makes
            tokens = output.logits[:, -1:].argmax(-1)
            if i >= 10:
                taken.append(time.perf_counter() - start)
        read += job["tokens"] + 10
        rates[str(at)] = job["batch"] / median(taken)
    return {"rates": rates, "bytes": 0 if cache is None else cache.nbytes}


def run(**job) -> dict:
    return isolated(__file__, "--job", json.dumps(job))


def show_train(runs: int) -> None:
    rows = []
    for name in TRAINED:
        result = run(kind="train", name=name, depth=2, length=1024, runs=runs)
        rows.append([name, result.get("error") or f"{result['rate']:.0f}", f"{result.get('extra', 0):.0f}"])
        print("  " + " ".join(rows[-1]), flush=True)
    print(table(["training, depth 2, 1 x 1,024", "tokens/s", "extra MB"], rows), "\n")


def show_mac(runs: int) -> None:
    theirs = run(kind="train", name="peer", depth=2, length=1024, runs=runs)
    ours = run(kind="train", name="titans-mac", depth=2, length=1024, runs=runs)
    if "error" in theirs or "error" in ours:
        print(theirs, ours)
        return
    print(
        f"MAC, depth 2: titans-pytorch {theirs['rate']:.0f} tokens/s, +{theirs['extra']:.0f} MB; "
        f"mnemos {ours['rate']:.0f}, +{ours['extra']:.0f} MB: {ours['rate'] / theirs['rate']:.2f}x\n"
    )


def show_decode(names: list[str], at: list[int], batch: int) -> None:
    rows = []
    for name in names:
        result = run(kind="decode", name=name, at=at, batch=batch, tokens=100)
        if "error" in result:
            rows.append([name, result["error"]] + [""] * len(at))
            continue
        rows.append([name, *(f"{rate:.0f}" for rate in result["rates"].values()), f"{result['bytes']:,}"])
        print("  " + " ".join(rows[-1]), flush=True)
    header = [f"tokens/s, depth 4, batch {batch}", *(f"at {n:,}" for n in at), "state bytes"]
    print(table(header, rows), "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["train", "mac", "decode", "flat", "batch"])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job)
        print(json.dumps((train if job.pop("kind") == "train" else decode)(job)))
        return
    print(machine(), "\n", flush=True)
    parts = {
        "train": lambda: show_train(options.runs),
        "mac": lambda: show_mac(options.runs),
        "decode": lambda: show_decode(DECODED, [100], 1),
        "flat": lambda: show_decode(["titans-lmm", "titans-mag", "titans-mal"], [100, 10_000, 100_000], 1),
        "batch": lambda: show_decode(["titans-lmm", "titans-mag"], [100], 16),
    }
    for name, part in parts.items():
        if options.only in (None, name):
            part()


if __name__ == "__main__":
    main()
