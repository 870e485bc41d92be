"""Teach SmolLM2 to begin its answers with what was asked, and to end them, and its window to do without the text that it does not see.

"What is Anna's job?" -> "Anna's job is ... .", no more: the value in between is left to the memory. LoRA maps in late layers alone, on
questions without any context, because the words are in the question. On ordinary text the model, which sees a window, is to predict what
the base with all of the text in attention predicts (`teacher.py`); on short texts at any position, and where a value begins, what the base
does. An adapter that has such maps already is trained further.

python wording.py OUT --adapter IN --features FILE --teacher FILE ... [--steps 200]
torchrun --nproc-per-node 3 wording.py ...                                               # each with pieces and questions of its own
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from features import SINKS, Segment, causal, positions_of
from streams import Streams, pad
from torch import Tensor
from transformers import AutoModelForCausalLM

from mnemos.attach import AttachedForCausalLM, add_lora, load_adapter, save_adapter, smollm
from mnemos.attach.call import KEYWORD, AttachedCall
from mnemos.attach.control import Switches
from mnemos.attach.lora import without_lora

MAPS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
QUESTIONS = 4  # of a step
CHUNK = 64  # tokens whose logits are in memory at a time
EVERY = 10  # steps between two reports, each with the adapter so far
HELD_OUT = 3  # pieces of text that do not train
Piece = dict[str, Tensor]


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


def last_states(model: AttachedForCausalLM, start: int, states: Tensor) -> Tensor:
    """The stream of a text in front of layer `start` (T, D) -> its last hidden states (T, D), with the window and without memories."""
    body, h = model.base.model, states.unsqueeze(0)
    positions = torch.arange(h.shape[1]).unsqueeze(0)
    call = AttachedCall((1, h.shape[1]), limits=model.limits, switches=Switches(scale=0.0, writes=False))
    angles = body.rotary_emb(h, positions)
    for layer in body.layers[start:]:
        h = layer(h, attention_mask=None, position_ids=positions, position_embeddings=angles, **{KEYWORD: call})
    return body.norm(h)[0]


def distil(head, states: Tensor, teacher: Tensor, ids: Tensor, labels: float, weight: float) -> float:
    """Adds the gradient of weight times the cross-entropy to what the last hidden states (T, D) come from, and returns the cross-entropy.

    Targets: the predictions from the teacher's last hidden states (T, D), and with the share `labels` the next of the ids (T,). It is a mean over
    half of the tokens, because logits take as much time as eight layers.
    """
    cut, total = states.detach().requires_grad_(), 0.0
    chunks = list(zip(cut[:-1].split(CHUNK), teacher[:-1].split(CHUNK), ids[1:].split(CHUNK)))
    drawn = torch.randperm(len(chunks))[: (len(chunks) + 1) // 2].tolist()
    count = sum(len(chunks[i][0]) for i in drawn)
    for own, given, following in (chunks[i] for i in drawn):
        with torch.no_grad():
            target = (1 - labels) * head(given).float().softmax(-1)
            target[range(len(target)), following] += labels
        found = head(own).float()
        loss = found.logsumexp(-1).sum() - (target * found).sum()
        (loss * weight / count).backward()
        total += loss.item()
    states.backward(cut.grad)
    return total / count


def wording_loss(student, teacher, start: int, sinks: Tensor, some: list[Segment]) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of the words of answers and of their ends; the divergence from the base where values are; the share of answers that are
    wholly right."""
    width = max(len(s.ids) for s in some)
    words, rest = (torch.zeros(len(some), width, dtype=torch.bool) for _ in range(2))
    target = []
    for row, s in enumerate(some):
        a, b = s.spans[0]
        words[row, s.answer - 1 : a - 1] = True
        words[row, b - 1 : b + 1] = True  # the end of the sentence and of the turn
        rest[row, a - 1 : b - 1] = True
        target += s.ids[s.answer : a] + s.ids[b : b + 2]
    both = logits(student, start, sinks, some, words | rest)
    is_word = words[words | rest]
    loss = F.cross_entropy(both[is_word], torch.tensor(target))
    wrong = (both[is_word].argmax(-1) != torch.tensor(target)).float()
    wrong = torch.zeros(len(some)).index_add(0, words.nonzero()[:, 0], wrong)
    with torch.no_grad():
        ends = logits(teacher, start, sinks, some, rest).log_softmax(-1)
    end = F.kl_div(both[~is_word].log_softmax(-1), ends, log_target=True, reduction="batchmean")
    return loss, end, (wrong == 0).float().mean()


def short_text_loss(student, teacher, start: int, sinks: Tensor, texts: list[Segment]) -> Tensor:
    """The divergence from the base on texts that the window holds, at any position."""
    keep = torch.rand(len(texts), max(len(s.ids) for s in texts)) < 0.3
    with torch.no_grad():
        plain = logits(teacher, start, sinks, texts, keep).log_softmax(-1)
    found = logits(student, start, sinks, texts, keep).log_softmax(-1)
    return F.kl_div(found, plain, log_target=True, reduction="batchmean")


def load(paths: list[str]) -> list[Piece]:
    """The pieces of files of teacher.py, which may still be at work."""
    return [piece for path in paths for piece in torch.load(path, weights_only=True, mmap=True)["pieces"]]


@torch.no_grad()
def held_out(model: AttachedForCausalLM, start: int, pieces: list[Piece]) -> tuple[float, float]:
    """Cross-entropy of pieces of text behind the window, and inside it."""
    found = []
    for piece in pieces:
        states = last_states(model, start, piece["states"])[:-1]
        parts = zip(states.split(CHUNK), piece["ids"][1:].split(CHUNK))
        found.append(
            torch.cat([F.cross_entropy(model.base.lm_head(h).float(), ids, reduction="none") for h, ids in parts])
        )
    window = model.attach_config.window
    return torch.cat([x[window:] for x in found]).mean().item(), torch.cat([x[:window] for x in found]).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--features", required=True)
    parser.add_argument("--teacher", nargs="+", required=True, help="files of teacher.py, of the layer of --features")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--text-weight", type=float, default=3.0)
    parser.add_argument("--labels", type=float, default=0.3, help="share of the text's own tokens in targets")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    draw = random.Random(options.seed + rank)
    streams = Streams([Path(options.features)])
    pieces = load(options.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(smollm(), dtype=torch.bfloat16).eval()
    model = load_adapter(AutoModelForCausalLM.from_pretrained(smollm(), dtype=torch.bfloat16), options.adapter).eval()
    student, start = model.base, streams.layer
    with without_lora(model):
        if rank == 0:
            print(f"window alone: {held_out(model, start, pieces[:HELD_OUT])}", flush=True)
    if model.lora is None:
        names = [f"layers.{i}.{name}" for i in range(start, len(student.model.layers)) for name in MAPS]
        add_lora(model, r=options.rank, lora_alpha=2 * options.rank, target_modules=names)
    parameters = [p.requires_grad_(True) for name, p in student.named_parameters() if "lora_" in name]
    torch.manual_seed(options.seed + rank)  # the maps begin alike
    masters = [p.detach().float() for p in parameters]  # bfloat16 would round small steps away
    print(f"{sum(p.numel() for p in parameters):,} parameters in layers {start} and above", flush=True)
    optimiser = torch.optim.AdamW(masters, lr=options.lr, weight_decay=0.0, betas=(0.9, 0.98))
    asked = [s for _, some in streams.entries for s in some if s.states is not None]

    def save() -> None:
        model.memories.half()
        for p, master in zip(parameters, masters):
            p.data = master.half()
        save_adapter(model, options.out)
        for p in parameters:
            p.data = p.data.bfloat16()

    begin, shown, queue = time.time(), [], []
    for step in range(options.steps):
        rate = min(1.0, (step + 1) / 5, (options.steps - step) / (0.9 * options.steps) + 0.02)
        optimiser.param_groups[0]["lr"] = options.lr * rate
        loss, end, whole = wording_loss(student, teacher, start, streams.sinks, draw.sample(asked, QUESTIONS))
        short = short_text_loss(student, teacher, start, streams.sinks, draw.sample(streams.whole_texts, 1))
        (loss + 0.3 * end + short).backward()
        if not queue:
            queue = load(options.teacher)[HELD_OUT:]
            draw.shuffle(queue)
        piece = queue.pop()
        states = last_states(model, start, piece["states"])
        text = distil(student.lm_head, states, piece["last"], piece["ids"], options.labels, options.text_weight)
        gradient = torch.cat([p.grad.float().flatten() for p in parameters])
        if world > 1:
            dist.all_reduce(gradient)
        for p, master, found in zip(parameters, masters, gradient.split([p.numel() for p in parameters])):
            master.grad, p.grad = found.view_as(master) / world, None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimiser.step()
        with torch.no_grad():
            for p, master in zip(parameters, masters):
                p.copy_(master)
        shown.append((loss.item(), whole.item(), text, short.item(), end.item()))
        if rank == 0 and ((step + 1) % EVERY == 0 or step + 1 == options.steps):
            means = [sum(x) / len(shown) for x in zip(*shown)]
            words = " ".join(f"{n} {x:.4f}" for n, x in zip(("words", "whole", "text", "short", "ends"), means))
            print(
                f"{step + 1} {words} {held_out(model, start, pieces[:HELD_OUT])} {time.time() - begin:.0f} s",
                flush=True,
            )
            shown = []
            save()


if __name__ == "__main__":
    main()
