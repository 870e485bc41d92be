"""Speed of the models: training steps, decoding, and titans-pytorch's MAC beside ours.

    python benchmarks/models.py                     # everything, several minutes on two cores
    python benchmarks/models.py --only train        # or: mac, atlas, lengths, vocabulary, decode, flat, batch
    python benchmarks/models.py --only lengths --plot docs/images/training_speed.png

float32, byte vocabulary, dim 256, 4 heads. Training: batch 1 x 1,024, depth 2, medians of --runs after two warm steps.
Decoding: one token per call through the cache, depth 4, as it is and after `compile_decoding`. Each measurement has a
process of its own; those whose ratio matters take turns in one.
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


LENGTHS = (1024, 4096, 16384, 65536)
PEER = dict(segment_length=128, num_persistent_tokens=0)  # titans-pytorch's own choices


def make(name: str, depth: int, **choices):
    from mnemos.models import MnemosForCausalLM, presets

    torch.manual_seed(0)
    return MnemosForCausalLM(presets.config(name, size="nano", num_hidden_layers=depth, **{**SHAPE, **choices}))


def step_of(job: dict):
    """A training step on random bytes."""
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
        model = make(job["name"], job["depth"], **job.get("choices", {})).train()

        def call():
            model(ids, labels=ids).loss.backward()
            model.zero_grad()

    return call


def train(job: dict) -> dict:
    call = step_of(job)
    extra = extra_memory(call)
    taken = times(call, runs=job["runs"], warm=job.get("warm", 2))
    return {"rate": job["length"] / median(taken), "extra": max(extra, extra_memory(call))}


def turns(job: dict) -> dict:
    """Models that are compared take a step each in turn: what the machine does meanwhile meets all of them alike."""
    calls, taken = [step_of(job | model) for model in job["models"]], []
    for _ in range(job["runs"] + 2):
        taken.append([times(call, runs=1, warm=0)[0] for call in calls])
    return {"rates": [job["length"] / median(list(mine)) for mine in zip(*taken[2:])]}


@torch.no_grad()
def decode(job: dict) -> dict:
    model = make(job["name"], 4).eval()
    torch.manual_seed(0)
    cache, read, rates = None, 0, {}
    if job["compiled"]:
        model.compile_decoding()
        tokens, warm = torch.randint(0, 256, (1, 1)), model.state(torch.randint(0, 256, (1, 60)))
        for _ in range(80):  # every graph, the one of a chunk's end too
            warm = model(tokens, past_key_values=warm, use_cache=True).past_key_values
            warm.inplace = True
    for at in job["at"]:
        while read < at:
            n = min(4096, at - read)
            cache = model.state(torch.randint(0, 256, (1, n)), cache)
            read += n
        tokens = torch.randint(0, 256, (1, 1))
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
        rates[str(at)] = 1 / median(taken)
    return {"rates": rates, "bytes": 0 if cache is None else cache.nbytes}


@torch.no_grad()
def flat(job: dict) -> dict:
    """Caches at several positions, a token for each in turn: what the machine does meanwhile meets all of them alike."""
    model = make(job["name"], 4).eval()
    torch.manual_seed(0)
    cache, read, caches, taken = None, 0, {}, {}
    for at in job["at"]:
        while read < at:
            n = min(4096, at - read)
            cache = model.state(torch.randint(0, 256, (1, n)), cache)
            read += n
        assert cache is not None
        caches[at] = cache.fork(1)
    token = torch.randint(0, 256, (1, 1))
    for i in range(job["tokens"] + 10):
        for at in caches:
            start = time.perf_counter()
            caches[at] = model(token, past_key_values=caches[at], use_cache=True).past_key_values
            if i >= 10:
                taken.setdefault(at, []).append(time.perf_counter() - start)
            caches[at].inplace = True
    return {
        "ms": {at: 1000 * median(xs) for at, xs in taken.items()},
        "bytes": {at: c.nbytes for at, c in caches.items()},
    }


@torch.no_grad()
def sessions(job: dict) -> dict:
    """One session, and many at different positions, 25 tokens of each in turn, twelve times."""
    model = make(job["name"], 4).eval()
    torch.manual_seed(0)
    starts = [model.state(torch.randint(0, 256, (1, 101 + 5 * i))) for i in range(job["batch"])]
    caches, taken = {1: starts[0].fork(1), job["batch"]: type(starts[0]).stack(starts)}, {}
    for _ in range(12):
        for rows, cache in caches.items():
            tokens = torch.randint(0, 256, (rows, 1))
            for i in range(25):
                start = time.perf_counter()
                output = model(tokens, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                cache.inplace = True
                tokens = output.logits[:, -1:].argmax(-1)
                if i >= 5:  # the state is back in the processor's cache
                    taken.setdefault(rows, []).append(time.perf_counter() - start)
            caches[rows] = cache
    return {"rates": {rows: rows / median(xs) for rows, xs in taken.items()}, "bytes": caches[job["batch"]].nbytes}


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
    models = [dict(name="peer"), dict(name="titans-mac", choices=PEER)]
    both = [run(kind="train", depth=2, length=1024, runs=1, **model) for model in models]
    found = run(kind="turns", models=models, depth=2, length=1024, runs=runs)
    if any("error" in result for result in (*both, found)):
        print(*both, found)
        return
    (theirs, ours), (their_mb, our_mb) = found["rates"], (result["extra"] for result in both)
    print(
        f"MAC, depth 2, in turn: titans-pytorch {theirs:.0f} tokens/s, +{their_mb:.0f} MB; "
        f"mnemos {ours:.0f}, +{our_mb:.0f} MB: {ours / theirs:.2f}x\n"
    )


def show_atlas(runs: int) -> None:
    """Atlas beside sliding-window attention: as it is, with shorter chunks (Muon commits once per chunk), with more features."""
    often, wide = dict(memory_chunk_size=64), dict(memory_chunk_size=64, memory_key_dim=16)
    names = [("swa", {}), ("titans-mag", {}), ("atlas-mag", {}), ("atlas-mag", often), ("atlas-mag", wide)]
    models = [dict(name=name, choices=choices) for name, choices in names]
    rates = run(kind="turns", models=models, depth=2, length=4096, runs=runs)["rates"]
    rows = []
    for (name, choices), rate in zip(names, rates):
        label = ", ".join([name, *(f"{key.removeprefix('memory_')} {value}" for key, value in choices.items())])
        rows.append([label, f"{rate:.0f}", f"{rate / rates[0]:.3f}"])
    print(table(["training, depth 2, 1 x 4,096, in turn", "tokens/s", "of swa"], rows), "\n")


def show_lengths(plot: str | None) -> None:
    rows, curves = [], {}
    for name in ("transformer", "swa", "titans-lmm", "titans-mag", "titans-mal"):
        rates = {}
        for length in LENGTHS:
            if name == "transformer" and length > 16384:  # minutes a step
                continue
            result = run(kind="train", name=name, depth=2, length=length, runs=3 if length < 16384 else 1, warm=1)
            rates[length] = result.get("rate", 0.0)
            print(f"  {name} {length}: {rates[length]:.0f} tokens/s", flush=True)
        curves[name] = rates
        rows.append([name, *(f"{rates[n]:.0f}" if n in rates else "–" for n in LENGTHS)])
    print(table(["training tokens/s, depth 2, batch 1", *(f"{n:,}" for n in LENGTHS)], rows), "\n")
    if plot:
        draw_lengths(curves, plot)


def draw_lengths(curves: dict[str, dict[int, float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4))
    for name, rates in curves.items():
        axes.plot(list(rates), [n / rate for n, rate in rates.items()], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens in a row", ylabel="seconds of a training step")
    axes.set_xticks(LENGTHS, [f"{n // 1024}k" for n in LENGTHS])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def show_vocabulary(runs: int) -> None:
    """A large vocabulary beside bytes: what the step needs more, and what its logits alone would be."""
    length = 4096
    small = run(kind="train", name="swa", depth=2, length=length, runs=runs)
    large = run(kind="train", name="swa", depth=2, length=length, runs=runs, choices=dict(vocab_size=32000))
    logits = length * 32000 * 4 / 2**20
    print(
        f"swa, 1 x 4,096: +{small['extra']:.0f} MB with 256 tokens, +{large['extra']:.0f} MB with 32,000 "
        f"(the logits alone would be {logits:.0f} MB, as many again for their gradient)\n"
    )


def show_decode(names: list[str], at: list[int]) -> None:
    rows = []
    for name in names:
        for compiled in (False, True):
            if compiled and name == "titans-mac":
                continue
            result = run(kind="decode", name=name, at=at, tokens=100, compiled=compiled)
            label = f"{name}, compiled" if compiled else name
            if "error" in result:
                rows.append([label, result["error"]] + [""] * len(at))
                continue
            rows.append([label, *(f"{rate:.0f}" for rate in result["rates"].values()), f"{result['bytes']:,}"])
            print("  " + " ".join(rows[-1]), flush=True)
    header = ["tokens/s, depth 4, batch 1", *(f"at {n:,}" for n in at), "state bytes"]
    print(table(header, rows), "\n")


def show_flat(names: list[str], at: list[int]) -> None:
    rows = []
    for name in names:
        found = run(kind="flat", name=name, at=at, tokens=300)
        ms, first = found["ms"], found["ms"][str(at[0])]
        rows.append(
            [name, *(f"{ms[str(n)]:.2f} ms, {ms[str(n)] / first:.3f}" for n in at), f"{found['bytes'][str(at[-1])]:,}"]
        )
        print("  " + " ".join(rows[-1]), flush=True)
    print(table(["a token, depth 4, in turn", *(f"at {n:,}" for n in at), "state bytes"], rows), "\n")


def show_sessions(names: list[str], batch: int) -> None:
    rows = []
    for name in names:
        found = run(kind="sessions", name=name, batch=batch)
        one, many = (found["rates"][str(n)] for n in (1, batch))
        rows.append([name, f"{one:.0f}", f"{many:.0f}", f"{many / one:.2f}", f"{found['bytes']:,}"])
        print("  " + " ".join(rows[-1]), flush=True)
    print(table(["tokens/s, depth 4, in turn", "one session", f"{batch} sessions", "times", "state bytes"], rows), "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["train", "mac", "atlas", "lengths", "vocabulary", "decode", "flat", "batch"])
    parser.add_argument("--plot", help="where to draw the lengths")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job)
        kinds = {"train": train, "turns": turns, "decode": decode, "flat": flat, "sessions": sessions}
        print(json.dumps(kinds[job.pop("kind")](job)))
        return
    print(machine(), "\n", flush=True)
    parts = {
        "train": lambda: show_train(options.runs),
        "mac": lambda: show_mac(options.runs),
        "atlas": lambda: show_atlas(options.runs),
        "lengths": lambda: show_lengths(options.plot),
        "vocabulary": lambda: show_vocabulary(options.runs),
        "decode": lambda: show_decode(DECODED, [100]),
        "flat": lambda: show_flat(["titans-lmm", "titans-mag", "titans-mal"], [100, 10_000, 100_000]),
        "batch": lambda: show_sessions(["titans-lmm", "titans-mag", "titans-mal"], 16),
    }
    for name, part in parts.items():
        if options.only in (None, name):
            part()


if __name__ == "__main__":
    main()
