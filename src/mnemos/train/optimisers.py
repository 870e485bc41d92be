"""Optimisers: parameters divided between AdamW and Muon, with their learning rates and weight decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .config import OptimConfig

UNDECAYED = (
    "norm",
    "gating",
    ".gate.",
    "W0",
    "persistent",
    "embed_tokens",
    "longterm",
    "coefficients",
    "decay",
    "retain",
)


class Optimisers:
    """One optimiser, or muon and adamw side by side, with one learning-rate factor for both.

    gates: names of parameters with a rate of their own, `gate_lr_scale` times that of adamw, and the further factor `gate_factor`.

    >>> optimisers = Optimisers(nn.Linear(4, 4), OptimConfig(name="adamw", lr=1e-3))
    >>> optimisers.set_factor(0.5)
    >>> optimisers.lr
    0.0005
    """

    def __init__(self, model: nn.Module, config: OptimConfig, gates: Collection[str] = (), gate_lr_scale: float = 1.0):
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices, groups = _groups({name: p for name, p in self.named.items() if name not in gates}, config)
        self.gate_factor = 1.0
        if gates:
            alone = [p for name, p in self.named.items() if name in gates]
            groups.append({"params": alone, "lr": config.lr * gate_lr_scale, "weight_decay": 0.0, "is_gate": True})
        self.all: list[torch.optim.Optimizer] = []
        if groups:
            self.all.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=1e-8))
        if matrices:
            self.all.append(
                torch.optim.Muon(
                    matrices,
                    lr=config.muon_lr or config.lr,
                    weight_decay=config.weight_decay,
                    momentum=config.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        self.peaks = [[group["lr"] for group in optimiser.param_groups] for optimiser in self.all]

    @property
    def lr(self) -> float:
        return self.all[0].param_groups[0]["lr"]

    def set_factor(self, factor: float) -> None:
        for optimiser, peaks in zip(self.all, self.peaks):
            for group, peak in zip(optimiser.param_groups, peaks):
                group["lr"] = peak * factor * (self.gate_factor if group.get("is_gate") else 1.0)

    def step(self) -> None:
        for optimiser in self.all:
            optimiser.step()

    def zero_grad(self) -> None:
        for optimiser in self.all:
            optimiser.zero_grad(set_to_none=True)

    def allocate(self) -> None:
        """Create all state tensors, so that a checkpoint can be loaded into them: a step with learning rate 0 and gradient 0."""
        factors = [[group["lr"] for group in optimiser.param_groups] for optimiser in self.all]
        for p in self.named.values():
            p.grad = torch.zeros_like(p)
        self.set_factor(0.0)
        self.step()
        self.zero_grad()
        for optimiser, lrs in zip(self.all, factors):
            for group, lr in zip(optimiser.param_groups, lrs):
                group["lr"] = lr

    def tensors(self) -> dict[str, Tensor]:
        """All state tensors by parameter and name, without copies, for checkpoints."""
        found = {}
        for name, p in self.named.items():
            for optimiser in self.all:
                for key, value in optimiser.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        found[f"{name}.{key}"] = value
        return found


def parameter_groups(model: nn.Module, config: OptimConfig | None = None) -> list[dict[str, Any]]:
    """Parameter groups for `torch.optim.AdamW` in your own loop: weight decay for matrices only, and `config.w0_lr_scale` times the learning
    rate for the hidden maps of a memory's initial weights W0.

    >>> groups = parameter_groups(nn.Linear(4, 4), OptimConfig(lr=1e-3))
    >>> [(group["lr"], group["weight_decay"]) for group in groups]
    [(0.001, 0.1), (0.001, 0.0)]
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return _groups(named, dataclasses.replace(config or OptimConfig(), name="adamw"))[1]


def _groups(named: dict[str, nn.Parameter], config: OptimConfig) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    """Matrices for Muon, and AdamW's groups without empty ones."""
    matrices, decayed, plain = split_parameters(named.items(), config.name == "muon")
    slow = {id(p) for name, p in named.items() if is_hidden_w0_map(name, named)}
    groups = [
        {"params": decayed, "lr": config.lr, "weight_decay": config.weight_decay},
        {"params": [p for p in plain if id(p) not in slow], "lr": config.lr, "weight_decay": 0.0},
        {"params": [p for p in plain if id(p) in slow], "lr": config.lr * config.w0_lr_scale, "weight_decay": 0.0},
    ]
    return matrices, [group for group in groups if group["params"]]


def is_hidden_w0_map(name: str, names: Container[str]) -> bool:
    """Whether this parameter is a map of a memory's initial weights W0, except the last map.

    >>> names = ["memory.W0.0", "memory.W0.1", "memory.qkv.weight"]
    >>> [is_hidden_w0_map(name, names) for name in names]
    [True, False, False]
    """
    before, W0, index = name.rpartition("W0.")
    return bool(W0) and index.isdecimal() and f"{before}W0.{int(index) + 1}" in names


def split_parameters(
    named: Iterable[tuple[str, nn.Parameter]], muon: bool
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Parameters for muon, for adamw with weight decay, and for adamw without.

    Muon gets the matrices inside the blocks that map one hidden space to another. Stacks of matrices, single rows, gates, convolutions
    (a matrix by shape only), embeddings and the initial weights of memories stay with adamw.

    >>> names = {"model.layers.0.a.weight": nn.Parameter(torch.ones(8, 8)), "model.norm.weight": nn.Parameter(torch.ones(8))}
    >>> [len(part) for part in split_parameters(names.items(), muon=True)]
    [1, 0, 1]
    """
    matrices, decayed, plain = [], [], []
    for name, p in named:
        matrix = p.dim() == 2 and not any(word in name for word in UNDECAYED)
        inside = ".layers." in name or name.startswith("memories.")
        if muon and matrix and inside and min(p.shape) > 1 and ".conv." not in name:
            matrices.append(p)
        elif matrix:
            decayed.append(p)
        else:
            plain.append(p)
    return matrices, decayed, plain
