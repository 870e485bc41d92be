"""A BABILong-style sample of any length through the state of a small memory model: tokens/s, resident memory, bytes of the state.

    python benchmarks/long_context.py                                # 200,000 tokens
    python benchmarks/long_context.py --tokens 10000000              # ten million: the text is made while it is read
    python benchmarks/long_context.py --preset atlas-mag --text FILE # any preset, any text to hide the facts in

The model is not trained: this measures reading, not answering. Without --text the facts lie in noise.
"""

from __future__ import annotations

import argparse
import time

import torch

from harness import machine, memory, table
from mnemos.data.tasks import NOISE, Background, ByteTokenizer, hide, story
from mnemos.data.tasks.babilong import mentions_names
from mnemos.eval import LanguageModel
from mnemos.eval.model_adapter import state_bytes
from mnemos.models import MnemosForCausalLM, presets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--preset", default="titans-lmm")
    parser.add_argument("--size", default="nano")
    parser.add_argument("--piece", type=int, default=2048, help="tokens per call of the model")
    parser.add_argument("--text", help="file or folder to hide the facts in")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    model = MnemosForCausalLM(presets.config(options.preset, options.size, vocab_size=256))
    lm = LanguageModel(model, tokenizer, options.piece)
    if options.text:
        background = Background.from_path(options.text, tokenizer, mentions_names)
    else:
        background = Background(NOISE, tokenizer)
    sample = hide(story("qa3", seed=1), options.tokens, tokenizer, background)
    print(
        f"{machine()}\n{options.preset} {options.size}, {sum(p.numel() for p in model.parameters()):,} parameters\n",
        flush=True,
    )
    rows = [list(map(str, row)) for row in stream(lm, sample, options.tokens)]
    print(table(["tokens read", "tokens/s in this part", "per CPU second", "resident memory", "state bytes"], rows))


def stream(lm: LanguageModel, sample, tokens: int):
    """(tokens read, tokens/s since the last row, the same per second of processor time, resident MB, state bytes), some ten times."""
    state, done, since = None, 0, 0
    began, worked = time.perf_counter(), time.process_time()
    step = max(lm.piece, tokens // 10)
    for piece in lm.pieces_of(sample.pieces()):
        _, state = lm.call(piece, state, keep=1)
        done += piece.shape[1]
        if done - since >= step or done == tokens:
            new, wall, cpu = done - since, time.perf_counter() - began, time.process_time() - worked
            row = (
                f"{done:,}",
                f"{new / wall:,.0f}",
                f"{new / cpu:,.0f}",
                f"{memory('VmRSS'):.0f} MB",
                f"{state_bytes(state):,}",
            )
            print("  " + "  ".join(row), flush=True)
            yield row
            since, began, worked = done, time.perf_counter(), time.process_time()
    assert done == tokens


if __name__ == "__main__":
    main()
