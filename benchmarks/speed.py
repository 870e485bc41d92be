"""Speed and memory of training: against titans-pytorch, against ourselves, against the machine.

    python benchmarks/speed.py                  # everything, about fifteen minutes on two cores
    python benchmarks/speed.py --only peer      # or: chunk1, self, peak
    python benchmarks/speed.py --runs 7

Every measurement runs in a process of its own: two warm calls, then the median of --runs calls (min..max in brackets),
then one call for peak memory. Both sides compute the same thing as far as they can: forward and backward of a layer,
2-layer MLP memory with expansion 4, momentum on, float32.
"""

from __future__ import annotations

import argparse
import importlib
import json

import torch

from harness import extra_memory, isolated, machine, matmul_peak, median, table, times
from mnemos.memory import Gates, MemorySpec, NeuralMemory, make_features, scan

PEER_ROWS = [  # batch, length, dim, heads, chunk, Newton–Schulz, speed-up to reach, share of memory to stay under
    (2, 1024, 384, 1, 64, False, 4.0, 1 / 4),
    (2, 1024, 384, 4, 64, False, 1.8, 1 / 3),
    (1, 4096, 256, 4, 64, False, 2.0, 1 / 3),
    (1, 4096, 256, 4, 16, False, 5.0, 1 / 8),
    (2, 1024, 384, 1, 64, True, 1.3, 1 / 5),
]


def layer_call(side: str, batch: int, length: int, dim: int, heads: int, chunk: int, orthogonal: bool):
    """Forward and backward of one layer, as a function without arguments."""
    torch.manual_seed(0)
    x = torch.randn(batch, length, dim, requires_grad=True)
    if side == "mnemos":
        layer = NeuralMemory(dim=dim, heads=heads, chunk_size=chunk, rule="muon" if orthogonal else "gd")
    else:
        peer = importlib.import_module("titans_pytorch")  # in the extra [bench]
        layer = peer.NeuralMemory(
            dim=dim, heads=heads, dim_head=dim // heads, chunk_size=chunk, spectral_norm_surprises=orthogonal
        )

    def call():
        y, _ = layer(x)
        y.sum().backward()
        layer.zero_grad()
        x.grad = None

    return call


def scan_call(spec: MemorySpec, batch: int, length: int, heads: int):
    """Forward and backward of the bare engine."""
    torch.manual_seed(0)
    unit = torch.nn.functional.normalize
    q, k = (unit(torch.randn(batch, length, heads, spec.key_dim), dim=-1).requires_grad_() for _ in range(2))
    v = torch.randn(batch, length, heads, spec.value_dim, requires_grad=True)
    lr, momentum, retain = (
        (low + (high - low) * torch.rand(batch, length, heads)).requires_grad_()
        for low, high in ((0, 0.01), (0, 0.9), (0.99, 1))
    )
    W0 = [(torch.randn(heads, *s) * s[0] ** -0.5).requires_grad_() for s in spec.shapes]
    features = make_features(spec, heads)
    leaves = [q, k, v, lr, momentum, retain, *W0]

    def call():
        y, _ = scan(q, k, v, Gates(lr, momentum, retain), spec.initial_state(W0, batch=batch), spec, features)
        y.sum().backward()
        for leaf in leaves:
            leaf.grad = None

    return call


def training_flops(d: int, h: int, chunk: int) -> float:
    """Useful FLOPs per token and head of the formulas (2-layer MLP, momentum): matmuls only, masked squares by half, x3."""
    keys = 3 * 2 * d * h  # k W1, a W2, d W2ᵀ
    reads = 4 * 2 * d * h  # q and hidden, each through W and S
    dual = 2 * 2 * (d + h) * (chunk + 1) / 2  # scores and their products, both maps
    update = 4 * 2 * d * h  # W and S of both maps
    return 3 * (keys + reads + dual + update)


def measure(job: dict) -> dict:
    runs = job.pop("runs")
    kind = job.pop("kind")
    if kind == "layer":
        call = layer_call(**job)
    else:
        call = scan_call(MemorySpec(**job["spec"]), job["batch"], job["length"], job["heads"])
    first = extra_memory(call)
    taken = times(call, runs=runs, warm=1)
    return {
        "seconds": median(taken),
        "low": taken[0],
        "high": taken[-1],
        "extra": max(first, extra_memory(call)),
        "peak": matmul_peak() if job.get("peak") else 0,
    }


def run(**job) -> dict:
    return isolated(__file__, "--job", json.dumps(job))


def seconds(result: dict) -> str:
    if "error" in result:
        return result["error"][:60]
    return f"{result['seconds']:.3f} s [{result['low']:.3f}..{result['high']:.3f}], +{result['extra']:.0f} MB"


def peer(runs: int) -> None:
    rows = []
    for batch, length, dim, heads, chunk, orthogonal, speed, share in PEER_ROWS:
        job = dict(
            kind="layer",
            batch=batch,
            length=length,
            dim=dim,
            heads=heads,
            chunk=chunk,
            orthogonal=orthogonal,
            runs=runs,
        )
        theirs, ours = run(side="peer", **job), run(side="mnemos", **job)
        name = f"({batch},{length},{dim}), {heads} heads, chunk {chunk}" + (", Newton–Schulz" if orthogonal else "")
        ratio = share_got = "–"
        if "error" not in theirs and "error" not in ours:
            ratio = f"{theirs['seconds'] / ours['seconds']:.2f}x (reach {speed})"
            share_got = f"1/{theirs['extra'] / ours['extra']:.1f} (reach 1/{1 / share:.0f})"
        rows.append([name, seconds(theirs), seconds(ours), ratio, share_got])
        print(f"  {name}: {ratio}, memory {share_got}", flush=True)
    print(table(["layer, forward + backward", "titans-pytorch", "mnemos", "faster", "memory"], rows), "\n")


def chunk1(runs: int) -> None:
    rows = []
    for batch, length, dim, heads in dict.fromkeys(row[:4] for row in PEER_ROWS):
        job = dict(kind="layer", side="mnemos", batch=batch, length=length, dim=dim, heads=heads, orthogonal=False)
        large, small = run(chunk=64, runs=runs, **job), run(chunk=1, runs=max(3, runs // 2), **job)
        rows.append(
            [
                f"({batch},{length},{dim}), {heads} heads",
                seconds(large),
                seconds(small),
                f"{small['seconds'] / large['seconds']:.1f}x (reach 15)",
            ]
        )
        print("  " + rows[-1][0], rows[-1][-1], flush=True)
    print(table(["layer, forward + backward", "chunk 64", "chunk 1", "chunk 1 costs"], rows), "\n")


def ourselves(runs: int) -> None:
    base = dict(key_dim=64, value_dim=64, chunk_size=64)
    job = dict(kind="scan", batch=1, length=4096, heads=4, runs=runs)
    plain = run(spec=base, **job)
    rows = [["gd, window 1, identity", seconds(plain), "1", ""]]
    narrow = dict(base, key_dim=16)
    for name, spec, reference, limit in [
        ("window 16", dict(base, window=16), plain, 1.3),
        ("muon, one commit per chunk", dict(base, rule="muon"), plain, 3.0),
        ("monomials degree 2 of key_dim 16", dict(narrow, features="monomials"), run(spec=narrow, **job), 2.0),
    ]:
        result = run(spec=spec, **job)
        rows.append([name, seconds(result), f"{result['seconds'] / reference['seconds']:.2f}", f"reach {limit}"])
        print("  " + " ".join(rows[-1]), flush=True)
    print(table(["scan (1,4096), 4 heads of 64, chunk 64", "forward + backward", "ratio", ""], rows), "\n")
    rows = []
    for length in (1024, 4096, 16384):
        result = run(spec=base, **{**job, "length": length, "runs": 3})
        rows.append([str(length), f"{result['extra']:.0f}", f"{result['extra'] * 2**20 / length / 4 / 4:.0f}"])
    print(table(["tokens", "extra MB", "numbers per token and head"], rows), "\n")


def peak(runs: int) -> None:
    result = run(
        kind="scan",
        spec=dict(key_dim=64, value_dim=64, chunk_size=64),
        batch=1,
        length=4096,
        heads=4,
        peak=True,
        runs=runs,
    )
    flops = training_flops(64, 256, 64) * 4096 * 4
    rate = flops / result["seconds"] / 1e9
    print(
        f"scan (1,4096), 4 heads of 64, chunk 64: {result['seconds']:.3f} s for {flops / 1e9:.1f} useful GFLOP = {rate:.0f} GFLOP/s,"
    )
    print(
        f"{100 * rate / result['peak']:.0f} % of this machine's float32 matmul peak of {result['peak']:.0f} GFLOP/s (reach 40 %)\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["peer", "chunk1", "self", "peak"])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(measure(json.loads(options.job))))
        return
    print(machine(), "\n", flush=True)
    parts = {"peak": peak, "self": ourselves, "peer": peer, "chunk1": chunk1}
    for name, part in parts.items():
        if options.only in (None, name):
            part(options.runs)


if __name__ == "__main__":
    main()
