"""Teach a memory beside SmolLM2 to keep facts that a user states, from the states that features.py has kept.

First keys and queries: the query in front of a value in an answer is to find the key of that value where it was told, among all values
of a batch (a contrastive loss), and only values are to be written. Then the answers themselves: facts are written, then text, and the
loss of the answers goes through the layers above the memory. Only the memory trains.

python train.py OUT --features FILE ... [--minutes 60] [--memory JSON] [--find 200] [--steps 2000]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from features import SINKS, causal, positions_of
from streams import Batch, Streams
from torch import Tensor
from transformers import AutoModelForCausalLM

from mnemos.attach import AttachConfig, attach, save_adapter, smollm
from mnemos.memory import read, scan

MEMORY = {"preset": "deltanet", "heads": 3, "learn_w0": True, "eps": 0.01, "lr_init": 0.5, "gate": "token", "conv_width": 10}


def initialise(memory, gate: Tensor) -> None:
    """Keys begin as queries of the token before, and both sum up the tokens in front of them: a read returns what followed the same words."""
    with torch.no_grad():
        (q, k, _), last = memory.splits, memory.conv.width - 1
        memory.qkv.weight[q : q + k] = memory.qkv.weight[:q]
        memory.conv.weight.zero_()
        memory.conv.weight[1:, :q] = last**-0.5
        memory.conv.weight[:-1, q : q + k] = last**-0.5
        memory.conv.weight[last, q + k :] = 1.0
        gate.fill_(1.0)


class Trained:
    """The memory of an attached model, and the layers of its base above it."""

    def __init__(self, model: Any, layer: int):
        self.model, self.layer, self.added = model, layer, model.memories[str(layer)]
        self.body, self.head = model.base.model, model.base.lm_head
        self.injected: Tensor | None = None
        self.body.layers[layer].self_attn.register_forward_hook(self._inject)

    def _inject(self, module, args, output):
        return output if self.injected is None else (output[0] + self.injected.to(output[0].dtype), *output[1:])

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

    def read(self, x: Tensor, state, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = self.added.memory(x, state, mask)
        return y.float() * self.added.gate

    def above(self, states: Tensor, y: Tensor, sinks: Tensor, start: list[int]) -> Tensor:
        """states and y (B, T, D) -> hidden states behind the last norm (B, T, D)."""
        B, T, _ = states.shape
        h = torch.cat([sinks.expand(B, -1, -1), states], dim=1)
        self.injected = F.pad(y, (0, 0, SINKS, 0))
        positions = positions_of(start, T)
        angles = self.body.rotary_emb(h, positions)
        for layer in self.body.layers[self.layer :]:
            h = layer(h, attention_mask=causal(T + SINKS), position_ids=positions, position_embeddings=angles)
            self.injected = None
        return self.body.norm(h)[:, SINKS:]


def gate_loss(trained: Trained, batch: Batch, x: Tensor, asked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of the write strengths: 1 for told values, 0 for other tokens but answers. Also the means of both kinds."""
    memory = trained.added.memory

    def strengths(x: Tensor) -> Tensor:
        gates = memory.gating(x)
        strength = gates.lr / memory.config.effective_max_lr
        if gates.momentum is not None and not memory.spec.commits:
            strength = strength / (1 - gates.momentum)
        if gates.gate is not None:
            strength = strength * gates.gate
        return strength.clamp(1e-7, 1 - 1e-6)

    written, of_questions = strengths(x), strengths(asked)
    values = written[batch.is_value]
    others = torch.cat([written[batch.mask & ~batch.is_value], of_questions[batch.ask_mask & ~batch.answer]])
    loss = -values.log().mean() - 20 * (1 - others).log().mean()
    return loss, values.mean(), others.mean()


def find_loss(keys: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Contrastive loss of queries in front of values against the keys of told values (P, H, K), head by head; and how many are found."""
    scores = 20 * torch.einsum("phk,nhk->hpn", queries, keys)
    same = torch.arange(len(keys)).expand(scores.shape[0], -1)
    return F.cross_entropy(scores.flatten(0, 1), same.flatten()), (scores.mean(0).argmax(1) == same[0]).float().mean()


def read_loss(read: Tensor, values: Tensor, ids: Tensor, expected: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Contrastive loss of what is read (P, H, V) against all told values (N, H, V), whose tokens are ids (N,), and its distance from
    its own value (P, H, V); and how often the nearest value is the token expected (P,)."""
    scores = 20 * F.normalize(read.flatten(1), dim=-1) @ F.normalize(values.flatten(1), dim=-1).T  # P N
    right = ids.unsqueeze(0) == expected.unsqueeze(1)
    loss = scores.logsumexp(1) - scores.masked_fill(~right, -1e4).logsumexp(1)
    own = own.detach()
    distance = (read - own).square().sum((1, 2)) / own.square().sum((1, 2))
    return loss.mean() + distance.clamp(max=4).mean(), right.gather(1, scores.argmax(1, keepdim=True)).float().mean()


def answer_loss(trained: Trained, batch: Batch, state, asked: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of the answers; the share of values that are right, and of answers that are."""
    y = trained.read(asked, state.select(batch.owner), batch.ask_mask)
    hidden = trained.above(batch.states, y, sinks, batch.start)
    keep = batch.answer[:, 1:]
    logits = trained.head(hidden[:, :-1][keep]).float()
    target = batch.ids[:, 1:][keep]
    losses = F.cross_entropy(logits, target, reduction="none")
    is_value = batch.value[:, 1:][keep]
    right = logits.argmax(-1) == target
    wrong = torch.zeros(len(batch.owner)).index_add(0, keep.nonzero()[:, 0], (~right & is_value).float())
    whole = torch.zeros(len(batch.owner)).index_add(0, keep.nonzero()[:, 0], (~right).float())
    weight = torch.where(is_value, 1.0, 0.3)
    return (losses * weight).sum() / weight.sum(), (wrong == 0).float().mean(), (whole == 0).float().mean()


def step_loss(trained: Trained, batch: Batch, sinks: Tensor, ends: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch; ends: that of the answers too."""
    memory = trained.added.memory
    x, asked = trained.input(batch.write), trained.input(batch.ask)
    gates, written, others = gate_loss(trained, batch, x, asked)
    _, k, v = trained.project(x, batch.mask)
    q, _, _ = trained.project(asked, batch.ask_mask)
    row, told, question, token = batch.pairs.unbind(1)
    queries = q[question, token - 1]  # P H K
    find, found = find_loss(k[row, told], queries)
    state = trained.write(x, k, v, batch.mask)
    value = read(queries.unsqueeze(1), state.select(row), memory.spec, memory.features).squeeze(1)
    ids = batch.write_ids[batch.is_value]
    reads, values = read_loss(value, v[batch.is_value], ids, batch.write_ids[row, told], v[row, told])
    loss = reads + 0.3 * find + 0.2 * gates
    report = {"find": find, "found": found, "written": written, "others": others, "reads": reads, "read": values}
    if ends:
        answers, right, whole = answer_loss(trained, batch, state, asked, sinks)
        loss = loss + answers
        report |= {"answers": answers, "values": right, "whole": whole}
    return loss, {name: x.detach() for name, x in report.items()}


def rate(step: int, total: int, warm: int = 20) -> float:
    """Linear warm-up, constant, linear decay over the last 40 %."""
    return min(1.0, (step + 1) / warm, (total - step) / (0.4 * total) + 0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--features", nargs="+", required=True)
    parser.add_argument("--memory", default=json.dumps(MEMORY))
    parser.add_argument("--find", type=int, default=200, help="steps of the contrastive loss alone")
    parser.add_argument("--steps", type=int, default=1500, help="steps of the answers")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--told", type=int, default=4, help="most dialogues in a stream, of 2 to 5 facts each")
    parser.add_argument("--between", type=int, default=1500, help="most tokens of text in a stream, reached at half of the steps")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    folder = smollm()
    streams = Streams([Path(p) for p in options.features])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = AttachConfig(layers=[streams.layer], source=streams.source, window=256, memory=json.loads(options.memory))
    model = attach(base, config).eval()
    trained = Trained(model, streams.layer)
    initialise(trained.added.memory, trained.added.gate)
    parameters = [p for p in model.memories.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.01, betas=(0.9, 0.98))
    kept, step, begin = Path(options.out).with_suffix(".pt"), 0, time.time()
    if options.init:
        model.memories.load_state_dict(torch.load(options.init)["memories"])
    if kept.is_file():
        saved = torch.load(kept)
        model.memories.load_state_dict(saved["memories"])
        optimiser.load_state_dict(saved["optimiser"])
        step, begin = saved["step"], begin - saved["seconds"]
    print(f"{sum(p.numel() for p in parameters):,} parameters beside layer {streams.layer}", flush=True)
    total, shown = options.find + options.steps, []
    while step < total and time.time() - begin < 60 * options.minutes:
        ends = step >= options.find
        at = step - options.find if ends else step
        lr = options.lr * (rate(at, options.steps) if ends else rate(at, options.find))
        between = int(options.between * min(1.0, at / (0.5 * options.steps))) if ends else 250
        for group in optimiser.param_groups:
            group["lr"] = lr
        batch = streams.draw(draw, options.rows, options.told, between, 2 if ends else 4)
        loss, report = step_loss(trained, batch, streams.sinks, ends)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        shown.append({name: float(x) for name, x in report.items()})
        step += 1
        if step % 10 == 0:
            last = shown[-10:]
            means = {name: sum(x[name] for x in last if name in x) / max(1, sum(name in x for x in last)) for name in last[-1]}
            print(step, *(f"{name} {x:.4f}" for name, x in means.items()), f"{time.time() - begin:.0f} s", flush=True)
        if step % 50 == 0 or step == total:
            torch.save({"memories": model.memories.state_dict(), "optimiser": optimiser.state_dict(), "step": step, "seconds": time.time() - begin}, kept)
    save_adapter(model, options.out)


if __name__ == "__main__":
    main()
