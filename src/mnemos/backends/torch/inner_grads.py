"""What a write needs of every fast map: its inputs, and the errors that come back to its outputs, at the anchor.

The gradient of a map is the sum of inputsᵀ errors over its uses. Chains have them in closed form; any other structure is
differentiated by autograd.
G = batch x heads, E window tokens, D lifted key dim, V value dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...memory.rules import norm_factor
from ...memory.spec import MemorySpec
from ...nn.derivatives import recomputed

SMALL_NUMEL = 16384  # below it, torch's fused GELU costs more to set up than a few plain operations
Uses = list[list[tuple[Tensor, Tensor]]]  # for each fast map, the (inputs, errors) of each time the network used it


def errors_at_anchor(
    spec: MemorySpec, k: Tensor, v: Tensor, A: list[Tensor], matmul=torch.bmm, recompute: bool = False
) -> Uses:
    """Inputs and errors of every fast map for keys k (G, E, D) and values v (G, E, V) at weights A.

    Each pair of a token is a use of its own. recompute: a network without a chain is differentiated again in the backward pass, and
    results need gradients only if an argument does. Inside of work that is recomputed as a whole it is not needed.
    """
    k, v = as_entries(spec, k), as_entries(spec, v)
    if spec.network.chain is not None:
        uses = chain_errors(spec, k, v, A, matmul)
    elif recompute and torch.is_grad_enabled():
        uses = _by_map(*recomputed(functools.partial(_by_autograd, spec), k, v, *A))
    else:
        uses = autograd_errors(spec, k, v, A)
    uses = [by_pair(spec, use) for use in uses]
    return uses if spec.max_grad_norm is None else _clipped(uses, spec.max_grad_norm)


def as_entries(spec: MemorySpec, x: Tensor) -> Tensor:
    """The pairs of each token one after the other: (G, E, pairs * D) -> (G, E * pairs, D)."""
    return x if spec.pairs_per_token == 1 else x.unflatten(-1, (spec.pairs_per_token, -1)).flatten(1, 2)


def by_pair(spec: MemorySpec, use: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Inputs and errors (G, E * pairs, ·) of a map as those of `pairs` uses, (G, E, ·) each."""
    n = spec.pairs_per_token
    if n == 1:
        return use
    return [pair for a, d in use for pair in zip(*(x.unflatten(1, (-1, n)).unbind(2) for x in (a, d)))]


def _clipped(uses: Uses, bound: float) -> Uses:
    """Errors scaled so that the gradient of an entry has at most the norm `bound` over all maps. ‖Σ a ⊗ d‖² = Σ (a·a') (d·d')."""
    squared: Tensor | float = 0.0
    for use in uses:
        for a, d in use:
            for b, e in use:
                squared = squared + (a * b).sum(-1, keepdim=True) * (d * e).sum(-1, keepdim=True)  # G E 1
    assert isinstance(squared, Tensor)
    factor = norm_factor(squared, bound)
    return [[(a, factor * d) for a, d in use] for use in uses]


def chain_errors(
    spec: MemorySpec, k: Tensor, v: Tensor, A: list[Tensor], matmul=torch.bmm, listed: Tensor | None = None
) -> Uses:
    """The chain rule, written out in operations that autograd can differentiate again.

    listed: the outputs of the first map, where it is a list of pairs; the first of A is then not used.
    """
    chain = spec.network.chain
    assert chain is not None

    def mapped(x: Tensor, i: int) -> Tensor:
        return matmul(x, A[i]) if i or listed is None else listed

    inputs, pulls = [k], []
    for group, activation in zip(chain.groups, chain.activations):
        u, pull = ACTIVATIONS[activation]([mapped(inputs[-1], i) for i in group])
        inputs.append(u)
        pulls.append(pull)
    (last,) = group = chain.groups[-1]
    output = mapped(inputs[-1], last) if spec.loss.uses_output else None
    errors = [spec.loss.error(output, v)]
    uses: Uses = [[] for _ in A]
    uses[last].append((inputs[-1], errors[0]))
    for before, pull, x in zip(chain.groups[-2::-1], reversed(pulls), inputs[-2::-1]):
        back = matmul(errors[0], A[group[0]].mT)
        for i, e in zip(group[1:], errors[1:]):
            back = back + matmul(e, A[i].mT)
        errors, group = pull(back), before
        for i, e in zip(group, errors):
            uses[i].append((x, e))
    return uses


def _gelu(z: list[Tensor]) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """gelu(z), and the function that takes errors behind it to those before it."""
    (p,) = z
    if p.numel() >= SMALL_NUMEL:
        return F.gelu(p), lambda back: [torch.ops.aten.gelu_backward(back, p)]
    cdf = (p * math.sqrt(0.5)).erf() * 0.5 + 0.5

    def pull(back: Tensor) -> list[Tensor]:
        pdf = (p * p * -0.5).exp() * (1.0 / math.sqrt(2.0 * math.pi))
        return [back * torch.addcmul(cdf, p, pdf)]

    return p * cdf, pull


def _geglu(z: list[Tensor]) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """gelu(p) * r for z = [p, r], and the function that takes errors behind it to those before it."""
    p, r = z
    g, pull = _gelu([p])
    return g * r, lambda back: [*pull(back * r), back * g]


ACTIVATIONS = {"gelu": _gelu, "geglu": _geglu}


def autograd_errors(spec: MemorySpec, k: Tensor, v: Tensor, A: list[Tensor]) -> Uses:
    """For any structure. With gradients enabled the result is part of a graph, whether or not an argument needs one."""
    if torch.is_grad_enabled():
        return _by_map(*_by_autograd(spec, k, v, *A))
    with torch.inference_mode(False), torch.no_grad():
        return _by_map(*_by_autograd(spec, *(x.clone() if x.is_inference() else x.detach() for x in (k, v, *A))))


def _by_map(counts: tuple[int, ...], *flat: Tensor) -> Uses:
    pairs = iter(zip(flat[::2], flat[1::2]))
    return [[next(pairs) for _ in range(count)] for count in counts]


def _by_autograd(spec: MemorySpec, k: Tensor, v: Tensor, *A: Tensor):
    """How often each map was used, then inputs and errors of every use, map by map."""
    tracking = torch.is_grad_enabled()
    uses: Uses = [[] for _ in A]

    def fast(i: int, x: Tensor) -> Tensor:
        z = x @ A[i]
        uses[i].append((x, z if z.requires_grad else z.requires_grad_()))
        return z

    # a checkpoint around us would drop what this graph saves, and run all before it again when we ask for it
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        total = spec.loss.loss(spec.network.forward(k, fast), v).sum()
        pre = [z for use in uses for _, z in use]
        errors = torch.autograd.grad(total, pre, create_graph=tracking, materialize_grads=True)
    flat = [x for pair in zip((a for use in uses for a, _ in use), errors) for x in pair]
    return tuple(len(use) for use in uses), *(flat if tracking else (x.detach() for x in flat))
