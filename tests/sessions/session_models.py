"""Small models with random weights for sessions, made the same in every process; run as a program, it continues saved sessions."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from mnemos.data import ByteTokenizer
from mnemos.models import MnemosForCausalLM, presets
from mnemos.sessions import Session, SessionStore

sys.path.append(str(Path(__file__).parent.parent / "attach"))

from tiny_models import attached

OWN = ("titans-mag", "atlas-mag", "deltanet")
MODELS = (*OWN, "transformer", "attached", "attached-window")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "attention_window": 8}
TURNS = ("and where is it now? " * 3, "why")


class LetterTokenizer(ByteTokenizer):
    """Characters as tokens 3..60, for the 61 tokens of tiny_models."""

    eos_token_id = bos_token_id = pad_token_id = 2

    def encode(self, text: str) -> list[int]:
        return [3 + byte % 58 for byte in text.encode()]

    def decode(self, ids) -> str:
        return "".join(chr(61 + i) for i in ids if i > 2)


def open_model(kind: str, dtype: torch.dtype = torch.float32):
    """A model in evaluation mode and its tokenizer."""
    if kind.startswith("attached"):
        return attached(window=7 if kind == "attached-window" else None).to(dtype).eval(), LetterTokenizer()
    torch.manual_seed(11)
    memory = {} if kind == "transformer" else {"memory_heads": 2, "memory_chunk_size": 8}
    if kind == "atlas-mag":
        memory |= {"memory_key_dim": 4}
    model = MnemosForCausalLM(presets.config(kind, "nano", **SMALL | memory)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, ByteTokenizer()


def continued(session: Session) -> str:
    """Two more turns, greedy and sampled."""
    answers = [session.ask(TURNS[0], max_new_tokens=9)]
    session.tell("so it is. ")
    return repr([*answers, session.ask(TURNS[1], max_new_tokens=12, temperature=0.9, top_p=0.95, seed=5)])


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kind in MODELS:
        store = SessionStore(Path(sys.argv[1]) / kind)
        session = Session.load(*open_model(kind), store, "ann")
        print(continued(session))
        session.record.name = "restored"
        session.save()
