"""Validation between two steps: held-out loss, probes, samples. Leaves the weights and random state of training unchanged."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..memory.validation import NotFiniteError
from .config import TrainConfig
from .distributed import Spread
from .probes import carried_ranks, learning_gain, look_inside, needle
from .step import Stepper

GAIN_BATCHES = 4


class Validator:
    """Measures a model on held-out text. All processes make the same calls."""

    def __init__(self, config: TrainConfig, data: Any, spread: Spread, stepper: Stepper):
        self.config, self.data, self.spread, self.stepper = config, data, spread, stepper
        self.model, self.device = spread.model, spread.world.device

    @contextlib.contextmanager
    def evaluating(self) -> Generator[None]:
        """Evaluation mode, without gradients. Compiled blocks run eagerly: each new length would be compiled again."""
        eager = torch.compiler.set_stance("force_eager") if self.config.compile else contextlib.nullcontext()
        self.model.eval()
        try:
            with torch.no_grad(), self.stepper.autocast(), eager:
                yield
        finally:
            self.spread.settle()
            self.model.train()

    def validate(self, average: dict[str, Tensor]) -> dict[str, Any] | None:
        """Held-out loss, gates, surprise and vitality by layer, the gain from learning at test time; None without held-out text."""
        try:
            return self._validate(average)
        except NotFiniteError:
            if self.spread.world.size > 1:
                raise
            return {"val_loss": math.nan, "perplexity": math.nan, "bits_per_byte": math.nan, "layers": {}}

    def _validate(self, average: dict[str, Tensor]) -> dict[str, Any] | None:
        with self.evaluating():
            loss, count = self.stepper.evaluate(self.data.validation)
            if not count:
                return None
            batches = [self.stepper.to_device(b) for b, _ in zip(self.data.validation, range(GAIN_BATCHES))]
            layers = look_inside(self.model, self.spread.call, batches[0])
            memory = learning_gain(self.model, self.spread.call, batches, self.spread.world)
            if self.stepper.carried.cache is not None:
                for layer, numbers in carried_ranks(self.stepper.carried.cache).items():
                    layers.setdefault(layer, {}).update(numbers)
        per_token = getattr(self.data.tokenizer, "bytes_per_token", None) or 1.0
        found: dict[str, Any] = {
            "val_loss": loss,
            "perplexity": perplexity(loss),
            "bits_per_byte": loss / math.log(2) / per_token,
            "tokens_validated": count,
            "layers": layers,
        }
        if memory is not None:
            found["memory"] = memory
        if average:
            found["val_loss_average"] = self._average_loss(average)
        return found

    def _average_loss(self, average: dict[str, Tensor]) -> float:
        """Held-out loss of the averaged weights, which temporarily replace the live ones."""
        named = {name: p for name, p in self.model.named_parameters() if name in average}
        live = {name: p.detach().clone() for name, p in named.items()}
        _copy(average, named)
        try:
            with self.evaluating():
                return self.stepper.evaluate(self.data.validation)[0]
        finally:
            _copy(live, named)

    def probe(self) -> dict[str, float] | None:
        """Accuracy on a needle in a haystack of held-out text; None without held-out text."""
        first = next(iter(self.data.validation), None)
        haystack = self.spread.world.broadcast(None if first is None else first["input_ids"].flatten())
        if haystack is None:
            return None
        with self.evaluating():
            return needle(self.spread.call, self.data.tokenizer, haystack, self.config.watch.probe_length, self.device)

    def sample(self) -> str:
        """A continuation of the prompt, or of the end-of-document token if the prompt is empty."""
        watch, tokenizer = self.config.watch, self.data.tokenizer
        ids = torch.tensor([tokenizer.encode(watch.prompt) or [tokenizer.eos_token_id]], device=self.device)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.evaluating():
            torch.manual_seed(self.config.seed)
            made = self.model.generate(
                ids, max_new_tokens=watch.sample_tokens, do_sample=True, temperature=0.8, top_k=50, pad_token_id=0
            )
        return tokenizer.decode(made[0].tolist())


def perplexity(loss: float) -> float:
    """exp(loss), at most e^20."""
    return math.exp(min(20.0, loss)) if math.isfinite(loss) else math.nan


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, x in target.items():
        x.copy_(source[name])
