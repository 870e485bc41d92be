"""Teach SmolLM2 to begin its answers with what was asked, and to end them: "What is Anna's job?" -> "Anna's job is ... .", no more.
The value in between is left to the memory.

LoRA maps in late layers alone, on questions without any context: the words are in the question. On ordinary text, and where the value
begins, the model is held to what the base says (KL divergence). The adapter then has both, the memory and these maps.

python wording.py OUT --adapter IN --features FILE [--steps 200]
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from features import SINKS, Segment, causal, positions_of
from streams import Streams, pad
from torch import Tensor
from transformers import AutoModelForCausalLM

from mnemos.attach import add_lora, load_adapter, save_adapter, smollm

MAPS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def logits(base, start: int, sinks: Tensor, segments: list[Segment], keep: Tensor) -> Tensor:
    """Logits (N, V) at the tokens `keep` (B, T), of the layers of a base from `start` on."""
    states, _ = pad([s.states for s in segments])
    B, T, _ = states.shape
    h = torch.cat([sinks.expand(B, -1, -1), states], dim=1)
    positions = positions_of([s.position for s in segments], T)
    angles, mask = base.model.rotary_emb(h, positions), causal(T + SINKS)
    for layer in base.model.layers[start:]:
        h = layer(h, attention_mask=mask, position_ids=positions, position_embeddings=angles)
    return base.lm_head(base.model.norm(h)[:, SINKS:][keep]).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--features", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--text-weight", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    streams = Streams([Path(options.features)])
    teacher = AutoModelForCausalLM.from_pretrained(smollm(), dtype=torch.bfloat16).eval()
    model = load_adapter(AutoModelForCausalLM.from_pretrained(smollm(), dtype=torch.bfloat16), options.adapter).eval()
    student, start = model.base, streams.layer
    names = [f"layers.{i}.{name}" for i in range(start, len(student.model.layers)) for name in MAPS]
    add_lora(model, r=options.rank, lora_alpha=2 * options.rank, target_modules=names)
    parameters = [p for name, p in student.named_parameters() if "lora_" in name]
    for p in parameters:
        p.requires_grad_(True)
    print(f"{sum(p.numel() for p in parameters):,} parameters in layers {start} and above", flush=True)
    optimiser = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.0, betas=(0.9, 0.98))
    asked = [s for _, some in streams.entries for s in some if s.states is not None]
    begin, shown = time.time(), []
    for step in range(options.steps):
        rate = min(1.0, (step + 1) / 10, (options.steps - step) / (0.5 * options.steps) + 0.02)
        for group in optimiser.param_groups:
            group["lr"] = options.lr * rate
        some = draw.sample(asked, 12)
        width = max(len(s.ids) for s in some)
        words, rest = torch.zeros(12, width, dtype=torch.bool), torch.zeros(12, width, dtype=torch.bool)
        target = []
        for row, s in enumerate(some):
            a, b = s.spans[0]
            words[row, s.answer - 1 : a - 1] = True
            words[row, b - 1 : b + 1] = True  # the end of the sentence and of the turn
            rest[row, a - 1 : b - 1] = True
            target += s.ids[s.answer : a] + s.ids[b : b + 2]
        both = logits(student, start, streams.sinks, some, words | rest)
        is_word = words[words | rest]
        losses = F.cross_entropy(both[is_word], torch.tensor(target), reduction="none")
        loss = losses.mean()
        right = (both[is_word].argmax(-1) == torch.tensor(target)).float()
        wrong = torch.zeros(12).index_add(0, words.nonzero()[:, 0], 1 - right)
        texts = draw.sample(streams.whole_texts, 2)
        keep = torch.rand(2, max(len(s.ids) for s in texts)) < 0.3
        with torch.no_grad():
            plain = logits(teacher, start, streams.sinks, texts, keep).log_softmax(-1)
            ends = logits(teacher, start, streams.sinks, some, rest).log_softmax(-1)
        found = logits(student, start, streams.sinks, texts, keep).log_softmax(-1)
        text = F.kl_div(found, plain, log_target=True, reduction="batchmean")
        end = F.kl_div(both[~is_word].log_softmax(-1), ends, log_target=True, reduction="batchmean")
        optimiser.zero_grad()
        (loss + options.text_weight * text + 0.3 * end).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        shown.append((loss.item(), (wrong == 0).float().mean().item(), text.item(), end.item()))
        if (step + 1) % 20 == 0:
            words_loss, whole, text_kl, end_kl = (sum(x) / 20 for x in zip(*shown[-20:]))
            print(f"{step + 1} words {words_loss:.4f} whole {whole:.3f} text {text_kl:.4f} ends {end_kl:.4f}", end=" ")
            print(f"{time.time() - begin:.0f} s", flush=True)
    model.memories.half()
    for p in parameters:
        p.data = p.data.half()
    save_adapter(model, options.out)


if __name__ == "__main__":
    main()
