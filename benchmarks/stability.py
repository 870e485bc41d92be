"""Does every preset train without NaN, and does it learn? 2,000 optimizer steps each, by default settings.

    python benchmarks/stability.py --text shakespeare.txt --out stability.jsonl            # every preset, an hour or two
    python benchmarks/stability.py --presets titans-mag atlas --steps 300 --dtype bfloat16

A model of two layers, hidden size 64, reads bytes of a text: rows of 2 x 128 tokens, and at every 100th step one of 4,096.
AdamW as the trainer has it (`mnemos.train.parameter_groups`), learning rate 3e-3 after 50 steps of warm-up, gradients clipped
at 1. A run is one line of JSON: the loss of the last 50 short steps on text not trained on yet, beside that of the text's byte
frequencies (nats), steps whose loss or gradients were not finite (they are counted and skipped), and the largest gradient
norm. Runs already in --out are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch

from harness import machine
from mnemos.models import MnemosForCausalLM, presets
from mnemos.train import OptimConfig, parameter_groups


def corpus(path: str | None) -> torch.Tensor:
    """Bytes of a file, or of Python's own standard library."""
    if path is not None:
        return torch.tensor(list(Path(path).read_bytes()))
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.tensor(list(b"\n".join(file.read_bytes() for file in library)[:2_000_000]))


def unigram(data: torch.Tensor) -> float:
    share = torch.bincount(data, minlength=256).double() / len(data)
    return -(share * share.clamp(min=1e-12).log()).sum().item()


def train(name: str, data: torch.Tensor, steps: int, dtype: str, depth: int | None) -> dict:
    torch.manual_seed(0)
    config = presets.config(name, "nano", vocab_size=256, hidden_size=64, num_hidden_layers=2)
    if depth is not None:
        config = presets.config(
            name,
            "nano",
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            memory={**(config.memory or {}), "depth": depth},
        )
    model = MnemosForCausalLM(config).train()
    optimizer = torch.optim.AdamW(parameter_groups(model, OptimConfig(lr=3e-3)))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 50))
    generator = torch.Generator().manual_seed(1)
    losses, bad, largest, started = [], 0, 0.0, time.perf_counter()
    for i in range(steps):
        rows, length = (1, 4096) if i % 100 == 99 else (2, 128)
        starts = torch.randint(0, len(data) - length, (rows,), generator=generator).tolist()
        ids = torch.stack([data[s : s + length] for s in starts])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        if not (torch.isfinite(loss) and norm < float("inf")):
            bad += 1
            continue
        largest = max(largest, norm)
        optimizer.step()
        schedule.step()
        if length == 128:
            losses.append(loss.item())
    return {
        "preset": name,
        "steps": steps,
        "dtype": dtype,
        "depth": depth,
        "loss": sum(losses[-50:]) / max(1, len(losses[-50:])),
        "unigram": unigram(data),
        "not_finite": bad,
        "largest_gradient": largest,
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="*", default=presets.names())
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--depth", type=int, help="depth of the memory, instead of the preset's")
    parser.add_argument("--text", help="a text file; the Python standard library by default")
    parser.add_argument("--out", default="stability.jsonl")
    options = parser.parse_args()
    print(machine(), flush=True)
    out, data = Path(options.out), corpus(options.text)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(run["preset"], run["steps"], run["dtype"], run["depth"]) for run in done}
    for name in options.presets:
        if (name, options.steps, options.dtype, options.depth) in known:
            continue
        result = train(name, data, options.steps, options.dtype, options.depth)
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(
            f"{name:18} loss {result['loss']:.3f} (byte frequencies {result['unigram']:.3f}), "
            f"{result['not_finite']} steps not finite, largest gradient {result['largest_gradient']:.1f}, {result['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
