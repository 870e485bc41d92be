"""W0 of a `NeuralMemory`: how it is drawn, and the initial weights that the layer makes of it.

Shapes: H heads, D inputs and E outputs of a fast map.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..nn.derivatives import full_precision
from .config import NeuralMemoryConfig
from .spec import MemorySpec

STRETCH = 1.2  # of the largest singular value that hidden maps are drawn with: they may grow by that much


@torch.no_grad()
def draw_w0(spec: MemorySpec, W0: Sequence[Tensor]) -> None:
    """Fill W0, one (H, D, E) per fast map: hidden activations of a unit key have about unit norm, and the last map is near zero, so that
    writes dominate the random initialisation for any learning rate. With features "exp" the first map is 0, and the others pass errors
    on to it at their size. Hidden maps of more than two in a chain are drawn orthogonal: no key is longer behind them than any other, and
    none can be made so by turning it towards their largest direction. A structure that draws its own weights is asked for them."""
    if spec.network.draws_w0:
        for w, drawn in zip(W0, spec.network.draw_w0(len(W0[0])) if len(W0) else ()):
            if not getattr(w, "_is_hf_initialized", False):
                w.copy_(drawn)
        return
    for w, std in zip(W0, _stds(spec)):
        nn.init.normal_(w, std=std)
    for w, std in zip(W0[:-1], _stds(spec)) if _is_long_chain(spec) else ():
        if not getattr(w, "_is_hf_initialized", False):  # else transformers opens a checkpoint, and draws nothing
            tall = w.shape[1] > w.shape[2]
            wide = w.to(torch.promote_types(w.dtype, torch.float32))
            q = torch.linalg.qr(wide if tall else wide.mT).Q
            w.copy_(std * w.shape[2] ** 0.5 * (q if tall else q.mT))


def initial_weights(config: NeuralMemoryConfig, W0: Sequence[Tensor]) -> list[Tensor]:
    """The initial weights of the fast maps: hidden maps no longer than they are drawn, because the memory's own steps grow with them,
    and the last map times `w0_scale`."""
    spec = config.spec
    if spec.is_kv_cache or spec.network.draws_w0:
        return list(W0)
    hidden = [clip_spectral_norm(w, _limit(spec, w, std)) for w, std in zip(W0[:-1], _stds(spec))]
    return [*hidden, config.effective_w0_scale * W0[-1]]


def clip_spectral_norm(w: Tensor, limit: float) -> Tensor:
    """w (H, D, E), each matrix shortened to a spectral norm of at most `limit`. That norm is taken for as much as the 16-norm of the
    singular values, which is never less and at most D^(1/16) times it, and needs nothing but products.

    >>> round(torch.linalg.matrix_norm(clip_spectral_norm(torch.randn(1, 8, 32), 2.0), 2).item(), 2) <= 2
    True
    """
    with full_precision(w.device.type):  # eighth powers leave the range of half precision
        wide = w.to(torch.promote_types(w.dtype, torch.float32))
        gram = wide @ wide.mT if w.shape[1] <= w.shape[2] else wide.mT @ wide
        squared = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None].clamp(min=1e-12)
        power = gram / squared
        for _ in range(3):
            power = power @ power
        norm = squared.sqrt() * power.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None].clamp(min=1e-30) ** (1 / 16)
        return (wide * (limit / norm).clamp(max=1.0)).to(w.dtype)


def _is_long_chain(spec: MemorySpec) -> bool:
    chain = spec.network.chain
    return chain is not None and len(chain.groups) > 2 and not spec.is_kv_cache


def _limit(spec: MemorySpec, w: Tensor, std: float) -> float:
    """The largest norm of a hidden map (H, D, E), as `clip_spectral_norm` measures it."""
    _, D, E = w.shape
    if _is_long_chain(spec):  # as it is drawn, all singular values the same; a hundredth for rounding
        return 1.01 * std * E**0.5 * min(D, E) ** (1 / 16)
    return STRETCH * std * (D**0.5 + E**0.5)


def _stds(spec: MemorySpec) -> list[float]:
    chain, shapes = spec.network.chain, spec.shapes
    if spec.is_kv_cache:
        return [(4 / d_in) ** 0.5 for d_in, _ in shapes]
    activations = zip(chain.groups, chain.activations) if chain else ()
    gated = {i for group, activation in activations if activation == "geglu" for i in group}
    hidden = [(4 / d_out) ** (0.25 if i in gated else 0.5) for i, (_, d_out) in enumerate(shapes[:-1])]
    return [*hidden, 0.01 * shapes[-1][0] ** -0.5]
