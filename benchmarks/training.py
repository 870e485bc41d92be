"""Speed of the trainer: against a bare loop of forward, backward and step; start-up to the first step; waiting for data.

    python benchmarks/training.py                        # a few minutes on one core
    python benchmarks/training.py --only loop --rounds 9

The loop and the trainer take turns in one process, on models and batches of their own, so that whatever else the machine does
hits both; the ratio is the median over rounds. Start-up is the time of `mnemos train` as a process, up to its first step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from harness import machine, median, table
from mnemos.data import DataConfig, open_data
from mnemos.models import MnemosForCausalLM, presets
from mnemos.train import CheckpointConfig, ModelConfig, OptimConfig, TrainConfig, Trainer, WatchConfig
from mnemos.train.optimisers import Optimisers
from mnemos.train.telemetry import read_metrics

GOAL, START_GOAL = 0.95, 10.0


def trainer_of(folder: str, preset: str, length: int, batch: int) -> Trainer:
    """As a user trains: metrics, prefetched data, gradient clipping, a line of numbers every ten steps."""
    config = TrainConfig(
        model=ModelConfig(preset=preset),
        data=DataConfig(seq_len=length, batch_size=batch, cache_dir=folder),
        checkpoint=CheckpointConfig(every=10**9),
        watch=WatchConfig(validate_every=0, sample_tokens=0),
        folder=folder,
        steps=10**6,
    )
    trainer = Trainer(config)
    trainer._begin()
    return trainer


def bare_loop(folder: str, preset: str, length: int, batch: int):
    """The least that trains the same model on the same text."""
    data = open_data(DataConfig(seq_len=length, batch_size=batch, cache_dir=folder))
    torch.manual_seed(0)
    model = MnemosForCausalLM(presets.config(preset, "nano", eos_token_id=0)).train()
    optimisers, parameters = Optimisers(model, OptimConfig()), list(model.parameters())

    def step() -> None:
        batch = next(data.train)
        model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimisers.step()
        optimisers.zero_grad()

    return step


def timed(step, count: int) -> tuple[float, float]:
    """Seconds on the clock, and of this process's CPU, which other programs do not lengthen."""
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    return time.perf_counter() - start, time.process_time() - cpu


def compare(preset: str, length: int, batch: int, rounds: int, steps: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        trainer, loop = trainer_of(folder, preset, length, batch), bare_loop(folder, preset, length, batch)

        def ours() -> None:
            trainer.loop.run([trainer.progress.step])

        timed(ours, 3), timed(loop, 3)
        pairs = []
        for turn in range(rounds):
            order = (loop, ours) if turn % 2 else (ours, loop)
            seconds = {step: timed(step, steps) for step in order}
            pairs.append((seconds[loop], seconds[ours]))
        clock = sorted(bare[0] / trained[0] for bare, trained in pairs)
        cpu = sorted(bare[1] / trained[1] for bare, trained in pairs)
        waits = [r["data_wait"] for r in read_metrics(trainer.path, "train")]
        tokens = batch * length * steps
        return [
            preset,
            f"{batch} x {length}",
            f"{tokens / median([bare[0] for bare, _ in pairs]):.0f}",
            f"{tokens / median([trained[0] for _, trained in pairs]):.0f}",
            f"{median(clock):.3f} ({clock[0]:.3f} to {clock[-1]:.3f})",
            f"{median(cpu):.3f} ({cpu[0]:.3f} to {cpu[-1]:.3f})",
            "yes" if median(cpu) >= GOAL else "no",
            f"{100 * median(waits):.2f} %",
        ]


def start_up(runs: int) -> str:
    """Seconds from starting the process to the end of its first step, with the embedded text tokenised already and not."""
    found: dict[str, list[tuple[float, float]]] = {"first run on a machine": [], "later runs": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(runs + 1):
            command = [sys.executable, "-m", "mnemos", "train", "--preset", "titans-mag", "--size", "nano"]
            command += ["--steps", "1", "--folder", folder, "--name", f"run{i}", "--data.cache-dir", f"{folder}/cache"]
            command += ["--watch.validate-every", "0", "--watch.sample-tokens", "0"]
            source = str(Path(__file__).resolve().parents[1] / "src")
            began, before = time.time(), os.times()
            subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": source})
            after = os.times()
            first = read_metrics(Path(folder) / f"run{i}", "train")[0]["time"]
            spent = after.children_user + after.children_system - before.children_user - before.children_system
            found["later runs" if i else "first run on a machine"].append((first - began, spent))
    rows = []
    for name, values in found.items():
        clock, cpu = (median([value[k] for value in values]) for k in (0, 1))
        rows.append([name, f"{clock:.1f} s", f"{cpu:.1f} s", "yes" if clock < START_GOAL else "no"])
    header = ["nano", "start of the process to the first step", "CPU of the whole process", f"< {START_GOAL:.0f} s"]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["loop", "start"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    print(machine(), "\n", flush=True)
    if options.only != "start":
        header = [
            "preset, nano",
            "batch",
            "bare loop tokens/s",
            "trainer tokens/s",
            "ratio, clock",
            "ratio, CPU",
            "≥ 0.95",
        ]
        header.append("waiting for data")
        shapes = [("titans-mag", 256, 2), ("transformer", 256, 4)]
        print(table(header, [compare(*shape, options.rounds, options.steps) for shape in shapes]), "\n", flush=True)
    if options.only != "loop":
        print(start_up(3))


if __name__ == "__main__":
    main()
