"""Time of `torch.compile(model, fullgraph=True)`: the first training step of one preset of every family, and steps after it.

    python benchmarks/compile_time.py                           # inductor, all families: some minutes
    python benchmarks/compile_time.py --only titans-mag swa --backend aot_eager

float32, byte vocabulary, dim 64, depth 1, batch 1 x 128. Each preset has a process of its own and an empty inductor cache.
CPU seconds count this process and the compilers that it starts; the wall clock also counts what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

PRESETS = ("titans-mag", "deltanet", "atlas", "deeptransformer", "titans-mac", "swa")
SHAPE = dict(vocab_size=256, hidden_size=64, num_attention_heads=2, num_hidden_layers=1)
TOKENS, STEPS = 128, 7


def cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(x.ru_utime + x.ru_stime for x in used)


def measure(name: str, backend: str) -> dict[str, float]:
    import torch

    from mnemos.models import MnemosForCausalLM, presets

    torch.manual_seed(0)
    model = MnemosForCausalLM(presets.config(name, "nano", **SHAPE)).train()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    ids = torch.randint(0, 256, (1, TOKENS))

    def step(run) -> float:
        start = time.perf_counter()
        run(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()
        return time.perf_counter() - start

    eager = statistics.median([step(model) for _ in range(STEPS + 2)][2:])
    before = cpu_seconds()
    first = step(compiled)
    compiling = cpu_seconds() - before
    return {
        "first": first,
        "cpu": compiling,
        "eager": eager,
        "step": statistics.median(step(compiled) for _ in range(STEPS)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(PRESETS), metavar="PRESET")
    parser.add_argument("--backend", default="inductor", help="of torch.compile: inductor or aot_eager")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker is not None:
        print(json.dumps(measure(chosen.worker, chosen.backend)))
        return
    from harness import machine, table

    print(f"{machine()}, backend {chosen.backend}", flush=True)
    rows = []
    for name in chosen.only:
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            command = [sys.executable, __file__, "--worker", name, "--backend", chosen.backend]
            made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        found = json.loads(made.splitlines()[-1])
        print(name, found, file=sys.stderr, flush=True)
        times = [f"{found[key]:.1f}" for key in ("first", "cpu")] + [
            f"{found[key] * 1e3:.0f}" for key in ("eager", "step")
        ]
        rows.append([name, *times])
    print(table(["preset", "first step s", "CPU s", "eager step ms", "compiled step ms"], rows))


if __name__ == "__main__":
    main()
