"""One token through the fast maps of a memory by the C++ kernel: the write and read of `backends.torch.step`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...memory.rules import GradientDescent
from ...memory.spec import Gates, MemorySpec
from ...memory.state import MemoryState
from ..torch.step import step as torch_step
from . import token
from .build import unavailable_reason
from .engine import unsupported
from .structs import LONGEST_WINDOW


def unsupported_step(k: Tensor, spec: MemorySpec, backend: str = "auto") -> str | None:
    if torch.is_grad_enabled():
        return "the kernel for one token has no gradients"
    return unsupported(k, spec) or unsupported_rule(spec) or unavailable_reason("token")


def unsupported_rule(spec: MemorySpec) -> str | None:
    """Why the kernels for one token do not compute this rule, or None if they do."""
    if type(spec.update_rule) is GradientDescent or (spec.windowed and spec.window <= LONGEST_WINDOW):
        return None
    return "one token: the kernel has rule='gd', and rule='muon' with commit_every=1 and momentum=False"


def step(q, k, v, gates: Gates, state: MemoryState, spec: MemorySpec, features, mask):
    inplace = state.inplace and mask is None

    def write(query: Tensor, window_tokens, weight: Tensor | None, gates: Gates, state, spec, dtype):
        old, new = matrices(state, dtype, inplace)
        roles = spec.update_rule.roles(gates, spec).map(lambda x: x.to(dtype).reshape(-1, 1, 1))  # B 1 H -> G 1 1
        if roles.strength is not None:
            weight = roles.strength if weight is None else roles.strength * weight
        weight = query.new_ones(len(query), 1, 1) if weight is None else weight
        y = token.chain_step(spec, query, window_tokens, weight, (roles.momentum, roles.retain, roles.rate), old, new)
        return y, *new, old[2]

    return torch_step(q, k, v, gates, state, spec, features, mask, write, inplace)


def matrices(state: MemoryState, dtype: torch.dtype, inplace: bool) -> tuple[tuple, tuple]:
    """Weights, momentum, anchor and initial weights for a kernel to read, and weights and momentum for it to write: the same where
    `inplace`, which are the state's own or, the first time, copies of them."""

    def ready(x: Tensor) -> Tensor:
        return x if x.dtype == dtype and x.is_contiguous() else x.to(dtype).contiguous()

    W, S, A = ([ready(x) for x in xs] for xs in (state.weights, state.momentum, state.anchor))
    W0 = token.shared_rows(state.start, state.batch, dtype)
    if not inplace:
        state.own = False
        return (W, S, A, W0), ([torch.empty_like(w) for w in W], [torch.empty_like(s) for s in S])
    if state.own and state.dtype == dtype:
        A = [a.clone() if a is w else a for a, w in zip(A, W)]
    else:
        W, S, A = ([x.clone() for x in xs] for xs in (W, S, A))
    return (W, S, A, W0), (W, S)
