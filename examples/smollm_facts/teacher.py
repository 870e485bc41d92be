"""What text looks like with a window and with all of it in attention, computed once and kept on disk.

For every piece of ordinary text: the stream of the base with its window in front of a late layer, from which LoRA maps are trained, and
the last hidden state of the base with full attention, whose predictions they are to give.

python teacher.py OUT --text FILE ... [--pieces 96] [--length 2048] [--layer 22]
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from dialogues import SYSTEM, Texts, read, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mnemos.attach import AttachedForCausalLM, attach, smollm

WINDOW = 256
IN_A_CHAT = 0.25  # share of the pieces that a user shows


def piece(tokenizer, draw: random.Random, texts: Texts, length: int) -> list[int]:
    """Ids of a text that begins anywhere."""
    text = texts.piece(draw, 8 * length)
    if draw.random() < IN_A_CHAT:
        text = SYSTEM + read(draw, text, "train")
    return tokens(tokenizer, text)[:length]


@torch.no_grad()
def streams(model: AttachedForCausalLM, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """ids (B, T) -> the stream of the windowed base in front of `layer`, and the base's last hidden state with full attention (B, T, D)."""
    kept: list[Tensor] = []
    hook = model.decoder_layers()[layer].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with model.memory.knock_out("reads"):
        model(ids, use_cache=False, logits_to_keep=1)
    hook.remove()
    return kept[0], model.base.model(ids, use_cache=False).last_hidden_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--pieces", type=int, default=96)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layer", type=int, default=22)
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, folder = random.Random(options.seed), smollm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model = attach(base, layers=[len(base.model.layers) - 1], memory="deltanet", window=WINDOW)
    share = (0.0, 0.9) if options.split == "train" else (0.9, 1.0)
    files = [Texts([Path(p)], share) for p in options.text]
    found, begin = [], time.time()
    for n in range(options.pieces):
        ids = torch.tensor([piece(tokenizer, draw, files[n % len(files)], options.length)])
        states, last = streams(model, ids, options.layer)
        found.append({"ids": ids[0], "states": states[0].clone(), "last": last[0].clone()})
        if n % 8 == 7 or n + 1 == options.pieces:
            print(f"{n + 1}/{options.pieces} pieces, {time.time() - begin:.0f} s", flush=True)
            torch.save({"layer": options.layer, "pieces": found}, f"{options.out}.part")
            Path(f"{options.out}.part").rename(options.out)  # wording.py may read it meanwhile


if __name__ == "__main__":
    main()
