"""The rules as coefficients: what momentum, decay and window do to the gradients of one tile of tokens.

Inside a tile everything but the gradients is linear, so the weights after token t are
    W_t = beta_t W + f_t S - sum_e C[t,e] a_e (x) d_e          S_t = m_t S - sum_e n[t,e] a_e (x) d_e
with one entry e per gradient: input a_e and back-propagated error d_e of a key at its anchor. In the windowed family (a commit after every
token, by a function of the window's gradients) n holds the weights of the windows, and C what is left of earlier steps (`engine.WindowSteps`).

N tiles, G = batch x heads, L tokens of a tile, E window tokens of a tile, c window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...memory.rules import Roles
from ...nn.derivatives import full_precision

UNDERFLOW = {torch.float32: 1e-30, torch.float64: 1e-290}


Products = Callable[[Tensor], Tensor]  # (..., L) -> (..., L, L), as `decay_products`


class Coefficients(NamedTuple):
    """Rows 0..L of C, beta and f: row t is the state after t tokens of the tile, row 0 the state before the first."""

    C: Tensor  # N G L+1 E
    beta: Tensor  # N G L+1
    f: Tensor  # N G L+1
    n: Tensor  # N G E       last row: what the tile adds to S
    m: Tensor  # N G         what the tile keeps of S


class _DecayProducts(torch.autograd.Function):
    """P[t,s] = prod_{s<r<=t} x_r for s <= t, else 0. Exact, gradients too, where some x are 0: no logs, no division."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        length = x.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-1)  # r > s
        factors = torch.where(later, x.unsqueeze(-1), torch.ones((), dtype=x.dtype, device=x.device))
        P = factors.cumprod(-2).tril_()
        P.masked_fill_(UNDERFLOW[P.dtype] > P, 0.0)  # denormal numbers would slow every product that follows
        ctx.save_for_backward(P)
        return P

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        (P,), (dP,) = ctx.saved_tensors, grads
        with full_precision(P.device.type):  # whatever is enabled where `.backward()` is called
            Z = P.mT @ dP.tril()  # Z[r,s] = sum_{t>=r} P[t,r] dP[t,s]
        inner = (Z[..., 1:, :-1] * P[..., :-1, :-1]).sum(-1)  # P[r-1,s] is 0 for s >= r
        return torch.nn.functional.pad(inner, (1, 0))


def decay_products(x: Tensor) -> Tensor:
    """(..., L) -> (..., L, L): products of x over every span s < r <= t, lower triangular with ones on the diagonal.

    >>> decay_products(torch.tensor([0.5, 0.5, 0.0]))
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 1.0000, 0.0000],
            [0.0000, 0.0000, 1.0000]])
    """
    return _DecayProducts.apply(x)


def gd_coefficients(
    lr: Tensor,
    momentum: Tensor | None,
    retain: Tensor | None,
    valid: Tensor | None,
    window: Tensor,
    products: Products = decay_products,
) -> Coefficients:
    """Coefficients of gradient descent. lr, momentum, retain, valid: (N, G, L). window: Gamma, (N, G, L, E), or (N, G, L) where c = 1."""
    N, G, L = lr.shape
    diagonal = window.dim() == 3
    strength = lr * window if diagonal else lr.unsqueeze(-1) * window
    decays = [x for x in (momentum, retain) if x is not None]
    P: list[Tensor] = []
    if decays:  # one call for both
        together = torch.stack(decays) if len(decays) > 1 else decays[0].unsqueeze(0)
        P = [*products(torch.nn.functional.pad(together, (1, 0), value=1.0)).unbind(0)]
    if momentum is None:
        n = torch.diag_embed(strength) if diagonal else strength
        m = torch.zeros_like(lr)
    else:
        inner, m = P[0][..., 1:, 1:], P[0][..., 1:, 0]
        n = inner * strength.unsqueeze(-2) if diagonal else inner @ strength
    if retain is None:
        kept = torch.ones(L + 1, L + 1, dtype=lr.dtype, device=lr.device).tril().expand(N, G, L + 1, L + 1)
    else:
        kept = P[-1]
    pushes = torch.cat([n, m.unsqueeze(-1)], -1)  # what each token adds to W through S
    if valid is not None:
        pushes = pushes * valid.unsqueeze(-1)
    mixed = kept[..., 1:] @ pushes  # N G L+1 E+1
    return Coefficients(mixed[..., :-1], kept[..., 0], mixed[..., -1], n[..., -1, :], m[..., -1])


def committed_coefficients(
    momentum: Tensor | None,
    retain: Tensor | None,
    valid: Tensor,
    window: Tensor,
    products: Products = decay_products,
    nesterov: bool = False,
) -> Coefficients:
    """Coefficients of one commit interval: S at its end, and the decay of W at each of its tokens. C and f are empty, but with
    nesterov: there they are to momentum_t S_t - G_t of the last token what n and m are to S_t.

    valid: (N, G, L), 0 where a token is skipped: it has no lr to silence its window.
    """
    N, G, L = valid.shape
    if momentum is None:
        last = torch.nn.functional.pad(torch.zeros_like(valid[..., 1:]), (0, 1), value=1.0)
        m = torch.zeros_like(valid[..., 0])
    else:
        # N G L+1: entry s is the product over s..L-1
        P = products(torch.nn.functional.pad(momentum.flip(-1), (1, 0), value=1.0))[..., 0].flip(-1)
        last, m = P[..., 1:], P[..., 0]
    last = last * valid
    n = last * window if window.dim() == 3 else (last.unsqueeze(-2) @ window).squeeze(-2)
    if retain is None:
        beta = torch.ones(N, G, L + 1, dtype=valid.dtype, device=valid.device)
    else:
        beta = products(torch.nn.functional.pad(retain, (1, 0), value=1.0))[..., 0]
    empty = beta.new_zeros(0)
    if not nesterov:
        return Coefficients(empty, beta, empty, n, m)
    own = torch.nn.functional.pad(window[..., -1:], (L - 1, 0)) if window.dim() == 3 else window[..., -1, :]
    own = own * valid[..., -1:]
    if momentum is None:
        return Coefficients(own, beta, torch.zeros_like(m), n, m)
    return Coefficients(momentum[..., -1:] * n + own, beta, momentum[..., -1] * m, n, m)


def window_matrix(gate: Tensor, lag_weights: Tensor | None, stride: int, c: int) -> Tensor:
    """Gamma of every tile: weight of entry e in the sum of token t.

    gate: (N, G, E), one block of c-1+stride window tokens per sub-chunk of `stride` tokens. lag_weights: (N, G, L, c) or None.
    Returns (N, G, L, E), or the diagonal (N, G, L) where c = 1.
    """
    if c == 1:
        return gate if lag_weights is None else gate * lag_weights[..., 0]
    block = c - 1 + stride
    E = gate.shape[-1]
    L = E // block * stride
    token = torch.arange(L, device=gate.device).unsqueeze(-1)
    entry = torch.arange(E, device=gate.device)
    lag = token - (entry // block * stride + entry % block - (c - 1))  # L E
    inside = (token // stride == entry // block) & (lag >= 0) & (lag < c)
    if lag_weights is None:
        weights = inside.to(gate.dtype)
    else:
        index = lag.clamp(0, c - 1).expand(*lag_weights.shape[:-1], E)
        weights = torch.where(
            inside, lag_weights.gather(-1, index), torch.zeros((), dtype=gate.dtype, device=gate.device)
        )
    return weights * gate.unsqueeze(-2)


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
