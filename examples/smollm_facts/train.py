"""Teach memories beside SmolLM2 to keep facts that a user states.

Only the memories train. Attention is cut between the facts and the questions, so that nothing but the memories can carry a fact.

python train.py OUT [--minutes 60] [--memory deltanet] [--layers 12,18,24] ...
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from dialogues import answered, asked, draw_facts, stated
from transformers import AutoModelForCausalLM, AutoTokenizer

from mnemos.attach import AttachConfig, attach, save_adapter, smollm
from mnemos.attach.training import parameter_groups


def padded(tokenizer, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask (B, T), padded on the right."""
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def questions(tokenizer, draw, facts_of_rows, count: int, split: str):
    """ids, mask and labels (B, T) of `count` questions and answers in each row; labels of the answers alone."""
    rows, labels = [], []
    for facts in facts_of_rows:
        ids, row = [], []
        for fact in draw.sample(facts, min(count, len(facts))):
            question = tokenizer(asked(draw, fact, split), add_special_tokens=False).input_ids
            answer = tokenizer(answered(fact) + "<|im_end|>\n", add_special_tokens=False).input_ids
            ids += question + answer
            row += [-100] * len(question) + answer
        rows.append(ids)
        labels.append(row)
    width = max(map(len, rows))
    pad = lambda xs, value: torch.tensor([x + [value] * (width - len(x)) for x in xs])  # noqa: E731
    return pad(rows, 0), pad([[1] * len(x) for x in rows], 0), pad(labels, -100)


class Text:
    """Random pieces of a text, as tokens."""

    def __init__(self, tokenizer, paths: list[Path], share: tuple[float, float]):
        whole = []
        for path in paths:
            text = path.read_text(errors="ignore")
            whole += tokenizer(
                text[int(share[0] * len(text)) : int(share[1] * len(text))], add_special_tokens=False
            ).input_ids
        self.ids = torch.tensor(whole)

    def pieces(self, draw: random.Random, rows: int, length: int) -> torch.Tensor:
        starts = [draw.randrange(len(self.ids) - length) for _ in range(rows)]
        return torch.stack([self.ids[s : s + length] for s in starts])


def carry(model, cache):
    """A cache with the memories of another one and nothing in attention: only memories cross."""
    fresh = model.new_cache()
    fresh.memory = dict(cache.memory)
    return fresh


def initialise(model, gate: float) -> None:
    """Keys and queries share a projection, and a key is that of the token before: a read returns what followed similar contexts."""
    with torch.no_grad():
        for added in model.memories.values():
            memory = added.memory
            q, k, _ = memory.splits
            memory.qkv.weight[q : q + k] = memory.qkv.weight[:q]
            memory.conv.weight.zero_()
            memory.conv.weight[-1] = 1.0
            memory.conv.weight[-1, q : q + k] = 0.0
            memory.conv.weight[-2, q : q + k] = 1.0
            added.gate.fill_(gate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--memory", default='{"preset": "deltanet"}')
    parser.add_argument("--layers", default="12,18,24")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--facts", type=int, default=4)
    parser.add_argument("--asked", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--gate", type=float, default=0.0)
    parser.add_argument("--text", nargs="*", default=[])
    parser.add_argument(
        "--between", type=int, default=0, help="largest number of tokens of text between facts and questions"
    )
    parser.add_argument("--plain", action="store_true", help="the default initialisation of memories")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    folder = smollm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layers = [int(x) for x in options.layers.split(",")]
    model = attach(base, AttachConfig(layers=layers, window=256, memory=json.loads(options.memory))).eval()
    if not options.plain:
        initialise(model, options.gate)
    optimiser = torch.optim.AdamW(parameter_groups(model, lr=options.lr, weight_decay=0.0, gate_lr_scale=5.0))
    text = Text(tokenizer, [Path(p) for p in options.text], (0.0, 0.9)) if options.text else None
    count = sum(p.numel() for p in model.memories.parameters())
    print(f"{count:,} parameters, memories beside layers {layers}", flush=True)
    begin, shown = time.time(), []
    for step in range(options.steps):
        progress = max(step / options.steps, (time.time() - begin) / 60 / options.minutes)
        if progress >= 1:
            break
        rate = min(1.0, (step + 1) / 20) * min(1.0, (1 - progress) / 0.3 + 0.02)
        for group in optimiser.param_groups:
            group["lr"] = options.lr * rate * (5.0 if group["name"] == "gates" else 1.0)
        facts = [draw_facts(draw, options.facts, "train") for _ in range(options.rows)]
        ids, mask = padded(tokenizer, [stated(draw, some, "train") for some in facts])
        cache = model.new_cache()
        model(ids, mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if text is not None and options.between:
            length = draw.randrange(1, options.between + 1)
            cache = carry(model, cache)
            model(text.pieces(draw, options.rows, length), past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids, mask, labels = questions(tokenizer, draw, facts, options.asked, "train")
        hidden = model(
            ids, mask, past_key_values=carry(model, cache), use_cache=True, logits_to_keep=1, output_hidden_states=True
        )
        hidden = hidden.hidden_states[-1]
        keep = labels[:, 1:] != -100
        logits = model.base.lm_head(hidden[:, :-1][keep])
        target = labels[:, 1:][keep]
        losses = F.cross_entropy(logits, target, reduction="none")
        loss = losses.mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.memories.parameters(), 1.0)
        optimiser.step()
        with torch.no_grad():  # the values alone: the token behind " is"
            is_id = tokenizer(" is", add_special_tokens=False).input_ids[0]
            before = ids[:, :-1][keep] == is_id
            right = (logits.argmax(-1) == target)[before].float().mean().item()
        shown.append((loss.item(), right))
        if step % 5 == 4:
            mean = [sum(x) / 5 for x in zip(*shown[-5:])]
            gates = " ".join(f"{m.gate.abs().mean():.3f}" for m in model.memories.values())
            print(
                f"{step + 1} loss {mean[0]:.3f} values right {mean[1]:.3f} gates {gates} {time.time() - begin:.0f} s",
                flush=True,
            )
    save_adapter(model, options.out)


if __name__ == "__main__":
    main()
