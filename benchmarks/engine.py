"""The engine of `mnemos serve` without HTTP, in CPU time: short pieces, batches whose answers begin and end apart, and `generate`.

Old and new run in turn: pieces by the block's kernel and by the general forward, batches with slots and with copies of all rows.

python benchmarks/engine.py [--preset titans-mag] [--hidden 128] [--rounds 5]
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Generator
from unittest import mock

import torch

from harness import machine, median, table
from mnemos.backends.cpu import decode
from mnemos.data import open_tokenizer
from mnemos.models import MnemosForCausalLM, presets
from mnemos.serve import Choice, Engine, Job, Limits, rows
from mnemos.serve.run import _keep_freed_memory
from mnemos.sessions import Dialogue, Sampling
from mnemos.sessions.reading import read_tokens

ROWS = 16
TURN = list(b"and where is it now?")


def cpu(function: Callable[[], object]) -> float:
    """Milliseconds of CPU time of this thread."""
    began = time.thread_time()
    function()
    return 1e3 * (time.thread_time() - began)


def general_pieces():
    """Pieces of several tokens are read by the general forward."""
    block = decode._block
    return mock.patch.object(decode, "_block", lambda b, x, state: None if x.shape[1] > 1 else block(b, x, state))


@contextlib.contextmanager
def copies_of_all_rows() -> Generator[None]:
    """Every row that joins or leaves makes a copy of all."""
    stackable = mock.patch.object(rows, "can_stack", lambda cache: not cache.is_kv_cache)
    with stackable, mock.patch.object(rows, "MnemosCache", type("Never", (), {})):
        yield


def pieces(model: MnemosForCausalLM, rounds: int) -> None:
    ids = torch.randint(0, 250, (1, 256))
    _, cache = read_tokens(model, None, ids[:, :64])
    own = [cache.clone()]

    def one() -> None:
        _, own[0] = read_tokens(model, own[0], ids[:, :1], is_own=True)

    found = []
    for size in (2, 8, 20, 64, 256):
        new, old, token = [], [], []
        for _ in range(5 * rounds + 1):
            new.append(cpu(lambda n=size: read_tokens(model, cache, ids[:, :n])))
            with general_pieces():
                old.append(cpu(lambda n=size: read_tokens(model, cache, ids[:, :n])))
            token += [cpu(one) for _ in range(3)]
        values = [median(x[1:]) for x in (new, old, token)]
        found.append([str(size), *(f"{x:.2f} ms" for x in values), f"{values[0] / values[2]:.1f}"])
    print(table(["tokens after a state", "piece", "general forward", "one token", "steps"], found), "\n", flush=True)


def answers(model: MnemosForCausalLM, dialogue: Dialogue, states: list, count: int) -> float:
    """Milliseconds per token of answers that end apart, prompts included."""
    engine = Engine(model, Limits())
    jobs = []
    for i, state in enumerate(states):
        choices = [Choice(0, Sampling(max_new_tokens=count + 3 * i), dialogue, 0)]
        jobs.append(Job(TURN, state, choices, lambda event: None, lambda job: None))
        engine.submit(jobs[-1])

    def run() -> None:
        while not all(job.is_ended for job in jobs):
            engine._round()

    return cpu(run) / sum(len(job.choices[0].generated) for job in jobs)


def bare(model: MnemosForCausalLM, count: int, batch: int) -> float:
    """Milliseconds per token of transformers' generate."""
    ids = torch.tensor([TURN]).expand(batch, -1)

    def run(tokens: int) -> float:
        return cpu(lambda: model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False))

    return (run(count) - run(1)) / (count - 1) / batch


def batches(model: MnemosForCausalLM, rounds: int) -> None:
    dialogue = Dialogue(open_tokenizer("bytes"), model)
    dialogue.ends = frozenset()
    states = [model.state(torch.randint(0, 250, (1, 20 + 7 * i))) for i in range(ROWS)]
    found: dict[str, list[float]] = {}
    for i in range(rounds + 1):
        values = {"generate, one row": bare(model, 80, 1), "one answer": answers(model, dialogue, states[:1], 150)}
        values[f"generate, {ROWS} rows"] = bare(model, 30, ROWS)
        with copies_of_all_rows():
            values[f"{ROWS} answers, copies of all rows"] = answers(model, dialogue, states, 60)
        values[f"{ROWS} answers, slots"] = answers(model, dialogue, states, 60)
        for name, value in values.items() if i else ():
            found.setdefault(name, []).append(value)
    one = found["one answer"]
    lines = [
        [name, f"{median(x):.3f} ms", f"{min(x):.3f} to {max(x):.3f}", f"{median([a / b for a, b in zip(one, x)]):.2f}"]
        for name, x in found.items()
    ]
    print(table(["", "CPU time a token", "", "times as many as one answer"], lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="titans-mag")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _keep_freed_memory()
    print(machine(), "\n", flush=True)
    model = MnemosForCausalLM(presets.config(arguments.preset, "nano", hidden_size=arguments.hidden)).eval()
    model.generation_config.eos_token_id = None
    pieces(model, arguments.rounds)
    batches(model, arguments.rounds)


if __name__ == "__main__":
    main()
