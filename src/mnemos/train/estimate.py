"""Requirements of a run before it starts: parameters, steps, arithmetic, memory. `mnemos train --dry-run` prints them.

One block of each kind is built in full width and run forward and backward over a short sequence. This checks the shapes and measures
the tensors kept for the backward pass. No other weights are allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..data import open_tokenizer
from ..models import MnemosConfig, presets
from ..models.blocks import Block
from ..models.mixer import BLOCKS
from .config import TrainConfig
from .telemetry import flops_per_token

MIN_MEASURED_TOKENS = 256  # shortest sequence to measure
BYTES = 4  # weights, gradients, both moments of AdamW and activations are float32; activations take half under bfloat16


@dataclass(frozen=True)
class Estimate:
    """Requirements of one run on `processes` devices. Bytes are per device."""

    config: MnemosConfig
    size: str
    processes: int
    parameters: int
    steps: int
    tokens_per_step: int
    tokens: int
    flops: float
    weights: int
    activations: int
    blocks: dict[str, tuple[int, int]]
    """kind -> parameters, bytes kept per token"""

    @property
    def memory(self) -> int:
        return self.weights + self.activations

    def rows(self) -> list[tuple[str, str]]:
        """The rows of the table that `--dry-run` prints."""
        config = self.config
        return [
            ("blocks", ", ".join(f"{config.blocks.count(kind)} × {kind}" for kind in self.blocks)),
            ("width", f"{config.hidden_size}"),
            ("vocabulary", f"{config.vocab_size:,}{self._meant()}"),
            ("parameters", f"{self.parameters:,}"),
            *((f"  of a block, {kind}", f"{count:,}") for kind, (count, _) in self.blocks.items()),
            ("tokens per step", f"{self.tokens_per_step:,}"),
            ("tokens", f"{self.tokens:,} in {self.steps:,} steps"),
            ("arithmetic", f"{self.flops:.3g} FLOPs"),
            ("memory per device", f"{self.memory / 2**30:.1f} GiB"),
            ("  weights, gradients, AdamW", f"{self.weights / 2**30:.2f} GiB"),
            ("  kept for the backward pass", f"{self.activations / 2**30:.2f} GiB"),
        ]

    def _meant(self) -> str:
        """A hint if the vocabulary is smaller than the one the size is named for."""
        meant = presets.size(self.size).vocab_size
        return "" if self.config.vocab_size >= meant else f" (the size's {meant:,}: --tokenizer bpe:{meant})"


def estimate(config: TrainConfig, processes: int = 1) -> Estimate:
    """Requirements of `config` on a number of devices.

    >>> from mnemos.train.recipes import recipe
    >>> found = estimate(recipe(TrainConfig(), "quick"))
    >>> found.steps, found.parameters == presets.count(found.config)
    (300, True)
    """
    if processes < 1 or config.data.batch_size % processes:
        raise ValueError(f"data.batch_size={config.data.batch_size} must be a multiple of the {processes} processes")
    chosen = {"vocab_size": vocabulary_size(config.data.tokenizer)} | config.model.overrides()
    model = presets.config(config.model.preset, config.model.size, **chosen)
    parameters = presets.count(model)
    steps = config.total_steps(parameters)
    # devices have no kernels for memories: count the activations of the torch backend
    torch_path = {"memory_backend": "torch"} if model.has_memory else {}
    measured = presets.config(config.model.preset, config.model.size, **chosen | torch_path)
    blocks = {kind: _measure(measured, kind) for kind in dict.fromkeys(model.blocks)}
    sharded = 1 if config.parallel.strategy == "ddp" else processes
    kept = sum(blocks[kind][1] for kind in model.blocks)
    if config.gradient_checkpointing:  # the inputs of all blocks, and one recomputed block
        kept = BYTES * model.hidden_size * len(model.blocks) + max(size for _, size in blocks.values())
    share = 0.5 if config.dtype == "bfloat16" else 1.0
    rows = config.data.batch_size // processes
    return Estimate(
        config=model,
        size=config.model.size,
        processes=processes,
        parameters=parameters,
        steps=steps,
        tokens_per_step=config.tokens_per_step,
        tokens=steps * config.tokens_per_step,
        flops=steps * config.tokens_per_step * flops_per_token(_Meta(model), config.data.seq_len),
        weights=4 * BYTES * parameters // sharded,
        activations=round(share * kept * rows * config.data.seq_len),
        blocks=blocks,
    )


class _Meta(nn.Module):
    """A model on the meta device."""

    def __init__(self, config: MnemosConfig):
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(Block(config, kind) for kind in config.blocks)


def vocabulary_size(tokenizer: str) -> int:
    """Vocabulary size of a tokenizer that may not exist yet; one from a hub counts as the papers' 32,000 tokens."""
    name, _, size = tokenizer.partition(":")
    if name == "bpe" and size.isdigit():
        return int(size)
    if name == "bytes":
        return 256
    return open_tokenizer(tokenizer).vocab_size if Path(tokenizer).exists() else 32000


def _measure(config: MnemosConfig, kind: str) -> tuple[int, int]:
    """Parameters of a block, and the bytes per token that its forward pass keeps: each tensor once, without weights."""
    block = Block(config, kind)
    length = max(MIN_MEASURED_TOKENS, 2 * config.segment_length if BLOCKS[kind].has_segments else 0)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    x = torch.randn(1, length, config.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = block(x)[0]
        total = sum(kept.values())
    y.square().mean().backward()
    missing = [name for name, p in block.named_parameters() if p.grad is None]
    if missing:
        raise ValueError(f"in a block of kind {kind} no gradient reaches {', '.join(missing)}")
    return sum(p.numel() for p in block.parameters()), total // length
