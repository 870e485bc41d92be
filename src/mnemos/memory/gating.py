"""The gates of a memory as functions of its input: write strength, momentum, retention and weight of each token.

Shapes: B batch, T time, H heads, c window.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.constant import Constant
from ..nn.linear import Linear, linear
from .config import GATINGS, NeuralMemoryConfig
from .spec import Gates


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def gate_logits(config: NeuralMemoryConfig) -> dict[str, float]:
    """The logits at which gates start, by gate; `fixed_retain_logits` has those of retain="fixed".

    >>> round(gate_logits(NeuralMemoryConfig(dim=32, momentum_init=0.5))["momentum"], 3)
    0.0
    """
    return {
        "lr": logit(config.initial_lr / config.effective_max_lr),
        "momentum": logit(config.initial_momentum),
        "retain": logit(config.retain_init),
        "lag": logit(config.gate_init),
        "token": logit(config.gate_init),
        "decay": logit(config.decay_init),
        "threshold": math.log(math.expm1(config.spec.loss.initial_threshold)),  # of a softplus
    }


def fixed_retain_logits(config: NeuralMemoryConfig) -> list[float]:
    """The logits at which retain="fixed" starts: half-lives from 22 tokens, head by head, to that of retain_init."""
    slowest, steps = math.log(1 - config.retain_init), max(config.head_count - 1, 1)
    fastest = max(slowest, math.log(1 / 32))
    lost = (math.exp(fastest + (slowest - fastest) * h / steps) for h in range(config.head_count))
    return [logit(1 - x) for x in lost]


register_gating = GATINGS.register


@register_gating
class Gating(nn.Module):
    """x (B, T, dim) -> `Gates`, in float32 or wider for any type of x, with autocast or without.

    Another gating is a module with `name`, `__init__(config: NeuralMemoryConfig)` and `forward(x) -> Gates` under `@register_gating`.
    All maps from x share one matmul, the hidden layer of the token gate included. The initial values of the gates are
    constants of the config (`gate_logits`), and parameters are offsets to their logits: an initialisation from outside that
    sets biases to 0 changes no gate. Weights start at 0 too, so that every gate starts at its `*_init` for every token; only
    the token gate's second layer does not, or its first would not learn.

    >>> gating = Gating(NeuralMemoryConfig(dim=32, heads=2, window=3, gate="token*per-lag"))
    >>> gates = gating(torch.randn(1, 5, 32))
    >>> gates.lr.shape, gates.lag.shape
    (torch.Size([1, 5, 2]), torch.Size([1, 5, 2, 3]))
    """

    name = "linear"

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
        if config.spec.loss.has_threshold:
            self.sizes["threshold"] = self.heads
        if "token" in config.gate_parts:
            self.sizes["hidden"] = config.gate_hidden
        has_token, has_decay = ("token" in config.gate_parts), ("decay" in config.gate_parts)
        self.linear = Linear(config.dim, sum(self.sizes.values()), bias=False)
        self.offset = nn.Parameter(torch.empty(sum(self.sizes.values())))
        self.token = nn.Linear(config.gate_hidden, self.heads, bias=False) if has_token else None
        self.token_offset = nn.Parameter(torch.empty(self.heads)) if has_token else None
        self.decay_offset = nn.Parameter(torch.empty(self.heads)) if has_decay else None
        self.retain_offset = nn.Parameter(torch.empty(self.heads)) if config.retain == "fixed" else None
        logits = gate_logits(config)
        starts = {name: [logits.get(name, 0.0)] * size for name, size in self.sizes.items()}
        self._start = Constant([x for part in starts.values() for x in part])
        self._token_start, self._decay_start = (Constant([logits[name]] * self.heads) for name in ("token", "decay"))
        self._retain_start = Constant(fixed_retain_logits(config))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.linear.weight)
        if self.token is not None:
            hidden = self.linear.weight[-self.config.gate_hidden :]
            if not getattr(self.linear.weight, "_is_hf_initialized", False):  # else transformers has loaded it
                nn.init.normal_(hidden, std=self.config.dim**-0.5)
            nn.init.normal_(self.token.weight, std=0.1 * self.config.gate_hidden**-0.5)
        for offset in (self.offset, self.token_offset, self.decay_offset, self.retain_offset):
            if offset is not None:
                nn.init.zeros_(offset)

    def forward(self, x: Tensor) -> Gates:
        if not torch.is_autocast_enabled(x.device.type):
            return self._gates(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._gates(x)

    def _gates(self, x: Tensor, hidden: Tensor | None = None) -> Gates:
        """hidden: (B, T, gate_hidden), the token gate's hidden layer before its bias and SiLU, if it is not that of x alone."""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = self._start.plus(self.offset, wide)
        if self.linear.weight.dtype == wide:
            mapped = self.linear(x.to(wide))
        else:
            mapped = linear(x.to(wide), self.linear.weight.to(wide))
        if mapped.shape[-1] != len(bias):
            raise ValueError(f"gating.linear has {mapped.shape[-1]} outputs, but {len(bias)} are expected")
        if hidden is not None:
            mapped = torch.cat([mapped[..., : -hidden.shape[-1]], hidden.to(wide)], dim=-1)
        mapped = mapped + bias
        part = dict(zip(self.sizes, mapped.split(list(self.sizes.values()), dim=-1)))
        gates = Gates(lr=self.config.effective_max_lr * part["lr"].sigmoid())
        if "momentum" in part:
            gates.momentum = part["momentum"].sigmoid()
            if not self.config.spec.commits:  # the writes of a token through S then sum to lr for any momentum
                gates.lr = gates.lr * (-part["momentum"]).sigmoid()
        if "retain" in part:
            gates.retain = part["retain"].sigmoid()
        elif self.retain_offset is not None:
            gates.retain = self._retain_start.plus(self.retain_offset, wide).sigmoid().expand_as(gates.lr)
        if "lag" in part:
            gates.lag = part["lag"].sigmoid().unflatten(-1, (self.heads, self.window))
        if "threshold" in part:
            gates.threshold = F.softplus(part["threshold"])
        if self.token is not None and self.token_offset is not None:
            bias = self._token_start.plus(self.token_offset, wide)
            gates.gate = F.linear(F.silu(part["hidden"]), self.token.weight.to(wide), bias).sigmoid()
        if self.decay_offset is not None:
            gates.decay = self._decay_start.plus(self.decay_offset, wide).sigmoid()
        return gates


@register_gating
class SparseGating(Gating):
    """Gates of a memory that is written and read at few tokens: they see the last tokens, and are exactly 0 for most of them.

    The token gate's hidden layer goes through the layer's causal convolution, as keys and values do, so that it depends on the last
    `conv_width` tokens. From it come the token gate and a gate of what is read. Both are stretched sigmoids: exactly 0 below
    `CUT`, exactly 1 above 1 - `CUT`. A token whose token gate is 0 leaves the memory as it was; one whose read gate is 0 reads 0, so
    that the layer's output is 0 too, but for the static branch of `learn_w0`. Read gates begin at 1. Needs gate="token" and a convolution.

    >>> from mnemos.memory import NeuralMemory
    >>> mem = NeuralMemory(dim=32, heads=2, gating="sparse", gate="token", retain=False, gate_init=0.1)
    >>> x, state = torch.randn(1, 5, 32), mem.initial_state(1)
    >>> mem.gates(x, state, None, None).gate.any().item(), mem.read_gate(x, state, None, None).tolist()[0][0]
    (False, [1.0, 1.0])
    """

    name = "sparse"
    CUT = 0.25
    READ_INIT = 0.9

    def __init__(self, config: NeuralMemoryConfig):
        if "token" not in config.gate_parts or not config.conv_width:
            raise ValueError(
                f"gating='sparse' needs gate='token' and a convolution, not gate={config.gate!r} and conv_width={config.conv_width}"
            )
        super().__init__(config)
        self.read = nn.Linear(config.gate_hidden, self.heads, bias=False)
        self.read_offset = nn.Parameter(torch.empty(self.heads))
        self._read_start = Constant([logit(self.READ_INIT)] * self.heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "read" in self._modules:  # else the base class is not ready yet
            nn.init.normal_(self.read.weight, std=0.1 * self.config.gate_hidden**-0.5)
            nn.init.zeros_(self.read_offset)

    @classmethod
    def conv_channels(cls, config: NeuralMemoryConfig) -> int:
        """Channels that the layer's convolution has for this gating."""
        return config.gate_hidden

    def hidden(self, x: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, gate_hidden), before the convolution."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), self.linear.weight[-self.config.gate_hidden :].to(wide))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Gates:
        """hidden: (B, T, gate_hidden), behind the convolution."""
        if hidden is None:
            raise ValueError("gating='sparse' sees a convolution: call the layer's gates(x, state, mask, cu_seqlens)")
        with torch.autocast(x.device.type, enabled=False):
            gates = self._gates(x, hidden)
        assert gates.gate is not None
        gates.gate = self.stretched(gates.gate)
        return gates

    def read_logits(self, hidden: Tensor) -> Tensor:
        """hidden (B, T, gate_hidden), behind the convolution -> (B, T, H)."""
        wide = hidden.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            active = F.silu(hidden + self.offset[-self.config.gate_hidden :].to(wide))
            return F.linear(active, self.read.weight.to(wide), self._read_start.plus(self.read_offset, wide))

    def stretched(self, gate: Tensor) -> Tensor:
        return ((gate - self.CUT) / (1 - 2 * self.CUT)).clamp(0.0, 1.0)


def momentum_since_commit(position: Tensor, commit: int, lr: Tensor) -> Tensor:
    """Momentum that makes S the sum since the last commit: 0 at an interval's first token, else 1. (B, T) -> (B, T, H)."""
    return (position % commit != 0).to(lr.dtype).unsqueeze(-1).expand_as(lr)
