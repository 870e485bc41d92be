"""A nano of every preset learns text: after a few dozen steps it predicts better than the frequencies of bytes do."""

from __future__ import annotations

import pytest
import torch
from zoo import NAMES

from mnemos.models import MnemosForCausalLM, presets

STORY = """the memory of a model learns at test time what the model has read so that nothing it was told is lost and a question
about the first page of a book is answered on the last one by weights that change with every token and never grow"""
WORDS = STORY.split()


def text(length: int) -> torch.Tensor:
    """Words in random order: much more regular than its letters."""
    pick = torch.randint(len(WORDS), (length // 3,), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor(list(" ".join(WORDS[i] for i in pick).encode()[:length]))


def unigram_loss(data: torch.Tensor) -> float:
    share = torch.bincount(data, minlength=256).double() / len(data)
    return -(share * share.clamp(min=1e-12).log()).sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_goes_below_the_unigram_loss(name):
    torch.manual_seed(0)
    data = text(20000)
    model = MnemosForCausalLM(presets.config(name, "nano", num_hidden_layers=2)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(40):
        starts = torch.randint(0, len(data) - 128, (4,), generator=generator).tolist()
        ids = torch.stack([data[i : i + 128] for i in starts])
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < unigram_loss(data) - 0.2, losses[::5]
