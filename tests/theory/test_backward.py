"""docs/theory.md, sections 4.5 to 4.8: the backward pass against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import (
    D,
    close,
    coefficients,
    dual,
    end_of_tile,
    errors_at_anchor,
    gelu_slope,
    leaf,
    memory,
    products,
    rand,
    uniform,
)
from torch import Tensor

from mnemos.memory.spec import Gates

# --- sections 3 and 4.1-4.3: coefficients and dual form ---------------------------------------------------------------


def gelu_curvature(z: Tensor) -> Tensor:
    return (2 - z * z) * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)


# --- sections 4.5-4.8: the backward pass ------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [(), (3,), (0,), (2, 3), (1, 4, 5)])
def test_the_backward_of_the_product_matrix_is_exact_at_gates_of_zero(zeros):
    x = uniform(0.2, 1.0, 6)
    x[list(zeros)] = 0.0
    x = leaf(x)
    P = products(x)
    dP = rand(7, 7)
    (true,) = torch.autograd.grad((P * dP).sum(), x)
    Z = P.mT @ dP.tril()
    by_hand = torch.stack([sum(Z[r, s] * P[r - 1, s] for s in range(r)) for r in range(1, 7)])
    close(by_hand, true)
    assert torch.isfinite(by_hand).all() and true.abs().min() > 0


def test_the_backward_of_one_dual_map_and_of_the_end_of_a_tile():
    L, N, d_in, d_out = 5, 7, 4, 3
    x, a, d = leaf(rand(L, d_in)), leaf(rand(N, d_in)), leaf(rand(N, d_out))
    W, S = leaf(rand(d_in, d_out)), leaf(rand(d_in, d_out))
    C, n, beta, f, m = (leaf(t) for t in (rand(L + 1, N), rand(L + 1, N), rand(L + 1), rand(L + 1), rand(L + 1)))
    y = dual(x, W, S, a, d, C[1:], beta[1:], f[1:])
    W_end, S_end = end_of_tile(W, S, a, d, C, beta, f, m, n)
    g, G, H = rand(L, d_out), rand(d_in, d_out), rand(d_in, d_out)
    names = (x, W, S, a, d, C, n, beta, f, m)
    true = torch.autograd.grad((y * g).sum() + (W_end * G).sum() + (S_end * H).sum(), names)

    with torch.no_grad():
        row = slice(1, None)
        scores, pull = x @ a.mT, g @ d.mT
        Dx = beta[row, None] * (g @ W.mT) + f[row, None] * (g @ S.mT) - (C[row] * pull) @ a
        DW = x.mT @ (beta[row, None] * g) + beta[-1] * G
        DS = x.mT @ (f[row, None] * g) + f[-1] * G + m[-1] * H
        Cw, nw = C[-1][:, None], n[-1][:, None]
        Da = -(C[row] * pull).mT @ x - Cw * (d @ G.mT) - nw * (d @ H.mT)
        Dd = -(C[row] * scores).mT @ g - Cw * (a @ G) - nw * (a @ H)
        DC, Dn = torch.zeros_like(C), torch.zeros_like(n)
        DC[row] = -scores * pull
        DC[-1] -= ((a @ G) * d).sum(-1)
        Dn[-1] = -((a @ H) * d).sum(-1)
        Dbeta, Df, Dm = torch.zeros_like(beta), torch.zeros_like(f), torch.zeros_like(m)
        Dbeta[row] = (g * (x @ W)).sum(-1)
        Df[row] = (g * (x @ S)).sum(-1)
        Dbeta[-1] += (W * G).sum()
        Df[-1] += (S * G).sum()
        Dm[-1] = (S * H).sum()
    for by_hand, expected in zip((Dx, DW, DS, Da, Dd, DC, Dn, Dbeta, Df, Dm), true):
        close(by_hand, expected)


def test_the_backward_from_the_coefficients_to_the_gates():
    L, N = 6, 8
    lr, momentum, retain = leaf(uniform(0, 1, L)), leaf(uniform(0, 1, L)), leaf(uniform(0, 1, L))
    window = leaf(rand(L, N))
    gates = Gates(lr=lr, momentum=momentum, retain=retain)
    C, beta, f, m, n = coefficients(gates, window)
    DC, Dbeta, Df, Dm, Dn = rand(L + 1, N), rand(L + 1), rand(L + 1), rand(L + 1), rand(L + 1, N)
    total = sum((x * g).sum() for x, g in ((C, DC), (beta, Dbeta), (f, Df), (m, Dm), (n, Dn)))
    true = torch.autograd.grad(total, (lr, momentum, retain, window))

    with torch.no_grad():
        P_m, P_r = products(momentum), products(retain)
        push = torch.cat([n, m[:, None]], -1)[1:]  # what each token adds to W
        Dmix = torch.cat([DC, Df[:, None]], -1)
        DP_r = torch.zeros_like(P_r)
        DP_r[:, 1:] = Dmix @ push.mT
        DP_r[:, 0] += Dbeta
        back = P_r[:, 1:].mT @ Dmix
        Dn_all, Dm_all = Dn.clone(), Dm.clone()
        Dn_all[1:] += back[:, :-1]
        Dm_all[1:] += back[:, -1]
        inner = P_m[1:, 1:].mT @ Dn_all[1:]  # gradient of diag(lr) Gamma
        Dlr, Dwindow = (inner * window).sum(-1), lr[:, None] * inner
        DP_m = torch.zeros_like(P_m)
        DP_m[1:, 1:] = Dn_all[1:] @ (lr[:, None] * window).mT
        DP_m[:, 0] += Dm_all

        def through_products(P: Tensor, dP: Tensor) -> Tensor:
            Z = P.mT @ dP.tril()
            return (Z[1:, :-1] * P[:-1, :-1]).sum(-1)

        by_hand = (Dlr, through_products(P_m, DP_m), through_products(P_r, DP_r), Dwindow)
    for mine, expected in zip(by_hand, true):
        close(mine, expected)


def test_the_backward_of_the_errors_at_the_anchor():
    spec, W0 = memory("mlp", 3)
    A = [leaf(w) for w in W0]
    k, v = leaf(rand(5, D)), leaf(rand(5, D))
    a, d = errors_at_anchor(spec, k, v, lambda i, x: x @ A[i], lambda i, g: g @ A[i].mT)
    Ga, Gd = [torch.zeros_like(a[0]), *(rand(*x.shape) for x in a[1:])], [rand(*x.shape) for x in d]
    total = sum((x * g).sum() for x, g in zip([*a, *d], [*Ga, *Gd]))
    true = torch.autograd.grad(total, (*A, k, v))

    with torch.no_grad():
        z = [x @ w for x, w in zip(a, A)]
        DA, Dz, Dd = [torch.zeros_like(w) for w in A], [torch.zeros_like(x) for x in z], [g.clone() for g in Gd]
        for i in range(2):  # errors were made from the top down, so their gradients go up
            p = d[i + 1] @ A[i + 1].mT
            Dz[i] += Dd[i] * p * gelu_curvature(z[i])
            Dp = Dd[i] * gelu_slope(z[i])
            Dd[i + 1] += Dp @ A[i + 1]
            DA[i + 1] += Dp.mT @ d[i + 1]
        Dz[2] += Dd[2]
        Dv, Dk = -Dd[2], Dd[2].clone()  # the residual adds k to the output
        for i in (2, 1, 0):
            DA[i] += a[i].mT @ Dz[i]
            Da = Ga[i] + Dz[i] @ A[i].mT
            if i:
                Dz[i - 1] += Da * gelu_slope(z[i - 1])
            else:
                Dk += Da
    for mine, expected in zip((*DA, Dk, Dv), true):
        close(mine, expected)
