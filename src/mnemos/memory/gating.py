"""The gates of a memory as functions of its input: how strongly each token writes, and what the memory keeps.

Shapes: B batch, T time, H heads, c window.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import NeuralMemoryConfig
from .linear import Linear, linear
from .spec import Gates


def logit(p: float) -> float:
    return math.log(p / (1 - p))


class Gating(nn.Module):
    """x (B, T, dim) -> `Gates`, float32 or wider whatever x is, autocast or not.

    All maps from x share one matmul, the hidden layer of the token gate included. Weights start at 0, so that every gate
    starts at its `*_init` for every token; only the token gate's second layer must not, or its first would not learn.

    >>> gating = Gating(NeuralMemoryConfig(dim=32, heads=2, window=3, gate="token*per-lag"))
    >>> gates = gating(torch.randn(1, 5, 32))
    >>> gates.lr.shape, gates.lag.shape
    (torch.Size([1, 5, 2]), torch.Size([1, 5, 2, 3]))
    """

    def __init__(self, config: NeuralMemoryConfig):
        super().__init__()
        self.config = config
        self.heads, self.window = config.head_count, config.spec.window
        self.sizes = {"lr": self.heads}
        if config.momentum:
            self.sizes["momentum"] = self.heads
        if config.retain and config.retain != "fixed":
            self.sizes["retain"] = self.heads
        if "per-lag" in config.gate_parts:
            self.sizes["lag"] = self.heads * self.window
        if "token" in config.gate_parts:
            self.sizes["hidden"] = config.gate_hidden
        self.linear = Linear(config.dim, sum(self.sizes.values()))
        self.token = nn.Linear(config.gate_hidden, self.heads) if "token" in config.gate_parts else None
        self.decay = nn.Parameter(torch.empty(self.heads)) if "decay" in config.gate_parts else None
        self.retain = nn.Parameter(torch.empty(self.heads)) if config.retain == "fixed" else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        config = self.config
        starts = {
            "lr": config.lr_start / config.lr_ceiling,
            "momentum": config.momentum_start,
            "retain": config.retain_init,
            "lag": config.gate_init,
        }
        nn.init.zeros_(self.linear.weight)
        for name, bias, weight in zip(
            self.sizes, *(x.split(list(self.sizes.values())) for x in (self.linear.bias, self.linear.weight))
        ):
            if name == "hidden":
                nn.init.normal_(weight, std=config.dim**-0.5)
                nn.init.zeros_(bias)
            else:
                nn.init.constant_(bias, logit(starts[name]))
        if self.token is not None:
            nn.init.normal_(self.token.weight, std=0.1 * config.gate_hidden**-0.5)
            nn.init.constant_(self.token.bias, logit(config.gate_init))
        if self.decay is not None:
            nn.init.constant_(self.decay, logit(config.decay_init))
        if self.retain is not None:  # half-lives from 22 tokens, head by head, to that of retain_init
            slowest = math.log(1 - config.retain_init)
            lost = torch.linspace(max(slowest, math.log(1 / 32)), slowest, self.heads, dtype=torch.float64).exp()
            self.retain.copy_(torch.logit(1 - lost))

    def forward(self, x: Tensor) -> Gates:
        if not torch.is_autocast_enabled(x.device.type):
            return self._gates(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._gates(x)

    def _gates(self, x: Tensor) -> Gates:
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.linear.weight.dtype == wide:
            mapped = self.linear(x.to(wide))
        else:
            mapped = linear(x.to(wide), self.linear.weight.to(wide), self.linear.bias.to(wide))
        part = dict(zip(self.sizes, mapped.split(list(self.sizes.values()), dim=-1)))
        gates = Gates(lr=self.config.lr_ceiling * part["lr"].sigmoid())
        if "momentum" in part:
            gates.momentum = part["momentum"].sigmoid()
            if self.config.rule == "gd":  # a token's pushes through S then sum to lr, whatever the momentum
                gates.lr = gates.lr * (-part["momentum"]).sigmoid()
        if "retain" in part:
            gates.retain = part["retain"].sigmoid()
        elif self.retain is not None:
            gates.retain = self.retain.to(wide).sigmoid().expand_as(gates.lr)
        if "lag" in part:
            gates.lag = part["lag"].sigmoid().unflatten(-1, (self.heads, self.window))
        if self.token is not None:
            hidden = F.silu(part["hidden"])
            gates.gate = F.linear(hidden, self.token.weight.to(wide), self.token.bias.to(wide)).sigmoid()
        if self.decay is not None:
            gates.decay = self.decay.to(wide).sigmoid()
        return gates


def momentum_since_commit(position: Tensor, commit: int, lr: Tensor) -> Tensor:
    """Momentum that makes S the sum since the last commit: 0 at an interval's first token, else 1. (B, T) -> (B, T, H)."""
    return (position % commit != 0).to(lr.dtype).unsqueeze(-1).expand_as(lr)
