"""Teach a memory beside SmolLM2 to keep facts that a user states, from the states that features.py has kept.

First keys and queries: the query in front of a value in an answer is to find the key of that value where it was told, among all values
of a batch (a contrastive loss), and only values are to be written. Then the answers themselves: facts are written, then text, and the
loss of the answers goes through the layers above the memory. Only the memory trains.

python train.py OUT --features FILE ... [--minutes 60] [--memory JSON] [--match 300] [--read 300] [--steps 2000]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from closed_form import speak
from features import SINKS, causal, positions_of
from streams import Batch, Streams
from torch import Tensor
from transformers import AutoModelForCausalLM

from mnemos.attach import AttachConfig, attach, save_adapter, smollm
from mnemos.memory import read, scan

MEMORY = {
    "preset": "deltanet",
    "heads": 3,
    "learn_w0": True,
    "eps": 0.01,
    "lr_init": 0.5,
    "gate": "token",
    "gate_hidden": 256,
    "conv_width": 10,
}


def initialise(memory, gate: Tensor) -> None:
    """Keys begin as queries of the token before, and both sum up the tokens in front of them: a read returns what followed the same words."""
    with torch.no_grad():
        (q, k, _), last = memory.splits, memory.conv.width - 1
        memory.qkv.weight[q : q + k] = memory.qkv.weight[:q]
        memory.conv.weight.zero_()
        memory.conv.weight[1:, :q] = last**-0.5
        memory.conv.weight[:-1, q : q + k] = last**-0.5
        memory.conv.weight[last, q + k :] = 0.2  # small: SiLU is nearly linear there, and values keep all of a token
        torch.nn.init.normal_(memory.qkv.weight[q + k :], std=memory.config.dim**-0.5)
        gate.fill_(1.0)


def keep_values(memory) -> None:
    """Leave the projection of values as it is: the output map is fitted to it."""
    q, k, _ = memory.splits
    rows = torch.arange(memory.qkv.weight.shape[0]) < q + k
    memory.qkv.weight.register_hook(lambda gradient: gradient * rows.unsqueeze(1))
    memory.conv.weight.register_hook(lambda gradient: gradient * rows)


class Trained:
    """The memories of an attached model, and the layers of its base from `start` on.

    The highest memory keeps facts. One below it, if there is one, writes nothing: its static branch words the answers.
    """

    def __init__(self, model: Any, start: int):
        self.model, self.start, self.share = model, start, 1.0
        self.memories = {int(i): memory for i, memory in model.memories.items()}
        self.added = self.memories[max(self.memories)]
        self.body, self.head = model.base.model, model.base.lm_head
        self.injected: dict[int, Tensor] = {}
        for i in self.memories:
            self.body.layers[i].self_attn.register_forward_hook(functools.partial(self._inject, i))

    def _inject(self, layer: int, module, args, output):
        y = self.injected.get(layer)
        return output if y is None else (output[0] + y.to(output[0].dtype), *output[1:])

    def input(self, source: Tensor) -> Tensor:
        """The input of the memory (B, T, D)."""
        return self.added.norm(source.to(self.added.gate.dtype))

    def project(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of x, in bfloat16 where the projection is concerned."""
        memory = self.added.memory
        with torch.autocast("cpu", torch.bfloat16):
            q, k, v, _ = memory.project(x, memory.initial_state(x.shape[0]), mask, None)
        return q.float(), k.float(), v.float()

    def write(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor):
        """The state after x (B, T, D), whose keys and values are k and v."""
        memory = self.added.memory
        state = memory.initial_state(x.shape[0])
        gates = memory.gates(x, state, mask, None)
        _, after = scan(None, k, v, gates, state, memory.spec, memory.features, mask, None, memory.config.backend)
        tail = torch.zeros_like(state.conv)  # questions begin behind the sinks, far from what was written
        return dataclasses.replace(after, conv=tail)

    def read(self, source: Tensor, state, mask: Tensor) -> dict[int, Tensor]:
        """What every memory adds (B, T, D), by layer, for questions that read source (B, T, D) and the facts in `state`."""
        found = {}
        for layer, added in self.memories.items():
            if layer < self.start:
                continue
            x = added.norm(source.to(added.gate.dtype))
            with torch.autocast("cpu", torch.bfloat16):
                y, _ = added.memory(x, state if added is self.added else None, mask)
            found[layer] = y.float() * added.gate
        return found

    def above(self, states: Tensor, ys: dict[int, Tensor], sinks: Tensor, start: list[int]) -> Tensor:
        """The stream in front of layer `start` and what memories add (B, T, D) -> hidden states behind the last norm (B, T, D)."""
        B, T, _ = states.shape
        h = torch.cat([sinks.expand(B, -1, -1), states], dim=1)
        self.injected = {layer: F.pad(y, (0, 0, SINKS, 0)) for layer, y in ys.items()}
        positions = positions_of(start, T)
        angles, mask = self.body.rotary_emb(h, positions), causal(T + SINKS)
        for layer in self.body.layers[self.start :]:
            h = layer(h, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        self.injected = {}
        return self.body.norm(h)[:, SINKS:]


def strengths(memory, x: Tensor) -> Tensor:
    """How strongly each token of x is written, 0 to 1: (..., H)."""
    gates = memory.gating(x)
    strength = gates.lr / memory.config.effective_max_lr
    if gates.momentum is not None and not memory.spec.commits:
        strength = strength / (1 - gates.momentum)
    if gates.gate is not None:
        strength = strength * gates.gate
    return strength.clamp(1e-7, 1 - 1e-6)


def gate_loss(values: Tensor, told: Tensor, text: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of write strengths: 1 for told values, 0 for other tokens of dialogues and for text, of which there is far more."""
    loss = -values.log().mean() - 20 * (1 - told).log().mean() - 300 * (1 - text).log().mean()
    return loss, {"written": values.mean(), "others": told.mean(), "text": text.mean()}


def find_loss(keys: Tensor, queries: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Contrastive loss of queries (P, H, K) in front of values against the keys of told values (N, H, K), head by head, and how many are
    found. own: (P,) the keys that belong to the queries."""
    scores = 20 * torch.einsum("phk,nhk->hpn", queries, keys)
    loss = F.cross_entropy(scores.flatten(0, 1), own.expand(scores.shape[0], -1).flatten())
    return loss, (scores.mean(0).argmax(1) == own).float().mean()


def read_loss(read: Tensor, values: Tensor, ids: Tensor, expected: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Contrastive loss of what is read (P, H, V) against all told values (N, H, V), whose tokens are ids (N,), and its distance from
    its own value (P, H, V); and how often the nearest value is the token expected (P,)."""
    scores = 20 * F.normalize(read.flatten(1), dim=-1) @ F.normalize(values.flatten(1), dim=-1).T  # P N
    right = ids.unsqueeze(0) == expected.unsqueeze(1)
    loss = scores.logsumexp(1) - scores.masked_fill(~right, -1e4).logsumexp(1)
    own = own.detach()
    distance = (read - own).square().sum((1, 2)) / own.square().sum((1, 2))
    return loss.mean() + distance.clamp(max=4).mean(), right.gather(1, scores.argmax(1, keepdim=True)).float().mean()


def answer_loss(trained: Trained, batch: Batch, state, sinks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the answers, plus what memories add elsewhere in questions; and the shares of right values and answers."""
    ys = trained.read(batch.ask, state.select(batch.owner), batch.ask_mask)
    hidden = trained.above(batch.states, ys, sinks, batch.start)
    ends = F.pad(batch.value[:, :-1], (1, 0))  # and the token behind each value
    keep = (batch.value | ends)[:, 1:] | (batch.answer[:, 1:] & (torch.rand(batch.answer[:, 1:].shape) < trained.share))
    logits = trained.head(hidden[:, :-1][keep]).float()
    target = batch.ids[:, 1:][keep]
    losses = F.cross_entropy(logits, target, reduction="none")
    is_value = (batch.value | ends)[:, 1:][keep]
    right = logits.argmax(-1) == target
    wrong = torch.zeros(len(batch.owner)).index_add(0, keep.nonzero()[:, 0], (~right & is_value).float())
    whole = torch.zeros(len(batch.owner)).index_add(0, keep.nonzero()[:, 0], (~right).float())
    weight = torch.where(is_value, 1.0, 0.5)
    loss = (losses * weight).sum() / weight.sum()
    return loss, {"answers": loss, "values": (wrong == 0).float().mean(), "whole": (whole == 0).float().mean()}


def text_loss(trained: Trained, streams: Streams, draw: random.Random, state, count: int = 2) -> Tensor:
    """Cross-entropy of ordinary text, read with facts in the memory, at random tokens."""
    source, states, ids, mask, start = streams.whole_texts(draw, count)
    hidden = trained.above(states, trained.read(source, state, mask), streams.sinks, start)
    keep = mask[:, 1:] & (torch.rand(mask[:, 1:].shape) < 40 / mask.shape[1])
    return F.cross_entropy(trained.head(hidden[:, :-1][keep]).float(), ids[:, 1:][keep])


def step_loss(
    trained: Trained, batch: Batch, streams: Streams, draw: random.Random, ends: bool, text_weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch; ends: that of the answers too."""
    memory = trained.added.memory
    x, asked = trained.input(batch.write), trained.input(batch.ask)
    written, of_questions = strengths(memory, x), strengths(memory, asked)
    others = torch.cat([written[batch.is_told & ~batch.is_value], of_questions[batch.ask_mask & ~batch.answer]])
    text = written[batch.mask & ~batch.is_told]
    gates, report = gate_loss(written[batch.is_value], others, text if len(text) else others)
    _, k, v = trained.project(x, batch.mask)
    q, _, _ = trained.project(asked, batch.ask_mask)
    row, told, question, token = batch.pairs.unbind(1)
    queries = q[question, token - 1]  # P H K
    find, found = find_loss(k[row, told], queries, torch.arange(len(row)))
    state = trained.write(x, k, v, batch.mask)
    value = read(queries.unsqueeze(1), state.select(row), memory.spec, memory.features).squeeze(1)
    ids = batch.write_ids[batch.is_value]
    reads, values = read_loss(value, v[batch.is_value].detach(), ids, batch.write_ids[row, told], v[row, told])
    loss = reads + 0.3 * find + 0.1 * gates
    report |= {"find": find, "found": found, "reads": reads, "read": values}
    if ends:
        answers, more = answer_loss(trained, batch, state, streams.sinks)
        loss, report = loss + answers, report | more
    if ends and text_weight:
        report["text_loss"] = text_loss(trained, streams, draw, state.select(torch.arange(2)))
        loss = loss + text_weight * report["text_loss"]
    return loss, {name: x.detach() for name, x in report.items()}


def match_loss(trained: Trained, streams: Streams, draw: random.Random, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses of keys, queries, values and gates, with told values alone in the memory: no other token is written."""
    memory = trained.added.memory
    some = streams.windows(draw, rows, 4, memory.conv.width + 1)
    R, N, W, _ = some.keys.shape
    x, asked = trained.input(some.keys.flatten(0, 1)), trained.input(some.queries)
    _, k, v = trained.project(x, torch.ones(R * N, W, dtype=torch.bool))
    q, _, _ = trained.project(asked, torch.ones(asked.shape[:2], dtype=torch.bool))
    k, v = (s[:, -1].unflatten(0, (R, N)) for s in (k, v))  # R N H ·
    state = trained.write(x[:, -1].unflatten(0, (R, N)), k, v, some.mask)
    row, index = some.pairs.unbind(1)
    values = read(q[:, -1:], state.select(row), memory.spec, memory.features).squeeze(1)
    reads, right = read_loss(values, v[some.mask].detach(), some.ids[some.mask], some.ids[row, index], v[row, index])
    place = torch.full(some.mask.shape, -1)
    place[some.mask] = torch.arange(int(some.mask.sum()))
    find, found = find_loss(k[some.mask], q[:, -1], place[row, index])
    parts = [strengths(memory, trained.input(part)) for part in streams.gate_tokens(draw, 40, 24)]
    gates, report = gate_loss(*parts)
    report = {name: x.detach() for name, x in report.items()}
    return reads + find + 0.3 * gates, report | {
        "find": find.detach(),
        "found": found,
        "reads": reads.detach(),
        "read": right,
    }


def rate(step: int, total: int, warm: int = 20) -> float:
    """Linear warm-up, constant, linear decay over the last 40 %."""
    return min(1.0, (step + 1) / warm, (total - step) / (0.4 * total) + 0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--features", nargs="+", required=True)
    parser.add_argument(
        "--layers", default="10,26", help="layers with a memory; those below that of the features take no part"
    )
    parser.add_argument(
        "--start", type=int, help="the layer in front of which questions were kept, if not the highest of the files"
    )
    parser.add_argument("--only", type=int, help="the layer whose memory trains; by default all")
    parser.add_argument("--text-weight", type=float, default=0.0, help="weight of the loss of ordinary text")
    parser.add_argument("--memory", default=json.dumps(MEMORY))
    parser.add_argument(
        "--match", type=int, default=300, help="steps of the contrastive loss of keys and queries alone"
    )
    parser.add_argument("--read", type=int, default=300, help="steps in which the memory is written and read by itself")
    parser.add_argument("--steps", type=int, default=1500, help="steps of the answers")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--told", type=int, default=4, help="most dialogues in a stream, of 2 to 5 facts each")
    parser.add_argument(
        "--between", type=int, default=1500, help="most tokens of text in a stream, reached at half of the steps"
    )
    parser.add_argument("--gating", type=float, default=2.0, help="factor of the learning rate of gates")
    parser.add_argument("--no-speak", action="store_true", help="keep the output map of --init")
    parser.add_argument(
        "--share", type=float, default=0.3, help="share of the tokens of answers around values that count"
    )
    parser.add_argument("--fixed-values", action="store_true", help="keep the projection of values as it is fitted")
    parser.add_argument("--at-once", action="store_true", help="the full amount of text from the first step on")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    folder = smollm()
    streams = Streams([Path(p) for p in options.features], options.start)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    layers = [int(i) for i in options.layers.split(",")]
    config = AttachConfig(layers=layers, source=streams.source, window=256, memory=json.loads(options.memory))
    model = attach(base, config).eval()
    trained = Trained(model, streams.layer)
    trained.share = options.share
    for added in trained.memories.values():
        initialise(added.memory, added.gate)
        if added is not trained.added:
            with torch.no_grad():
                added.memory.gating.offset[: added.memory.heads] = -12.0  # the strength of writes
    if options.fixed_values:
        keep_values(trained.added.memory)
    if options.only is not None:
        model.memories.requires_grad_(False)
        trained.memories[options.only].requires_grad_(True)
    parameters = [p for p in model.memories.parameters() if p.requires_grad]
    gating = [p for n, p in model.memories.named_parameters() if p.requires_grad and "gating" in n]
    others = [p for n, p in model.memories.named_parameters() if p.requires_grad and "gating" not in n]
    groups = [{"params": others, "scale": 1.0}, {"params": gating, "scale": options.gating}]
    optimiser = torch.optim.AdamW(groups, lr=options.lr, weight_decay=0.01, betas=(0.9, 0.98))
    kept, step, begin = Path(options.out).with_suffix(".pt"), 0, time.time()
    if options.init:
        own, found = model.memories.state_dict(), torch.load(options.init, weights_only=True)["memories"]
        model.memories.load_state_dict(own | {n: x for n, x in found.items() if n in own and x.shape == own[n].shape})
    if kept.is_file():
        saved = torch.load(kept, weights_only=True)
        model.memories.load_state_dict(saved["memories"])
        optimiser.load_state_dict(saved["optimiser"])
        step, begin = saved["step"], begin - saved["seconds"]
    print(f"{sum(p.numel() for p in parameters):,} parameters beside layer {streams.layer}", flush=True)
    stages = {"match": options.match, "read": options.read, "answer": options.steps}
    total, shown = sum(stages.values()), []
    while step < total and time.time() - begin < 60 * options.minutes:
        at, stage = step, "match"
        while at >= stages[stage]:
            at, stage = at - stages[stage], "read" if stage == "match" else "answer"
        for group in optimiser.param_groups:
            group["lr"] = options.lr * group["scale"] * rate(at, stages[stage])
        if stage == "match":
            loss, report = match_loss(trained, streams, draw, 16)
        else:
            between = options.between if options.at_once else int(options.between * min(1.0, 2 * at / stages[stage]))
            if stage == "answer" and at == 0 and not options.no_speak:
                print(f"values speak: cosine {speak(trained, streams):.3f}", flush=True)
            batch = streams.draw(draw, options.rows, options.told, between, 2)
            loss, report = step_loss(trained, batch, streams, draw, stage == "answer", options.text_weight)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        shown.append({name: float(x) for name, x in report.items()})
        step += 1
        if step % 10 == 0:
            last = shown[-10:]
            means = {
                name: sum(x[name] for x in last if name in x) / max(1, sum(name in x for x in last))
                for name in last[-1]
            }
            print(step, *(f"{name} {x:.4f}" for name, x in means.items()), f"{time.time() - begin:.0f} s", flush=True)
        if step % 50 == 0 or step == total:
            torch.save(
                {
                    "memories": model.memories.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "step": step,
                    "seconds": time.time() - begin,
                },
                kept,
            )
    save_adapter(model, options.out)


if __name__ == "__main__":
    main()
