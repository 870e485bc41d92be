"""The windowed family: a commit after every token, by a function of the window's gradients in their own low-rank space.

The gradient of a map at token t is Σ_i weight_i a_iᵀ d_i over the c window tokens i, so a step that is a function of its singular
values is Aᵀ M_t B with a matrix M_t (c, c) that depends on Gram matrices alone (`Rule.window_step`). The weights after token t are
    W_t = beta_t W + Σ_{s <= t} C[t,s] A_sᵀ M_s B_s          C[t,s] = rate_s Π_{s < r <= t} retain_r
with A_s, B_s the inputs and errors of the window of token s.
G = batch x heads, L tokens and E = c-1+L window tokens of a tile, c window, u uses of a map.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...memory.rules import Roles
from ...memory.spec import MemorySpec
from .coefficients import Coefficients, Products, gd_coefficients

Use = list[tuple[Tensor, Tensor]]


def window_weights(gate: Tensor, roles: Roles, c: int) -> Tensor:
    """Weights of the window of every token, oldest first: (..., L, c). gate: (..., E); strength (..., L) and lag (..., L, c) of the roles."""
    weight = gate.unfold(-1, c, 1)
    if roles.lag is not None:
        weight = weight * roles.lag.flip(-1)
    return weight if roles.strength is None else weight * roles.strength.unsqueeze(-1)


def windowed_coefficients(roles: Roles, valid: Tensor | None, weight: Tensor, products: Products) -> Coefficients:
    """C (N, G, L+1, L) and beta as above; n holds the window's weights (N, G, L, c), f and m are empty."""
    rate = roles.rate
    assert rate is not None
    co = gd_coefficients(rate, None, roles.retain, valid, torch.ones_like(rate), products)
    return co._replace(f=rate.new_zeros(0), n=weight, m=rate.new_zeros(0))


class WindowSteps:
    """The steps of one fast map at all tokens of a tile. use: inputs and errors (G, E, ·) of each use; weight: (G, L, c)."""

    def __init__(self, spec: MemorySpec, use: Use, weight: Tensor):
        (_, L, c), u = weight.shape, len(use)
        self.use, self.E = use, c - 1 + L
        token, slot = torch.arange(L, device=weight.device), torch.arange(u * c, device=weight.device)
        self.places = token.unsqueeze(-1) + slot % c + slot // c * self.E  # L u*c, of a window among all entries
        a, d = (torch.cat(parts, 1) for parts in zip(*use))  # G u*E ·
        rows, columns = self.places.unsqueeze(-1), self.places.unsqueeze(-2)
        gram_in, gram_out = ((x @ x.mT)[:, rows, columns] for x in (a, d))  # G L u*c u*c
        self.a, self.d = a, d
        self.M = spec.update_rule.window_step(gram_in, gram_out, weight.repeat(1, 1, u), spec)

    def read(self, x: Tensor, C: Tensor, matmul) -> Tensor:
        """Σ_s C[t,s] x_t A_sᵀ M_s B_s: x (G, T, d_in), C (G, T, L) -> (G, T, d_out)."""
        scores = matmul(x, self.a.mT)[..., self.places]  # G T L u*c
        mixed = (scores * C.unsqueeze(-1)).transpose(1, 2) @ self.M  # G L T u*c
        mixed = mixed.transpose(1, 2).flatten(2)
        empty = mixed.new_zeros(*x.shape[:2], self.a.shape[1])
        return matmul(empty.index_add(2, self.places.flatten(), mixed), self.d)

    def total(self, C: Tensor, matmul) -> Tensor:
        """Σ_s C[s] A_sᵀ M_s B_s: C (G, L) -> (G, d_in, d_out)."""
        n = self.a.shape[1]
        places = self.places.unsqueeze(-1) * n + self.places.unsqueeze(-2)  # L u*c u*c
        weighted = (C[..., None, None] * self.M).flatten(1)
        between = weighted.new_zeros(len(weighted), n * n).index_add(1, places.flatten(), weighted)
        return matmul(self.a.mT, matmul(between.view(-1, n, n), self.d))


def windowed_step(spec: MemorySpec, use: Use, weight: Tensor, rate: Tensor) -> Tensor:
    """rate times the step of one token. use: (G, c, ·) of each use; weight: (G, c, 1) or (G, 1, 1), rate: (G, 1, 1) -> (G, d_in, d_out)."""
    a, d = (torch.cat(parts, 1) for parts in zip(*use))
    weight = weight.squeeze(-1).expand(-1, a.shape[1] // len(use)).repeat(1, len(use))
    M = spec.update_rule.window_step(a @ a.mT, d @ d.mT, weight, spec)
    return a.mT @ (rate * M @ d)
