"""How the tokens of an answer are chosen.

Shapes: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NEW_TOKENS = 2**20


@dataclass(frozen=True)
class Sampling:
    """Options of an answer. max_new_tokens: largest number of tokens. temperature: 0 takes the likeliest token. top_k: choose from this
    many of the likeliest tokens (0: all). top_p: choose from the likeliest tokens with this total probability. seed: for an answer that
    can be repeated. stop: texts that end the answer and are not part of it.

    >>> Sampling(temperature=-1)
    Traceback (most recent call last):
    ValueError: temperature=-1 must be from 0 to 100
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        whole = {"max_new_tokens": (1, MAX_NEW_TOKENS), "top_k": (0, 2**31)} | (
            {} if self.seed is None else {"seed": (0, 2**63 - 1)}
        )
        for name, (least, most) in whole.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name}={value!r:.40} must be a whole number from {least} to {most}")
        if type(self.temperature) not in (int, float) or not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature={self.temperature!r:.40} must be from 0 to 100")
        if type(self.top_p) not in (int, float) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r:.40} must be above 0 and at most 1")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop={self.stop!r:.40} must be texts that are not empty")

    def generator(self) -> torch.Generator:
        """The random numbers of one answer."""
        generator = torch.Generator()
        generator.seed() if self.seed is None else generator.manual_seed(self.seed)
        return generator

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """One token by its logits (V,)."""
        logits = logits.detach().float().cpu()
        if self.temperature < 1e-6:
            return int(logits.argmax())
        ordered, tokens = (logits / self.temperature).sort(descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        if self.top_k:
            probabilities[self.top_k :] = 0.0
        before = probabilities.cumsum(-1) - probabilities
        probabilities[before >= self.top_p * probabilities.sum()] = 0.0
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
