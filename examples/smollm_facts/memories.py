"""Which memory finds a fact? Memories of equal size, trained alike on the states that features.py has kept.

A row is a conversation as one stream: the told facts, a text, and questions with their answers. In front of each token of a value in an
answer, what the memory adds is compared with the whitened states of all told values of its row; a fact is right if the nearest one has the right token
for every token of its value. There is no base model above, so that all memories see the same and training takes minutes.

python memories.py --features FILE --held-out FILE [--steps 60] [--rows 4] [--memories NAME ...]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from closed_form import whitening
from keeper import initialise_gates, initialise_projections
from streams import Streams, pad
from torch import Tensor, nn

from mnemos.attach import AttachConfig
from mnemos.memory import NeuralMemory
from mnemos.nn.norm import RMSNorm
from train import MEMORY, rate

WIDTH = 576
COMMON = {"heads": MEMORY["heads"], "conv_width": MEMORY["conv_width"]}
MEMORIES = {name: {"preset": name, **COMMON} for name in ("titans", "omeganet", "atlas", "deltanet", "yaad")}
MEMORIES["deltanet, squared keys"] = MEMORIES["deltanet"] | {"features": "monomials", "degree": 2}
MEMORIES["the adapter's"] = MEMORY
SHARPNESS = 10.0  # of cosines in the loss


@dataclass
class Rows:
    """x: (B, T, D) and mask (B, T). sites: (N, 2) row and place of each read. facts: (N,) index of the fact that it belongs to. targets: per row
    the states (V, D) and the ids (V,) of told values. own: (N,) index of the right one."""

    x: Tensor
    mask: Tensor
    sites: Tensor
    facts: Tensor
    targets: list[tuple[Tensor, Tensor]]
    own: Tensor


def draw_rows(streams: Streams, draw: random.Random, entries: list) -> Rows:
    """The conversations of these entries of `Streams`."""
    states, sites, facts, targets, own = [], [], [], [], []
    for row, (told, asked) in enumerate(entries):
        parts, where, count = [told, draw.choice(streams.texts)], {}, 0
        for fact, (a, b) in zip(told.facts, told.spans):
            where[fact], count = count, count + b - a
        for s in draw.sample(asked, len(asked)):
            place, (a, b) = sum(len(p.ids) for p in parts), s.spans[0]
            for n in range(b - a):
                sites.append((row, place + a - 1 + n))
                facts.append(len(own) - n)
                own.append(where[s.facts[0]] + n)
            parts.append(s)
        values = [i for a, b in told.spans for i in range(a, b)]
        targets.append((told.source[values].float(), torch.tensor([told.ids[i] for i in values])))
        states.append(torch.cat([p.source for p in parts]))
    x, mask = pad(states)
    return Rows(x.float(), mask, torch.tensor(sites), torch.tensor(facts), targets, torch.tensor(own))


class Judge:
    """Scores of reads (N, D) against the told values of their rows."""

    def __init__(self, sources: Tensor):
        self.white = whitening(F.normalize(sources.float(), dim=-1))

    def __call__(self, y: Tensor, rows: Rows) -> tuple[Tensor, float]:
        """The cross-entropy, and the share of facts that are right."""
        losses, right = [], torch.ones(len(y), dtype=torch.bool)
        for row, (states, ids) in enumerate(rows.targets):
            mine = rows.sites[:, 0] == row
            told = F.normalize(F.normalize(states, dim=-1) @ self.white.T, dim=-1)
            scores = SHARPNESS * F.normalize(y[mine], dim=-1) @ told.T
            losses.append(F.cross_entropy(scores, rows.own[mine], reduction="sum"))
            right[mine] = ids[scores.argmax(-1)] == ids[rows.own[mine]]
        wrong = torch.zeros(len(y)).index_add(0, rows.facts, (~right).float())
        return torch.stack(losses).sum() / len(y), (wrong[rows.facts.unique()] == 0).float().mean().item()


class Memory(nn.Module):
    """norm, memory and gate, as `attach` puts them beside a layer."""

    def __init__(self, fields: dict):
        super().__init__()
        self.norm, self.gate = RMSNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.memory = NeuralMemory(AttachConfig(memory=fields).memory_config(WIDTH))

    def forward(self, rows: Rows) -> Tensor:
        """What is added at the places where values are due (N, D)."""
        y = self.memory(self.norm(rows.x), None, rows.mask)[0] * self.gate
        return y[rows.sites[:, 0], rows.sites[:, 1]]

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())


def of_size(fields: dict, size: int) -> Memory:
    """The memory whose width of values brings it nearest to `size` parameters."""
    keys = {} if "key_dim" in fields or fields["preset"] in ("omeganet", "atlas") else {"key_dim": MEMORY["key_dim"]}
    with torch.device("meta"):
        sizes = {v: Memory(fields | keys | {"value_dim": v}).size for v in range(32, 400, 8)}
    return Memory(fields | keys | {"value_dim": min(sizes, key=lambda v: abs(sizes[v] - size))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--memories", nargs="+", default=list(MEMORIES), choices=list(MEMORIES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    streams, held = Streams([Path(options.features)]), Streams([Path(options.held_out)])
    some = torch.cat(
        [told.source for told, _ in streams.entries[:100]] + [s.source for s in streams.texts[:60]]
    ).float()
    judge, results, size = Judge(some), {}, Memory(MEMORY | {"value_dim": 192}).size
    tests = [draw_rows(held, random.Random(1), held.entries[i : i + 4]) for i in range(0, len(held.entries), 4)]
    for name in options.memories:
        torch.manual_seed(options.seed)
        draw, model = random.Random(options.seed), of_size(MEMORIES[name], size)
        initialise_projections(model.memory, model.norm(some).detach())
        if MEMORIES[name].get("gating") == "sparse":
            initialise_gates(model.memory)
        optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.98))
        begin, found = time.process_time(), {}
        for step in range(options.steps + 1):
            if step % max(1, options.steps // 2) == 0:
                with torch.no_grad():
                    judged = [judge(model(rows), rows) for rows in tests]
                found[step] = [round(sum(float(x) for x in xs) / len(tests), 4) for xs in zip(*judged)]
                print(name, step, *found[step], f"{time.process_time() - begin:.0f} s", flush=True)
            if step == options.steps:
                break
            rows = draw_rows(streams, draw, draw.sample(streams.entries, options.rows))
            optimiser.param_groups[0]["lr"] = options.lr * rate(step, options.steps, warm=5)
            loss, _ = judge(model(rows), rows)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
        spec = model.memory.spec
        state = model.memory.initial_state(1)
        results[name] = {
            "parameters": model.size,
            "value_dim": spec.value_dim,
            "fast weights": [list(s) for s in spec.shapes],
        }
        results[name] |= {"state": state.nbytes, "held out": found, "seconds": round(time.process_time() - begin)}
        if options.json:
            Path(options.json).write_text(json.dumps({"steps": options.steps, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
