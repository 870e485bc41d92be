"""What a write needs of every fast map: its inputs, and the errors that come back to its outputs, at the anchor.

The gradient of a map is the sum of inputsᵀ errors over its uses. Chains have it in closed form; any other structure is
differentiated by autograd, in a function of its own that keeps nothing but its arguments for the backward pass.
G = batch x heads, E entries, D lifted key dim, V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .objectives import error, loss
from .spec import MemorySpec

Uses = list[list[tuple[Tensor, Tensor]]]  # for each fast map, the (inputs, errors) of each time the network used it


def errors_at_anchor(spec: MemorySpec, k: Tensor, v: Tensor, A: list[Tensor]) -> Uses:
    """Inputs and errors of every fast map for keys k (G, E, D) and values v (G, E, V) at weights A."""
    if spec.network.chain is not None:
        return chain_errors(spec, k, v, A)
    with torch.autocast(k.device.type, enabled=False):
        if torch.is_grad_enabled():
            counts, *flat = _Errors.apply(spec, k, v, *A)  # ty: ignore[not-iterable]
        else:
            with torch.inference_mode(False):
                counts, *flat = _by_autograd(spec, *(x.clone() if x.is_inference() else x.detach() for x in (k, v, *A)))
    pairs = iter(zip(flat[::2], flat[1::2]))
    return [[next(pairs) for _ in range(count)] for count in counts]


def chain_errors(spec: MemorySpec, k: Tensor, v: Tensor, A: list[Tensor]) -> Uses:
    """The chain rule, written out in operations that autograd can differentiate again."""
    assert spec.network.chain is not None
    groups, joints = spec.network.chain
    inputs, pre = [k], []
    for group, joint in zip(groups, joints):
        pre.append([torch.bmm(inputs[-1], A[i]) for i in group])
        inputs.append(_joint(joint, pre[-1]))
    (last,) = groups[-1]
    output = torch.bmm(inputs[-1], A[last]) if spec.objective == "l2" else None
    errors = [error(spec.objective, output, v)]
    uses: Uses = [[] for _ in A]
    uses[last].append((inputs[-1], errors[0]))
    below = groups[-1]
    for group, joint, x, z in zip(groups[-2::-1], joints[::-1], inputs[-2::-1], pre[::-1]):
        back = torch.bmm(errors[0], A[below[0]].mT)
        for i, e in zip(below[1:], errors[1:]):
            back = torch.baddbmm(back, e, A[i].mT)
        errors = _pull(joint, z, back)
        for i, e in zip(group, errors):
            uses[i].append((x, e))
        below = group
    return uses


def _joint(joint: str, z: list[Tensor]) -> Tensor:
    """The next group's input."""
    return F.gelu(z[0]) if joint == "gelu" else F.gelu(z[0]) * z[1]


def _pull(joint: str, z: list[Tensor], back: Tensor) -> list[Tensor]:
    """Errors before the joint, from those behind it."""
    gelu_backward = torch.ops.aten.gelu_backward  # (grad, z) -> grad * gelu'(z); differentiable
    if joint == "gelu":
        return [gelu_backward(back, z[0])]
    return [gelu_backward(back * z[1], z[0]), back * F.gelu(z[0])]


class _Errors(torch.autograd.Function):
    """`_by_autograd`, done again in the backward pass: the graph inside never meets the graph, or the hooks, outside."""

    @staticmethod
    def forward(ctx, spec: MemorySpec, k: Tensor, v: Tensor, *A: Tensor):
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(k, v, *A)
        return _by_autograd(spec, *(x.detach() for x in (k, v, *A)))

    @staticmethod
    @once_differentiable
    def backward(ctx, _, *grads: Tensor | None):  # ty: ignore[incompatible-method-override]
        wanted = ctx.needs_input_grad[1:]
        leaves = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, wanted)]
        with torch.autocast(leaves[0].device.type, enabled=False):
            _, *outputs = _by_autograd(ctx.spec, *leaves, create_graph=True)
            pairs = [(y, g) for y, g in zip(outputs, grads) if g is not None and y.requires_grad]
            found = [None] * len(leaves)
            if pairs:
                ys, gs = zip(*pairs)
                inputs = [x for x in leaves if x.requires_grad]
                each = iter(torch.autograd.grad(ys, inputs, gs, allow_unused=True))
                found = [next(each) if need else None for need in wanted]
        return None, *found


def _by_autograd(spec: MemorySpec, k: Tensor, v: Tensor, *A: Tensor, create_graph: bool = False):
    """How often each map was used, then inputs and errors of every use, map by map."""
    uses: Uses = [[] for _ in A]

    def fast(i: int, x: Tensor) -> Tensor:
        z = x @ A[i]
        uses[i].append((x, z if z.requires_grad else z.requires_grad_()))
        return z

    # a checkpoint around us would drop what this graph saves, and run all before it again when we ask for it
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        total = loss(spec.objective, spec.network.forward(k, fast), v).sum()
        pre = [z for use in uses for _, z in use]
        errors = torch.autograd.grad(total, pre, create_graph=create_graph, materialize_grads=True)
    flat = [x for pair in zip((a for use in uses for a, _ in use), errors) for x in pair]
    return tuple(len(use) for use in uses), *(flat if create_graph else (x.detach() for x in flat))
