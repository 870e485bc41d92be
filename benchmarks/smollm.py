"""SmolLM2 with its adapter as `mnemos serve` answers with it, beside the base model in transformers' own generate.

Base, attached model and engine answer in turn in one run, each behind the same prompt, which is read before the time begins.
Times are processor time of one thread, which other programs on the machine change less than the clock.

python benchmarks/smollm.py [--prompt 512] [--tokens 24] [--rounds 9]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness import interval, machine, median, table
from mnemos.attach import load_adapter, smollm, smollm_adapter
from mnemos.serve import Choice, Engine, Job, Limits
from mnemos.sessions import Dialogue, Sampling


def generated(model: Any, ids: torch.Tensor, count: int) -> float:
    """Seconds per token of `generate`, without those of the prompt and the first token."""

    def seconds(tokens: int) -> float:
        began = time.thread_time()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return time.thread_time() - began

    first = seconds(1)
    return (seconds(count) - first) / (count - 1)


def answered(model: Any, dialogue: Dialogue, ids: torch.Tensor, count: int) -> float:
    """Seconds per token of the engine's answer, without those of the prompt and the first token."""
    job = Job(ids[0].tolist(), None, [Choice(0, Sampling(max_new_tokens=count), dialogue)], _nothing, _nothing)
    engine = Engine(model, Limits())
    engine.submit(job)
    while not job.choices[0].generated:
        engine._round()
    began, already = time.thread_time(), len(job.choices[0].generated)
    while not job.is_ended:
        engine._round()
    return (time.thread_time() - began) / (count - already)


def _nothing(_: Any) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="tokens before the answer")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = smollm()
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    model = load_adapter(AutoModelForCausalLM.from_pretrained(folder), smollm_adapter()).eval()
    base.generation_config.eos_token_id = model.generation_config.eos_token_id = None
    dialogue = Dialogue(AutoTokenizer.from_pretrained(folder), model)
    dialogue.ends = frozenset()
    ids = torch.randint(100, 40_000, (1, options.prompt))
    print(machine(), "\n", flush=True)
    calls = {
        "base, generate of transformers": lambda: generated(base, ids, options.tokens),
        "with the adapter, generate": lambda: generated(model, ids, options.tokens),
        "with the adapter, engine of mnemos serve": lambda: answered(model, dialogue, ids, options.tokens),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(options.rounds + 1):  # the first round loads and compiles
        for name, call in calls.items():
            found[name] += [call()] if i else [call()][:0]
    first = next(iter(found.values()))
    rows = []
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(first, seconds)]
        low, high = interval(ratios)
        speed = f"{1 / median(seconds):.2f}"
        rows.append([name, f"{1e3 * median(seconds):.1f} ms", speed, f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"])
    print(table(["", "CPU time a token", "tokens/s", "of the base's speed (95 % interval)"], rows))


if __name__ == "__main__":
    main()
