"""Teach a memory beside SmolLM2 to keep facts that a user states, from the states that features.py has kept.

First keys, queries and gates ("match"): a query in front of a value in an answer is to read that value, and nothing of the other values
of its conversation; other queries are to read nothing; values are to be written, and no other token; reads are to be open in front of
values in answers, and nowhere else. Then the output ("speak"): it begins as a map in closed form from values to the embeddings of their
tokens, and is trained to say the token that is read. Only the memory trains.

python train.py OUT --features FILE ... [--match 480] [--speak 400] [--init CHECKPOINT]
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
from closed_form import speak
from keeper import Keeper, Seen, initialise_gates, initialise_projections
from streams import Batch, Streams, pad
from torch import Tensor
from transformers import AutoModelForCausalLM

from mnemos.attach import AttachConfig, attach, save_adapter, smollm

MEMORY = {
    "preset": "deltanet",
    "heads": 3,
    "key_dim": 96,
    "features": "monomials",
    "degree": 2,
    "gating": "sparse",
    "gate": "token",
    "gate_hidden": 256,
    "gate_init": 0.1,
    "lr_init": 0.999,
    "conv_width": 24,
    "eps": 0.01,
}
Report = dict[str, Tensor]


def gate_loss(batch: Batch, told: Seen, asked: Seen, text: Tensor, opening: Tensor) -> tuple[Tensor, Report]:
    """Cross-entropy of gates. Values are written; other tokens of dialogues, questions and text (logits) are not. Tokens in front of those
    of values in answers read; other tokens of dialogues and text (opening) do not."""
    before, reading, free = (torch.zeros_like(batch.ask_mask) for _ in range(3))
    for question in batch.questions:
        (a, b), s = question.segment.spans[0], question.segment
        before[question.index, : s.answer] = True
        reading[question.index, a - 1 : b - 1] = True
        free[question.index, b - 1] = True  # where a value ends is for keys to find
    values = told.logits[batch.is_value]
    others = torch.cat([told.logits[batch.mask & ~batch.is_value], asked.logits[before]])
    loss = F.softplus(-values).mean() + 3 * F.softplus(others).mean() + 15 * F.softplus(text).mean()
    next_is_value = F.pad(batch.is_value[:, 1:], (0, 1)) | batch.is_value
    shut = torch.cat([asked.opening[batch.ask_mask & ~reading & ~free], told.opening[batch.mask & ~next_is_value]])
    loss = loss + F.softplus(-asked.opening[reading]).mean() + 3 * F.softplus(shut).mean()
    loss = loss + 15 * F.softplus(opening).mean()
    shares = {"written": values > 0, "others": others > -1.1, "text": text > -1.1}
    shares |= {"opened": asked.opening[reading] > 0, "shut": shut > -1.1, "text read": opening > -1.1}
    return loss, {name: x.float().mean() for name, x in shares.items()}


def match_loss(
    keeper: Keeper, streams: Streams, draw: random.Random, rows: int, contrast: float
) -> tuple[Tensor, Report]:
    """Losses of what queries read, of similarities among all keys and queries of the batch, and of gates."""
    batch = streams.draw(draw, rows, 6)
    told, asked = keeper.see(batch.write, batch.mask), keeper.see(batch.ask, batch.ask_mask)
    text, text_mask = pad([s.source for s in draw.sample(streams.texts, 12)])
    read = keeper.see(text, text_mask)
    gates, report = gate_loss(batch, told, asked, read.logits[text_mask], read.opening[text_mask])
    some = read.q[text_mask]
    some = some[torch.randperm(len(some))[:150]]
    keys, queries, own, others, losses, over, right, first = [], [], [], [], [], [], [], 0
    for row in batch.told:
        k = told.k[row.row, row.tokens]
        mine = [question for question in batch.questions if question.row == row.row]
        q, index, elsewhere, ends = [], [], [], []
        for question in mine:
            (a, b), place = question.segment.spans[0], question.index
            q.append(asked.q[place, a - 1 : b - 1])
            index += range(question.own, question.own + b - a)
            free = [t for t in range(len(question.segment.ids) - 1) if t < a - 1 or t >= b - 1]
            elsewhere.append(asked.q[place, draw.sample(free, 8)])
            ends.append(asked.q[place, b - 1])
        q, index, elsewhere, ends = torch.cat(q), torch.tensor(index), torch.cat(elsewhere), torch.stack(ends)
        shares = keeper.shares(torch.cat([q, ends, elsewhere, some]), k)
        hit, end, miss = shares.split([len(q), len(ends), len(elsewhere) + len(some)], dim=1)
        target = F.one_hot(index, len(k)).float()
        losses.append((hit - target).square().sum(-1).mean() + 0.3 * miss.square().sum(-1).mean())
        losses[-1] = losses[-1] + end.square().sum(-1).mean()
        over.append(end.square().sum(-1).mean())
        losses[-1] = losses[-1] + 0.3 * F.cross_entropy((10 * hit).flatten(0, 1), index.repeat(len(hit)))
        best = row.ids[hit.mean(0).argmax(1)]
        right.append((best == row.ids[index]).float().mean())
        keys.append(k)
        queries.append(q)
        own.append(index + first)
        others.append(elsewhere)
        first += len(k)
    loss = torch.stack(losses).mean()
    k, q, own = torch.cat(keys), torch.cat(queries), torch.cat(own)
    if contrast:
        cosine = torch.einsum("phk,nhk->hpn", q, k)
        far = torch.einsum("phk,nhk->hpn", torch.cat([*others, some]), k)
        found = F.cross_entropy((20 * cosine).flatten(0, 1), own.repeat(len(cosine)))
        loss = loss + contrast * (found + 5 * (cosine.square().mean() + far.square().mean()))
    report |= {"loss": loss, "ends": torch.stack(over).mean(), "right": torch.stack(right).mean()}
    return loss + gates, {name: x.detach() for name, x in report.items()}


@dataclass
class Sites:
    """Places in answers: what the memory reads there (N, D), the stream that it adds to (N, D), and the next token (N,). The first `due`
    of them are in front of tokens of values, the others at the ends of values."""

    x: Tensor
    stream: Tensor
    next: Tensor
    due: int


@torch.no_grad()
def find_sites(keeper: Keeper, streams: Streams) -> Sites:
    due, ends = [], []
    asked = [s for _, some in streams.entries for s in some if s.states is not None]
    for begin in range(0, len(asked), 24):
        some = asked[begin : begin + 24]
        states, _ = pad([s.states for s in some])
        h = keeper.behind_attention(states, streams.sinks, [s.position for s in some])
        for row, s in enumerate(some):
            a, b = s.spans[0]
            due += [(s.source[t], h[row, t], s.ids[t + 1]) for t in range(a - 1, b - 1)]
            ends.append((s.source[b - 1], h[row, b - 1], s.ids[b]))
    x, stream, following = zip(*due, *ends)
    return Sites(torch.stack(x), torch.stack(stream), torch.tensor(following), len(due))


class Tokens:
    """Tokens of all kinds of segments, drawn so that rare ones are as likely as frequent ones."""

    def __init__(self, streams: Streams):
        segments = [told for told, _ in streams.entries] + streams.texts
        self.source = torch.cat([s.source for s in segments])
        self.ids = torch.tensor([i for s in segments for i in s.ids])
        self.weights = torch.bincount(self.ids)[self.ids].double().reciprocal()

    def draw(self, count: int) -> Tensor:
        return torch.multinomial(self.weights, count, replacement=True)


def speak_loss(keeper: Keeper, sites: Sites, tokens: Tokens, count: int) -> tuple[Tensor, Report]:
    """Cross-entropy of the token whose value is read, at places where a value is due, and of the end of the sentence behind values. A read is
    drawn, as those of trained keys are: the value to a share between 0.3 and 1.1, or less than 0.15 at ends, and a little of five others."""
    ends = count // 3
    site = torch.cat([torch.randint(sites.due, (count - ends,)), torch.randint(sites.due, len(sites.x), (ends,))])
    chosen = tokens.draw(6 * count)
    v = keeper.values(keeper.normed(tokens.source[chosen])).unflatten(0, (6, count))  # 6 N H V
    share = 0.3 + 0.8 * torch.rand(count, 1, 1) + 0.1 * torch.randn(count, v.shape[2], 1)
    share[-ends:] = 0.15 * torch.rand(ends, 1, 1) + 0.03 * torch.randn(ends, v.shape[2], 1)
    y = share * v[0] + (0.07 * torch.randn(5, count, v.shape[2], 1) * v[1:]).sum(0)
    added = keeper.output(y, keeper.normed(sites.x[site]))
    logits = keeper.logits(sites.stream[site] + added.to(sites.stream.dtype))
    target = torch.cat([tokens.ids[chosen[: count - ends]], sites.next[site[-ends:]]])
    loss, right = F.cross_entropy(logits, target), (logits.argmax(-1) == target).float()
    report = {"speak": loss, "said": right[:-ends].mean(), "ended": right[-ends:].mean()}
    report["size"] = (added.norm(dim=-1) / sites.stream[site].float().norm(dim=-1)).mean()
    return loss, {name: x.detach() for name, x in report.items()}


def rate(step: int, total: int, warm: int = 20) -> float:
    """Linear warm-up, constant, linear decay over the last 40 %."""
    return min(1.0, (step + 1) / warm, (total - step) / (0.4 * total) + 0.02)


def match_steps(keeper: Keeper, streams: Streams, draw: random.Random, options, save) -> None:
    """Train all of the memory by `match_loss`."""
    parameters = list(keeper.model.memories.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.01, betas=(0.9, 0.98))
    shown, begin = [], time.time()
    for step in range(options.match):
        optimiser.param_groups[0]["lr"] = options.lr * rate(step, options.match)
        contrast = 0.0 if options.init else max(0.0, 1 - 2 * step / options.match)
        loss, report = match_loss(keeper, streams, draw, options.rows, contrast)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        shown.append(report)
        if (step + 1) % 20 == 0:
            print_means("match", step + 1, shown[-20:], begin)
            save()


def speak_steps(keeper: Keeper, streams: Streams, options) -> None:
    """Train values and output by `speak_loss`. Rates are relative to the size of each map."""
    memory, (q, k, _) = keeper.memory, keeper.memory.splits
    sites, tokens = find_sites(keeper, streams), Tokens(streams)
    print(f"values speak: cosine {speak(keeper, streams):.3f}", flush=True)
    maps = [(memory.out.weight, memory.out.weight), (memory.output_gate.weight, memory.output_gate.weight)]
    maps.append((memory.qkv.weight, memory.qkv.weight[q + k :]))  # keys and queries have no gradient here
    groups = [{"params": [whole], "size": options.speak_lr * part.std().item()} for whole, part in maps]
    groups.append({"params": [memory.norm.weight, keeper.added.gate], "size": 0.1 * options.speak_lr})
    optimiser = torch.optim.Adam(groups, betas=(0.9, 0.98))
    shown, begin = [], time.time()
    for step in range(options.speak):
        for group in optimiser.param_groups:
            group["lr"] = group["size"] * rate(step, options.speak)
        loss, report = speak_loss(keeper, sites, tokens, 160)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
        optimiser.step()
        shown.append(report)
        if (step + 1) % 20 == 0:
            print_means("speak", step + 1, shown[-20:], begin)


def print_means(stage: str, step: int, reports: list[Report], begin: float) -> None:
    means = {name: sum(float(x[name]) for x in reports) / len(reports) for name in reports[0]}
    print(stage, step, *(f"{n} {x:.4f}" for n, x in means.items()), f"{time.time() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--features", nargs="+", required=True)
    parser.add_argument("--memory", default=json.dumps(MEMORY))
    parser.add_argument("--match", type=int, default=480, help="steps of keys, queries and gates")
    parser.add_argument("--speak", type=int, default=400, help="steps of values and output")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--speak-lr", type=float, default=0.02)
    parser.add_argument("--init", help="checkpoint of an earlier run, OUT with the suffix .pt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    streams = Streams([Path(p) for p in options.features])
    base = AutoModelForCausalLM.from_pretrained(smollm(), dtype=torch.bfloat16)
    memory = json.loads(options.memory)
    config = AttachConfig(layers=[streams.layer], source=streams.source, window=256, memory=memory)
    model = attach(base, config).eval()
    keeper = Keeper(model)
    print(f"{sum(p.numel() for p in model.memories.parameters()):,} parameters beside layer {keeper.layer}", flush=True)
    some = [told for told, _ in streams.entries[:100]] + streams.texts[:100]
    initialise_projections(keeper.memory, keeper.normed(torch.cat([s.source for s in some])))
    initialise_gates(keeper.memory)
    keeper.added.gate.data.fill_(1.0)
    if options.init:
        model.memories.load_state_dict(torch.load(options.init, weights_only=True)["memories"], strict=False)

    def save() -> None:
        torch.save({"memories": model.memories.state_dict()}, Path(options.out).with_suffix(".pt"))

    match_steps(keeper, streams, draw, options, save)
    speak_steps(keeper, streams, options)
    save()
    model.memories.half()
    save_adapter(model, options.out)


if __name__ == "__main__":
    main()
