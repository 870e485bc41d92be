"""Products into buffers that are used again, so that the hot loop neither asks the system for memory nor leaves the cache."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


def without_autocast(backward):
    """A backward method whose precision does not depend on where `.backward()` is called."""

    @functools.wraps(backward)
    def method(ctx, *grads):
        with torch.autocast(grads[0].device.type, enabled=False):
            return backward(ctx, *grads)

    return method


LARGE = 1 << 18  # numbers of a matrix from which on it pays no more to be in a batch
SMALL = 16384  # numbers below which torch's fused GELU costs more to set up than a few plain operations


class Workspace:
    """Buffers by shape, taken one after another and all given back at `reset`.

    `like` gives type and device; `low` is the precision of matmuls under autocast. Under torch.compile, and with `low`,
    nothing is reused: the compiler plans memory itself. `keeping`: results asked for as `kept` get memory of their own,
    because they are saved for backward.
    """

    def __init__(self, like: Tensor, low: torch.dtype | None = None, keeping: bool = False):
        self.like, self.low, self.keeping = like, low, keeping
        self.reuse = low is None and not torch.compiler.is_compiling()
        self.buffers: dict[tuple[int, ...], list[Tensor]] = {}
        self.taken: dict[tuple[int, ...], int] = {}

    def mark(self) -> dict[tuple[int, ...], int]:
        """Where we are, to come back to by `reset`."""
        return dict(self.taken)

    def reset(self, mark: dict[tuple[int, ...], int] | None = None) -> None:
        """Every buffer taken since `mark`, or ever, may be used again: what it holds is no longer needed."""
        self.taken = dict(mark) if mark else {}

    def buffer(self, *shape: int) -> Tensor:
        mine = self.buffers.setdefault(shape, [])
        at = self.taken.get(shape, 0)
        self.taken[shape] = at + 1
        if at == len(mine):
            mine.append(self.like.new_empty(shape))
        return mine[at]

    def empty(self, *shape: int, kept: bool = False) -> Tensor:
        """An uninitialised tensor: a buffer where buffers are reused."""
        return self.buffer(*shape) if self._reuses(kept) else self.like.new_empty(shape)

    def _reuses(self, kept: bool) -> bool:
        return self.reuse and not (kept and self.keeping)

    def mm(self, a: Tensor, b: Tensor, kept: bool = False, out: Tensor | None = None) -> Tensor:
        """a @ b, batched; into `out` where given."""
        if self.reuse and out is not None and _direct(out):
            return torch.bmm(a, b, out=out)
        if self.reuse and (out is not None or self._reuses(kept)):
            return _into(torch.bmm(a, b, out=self.buffer(a.shape[0], a.shape[1], b.shape[2])), out)
        if self.low is None:
            return _into(torch.bmm(a, b), out)
        return _into(torch.bmm(a.to(self.low), b.to(self.low)).to(a.dtype), out)

    def add_mm(self, into: Tensor, a: Tensor, b: Tensor, exact: bool = False) -> Tensor:
        """into += a @ b, in place; `exact`: in full precision under autocast too."""
        if exact or (self.low is None and _direct(into)):
            return into.baddbmm_(a, b)
        return into.add_(self.mm(a, b))

    def mul(
        self,
        small: Tensor | float,
        x: Tensor,
        kept: bool = False,
        out: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """small * x, into `out` where given. The result has the shape of x unless `shape` says otherwise."""
        if self.reuse and (out is not None or self._reuses(kept)):
            return torch.mul(x, small, out=self.buffer(*(shape or x.shape)) if out is None else out)
        return _into(x * small, out)

    def gelu(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        if not self.reuse:
            return _into(torch.nn.functional.gelu(z), out)
        if z.numel() < SMALL:
            return self.mul(z, self.mul(math.sqrt(0.5), z).erf_().add_(1.0).mul_(0.5), out=out)
        if out is not None and out.is_contiguous():
            return torch.ops.aten.gelu.out(z, out=out)
        # torch's own function takes any `out` for contiguous, and writes over what lies between its rows
        return _into(torch.ops.aten.gelu.out(z, out=self.buffer(*z.shape)), out)

    def gelu_backward(self, du: Tensor, z: Tensor, out: Tensor | None = None) -> Tensor:
        """du * gelu'(z)."""
        if not self.reuse:
            return _into(torch.ops.aten.gelu_backward(du, z), out)
        if z.numel() < SMALL:
            cdf = self.mul(math.sqrt(0.5), z).erf_().add_(1.0).mul_(0.5)
            pdf = self.mul(z, z).mul_(-0.5).exp_().mul_(1.0 / math.sqrt(2.0 * math.pi))
            return self.mul(du, cdf.addcmul_(z, pdf), out=out)
        if out is not None and out.is_contiguous():
            return torch.ops.aten.gelu_backward.grad_input(du, z, grad_input=out)
        return _into(torch.ops.aten.gelu_backward.grad_input(du, z, grad_input=self.buffer(*z.shape)), out)

    def cat(self, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        """x and y side by side in the last axis."""
        if self.reuse:
            out = self.buffer(*x.shape[:-1], x.shape[-1] + y.shape[-1]) if out is None else out
            return torch.cat([x, y], -1, out=out)
        return _into(torch.cat([x, y], -1), out)


def _direct(out: Tensor) -> bool:
    """torch batches a product only into contiguous memory, and else makes the matrices one by one, which must be large for that."""
    return out.is_contiguous() or out.shape[1] * out.shape[2] >= LARGE


def _into(x: Tensor, out: Tensor | None) -> Tensor:
    return x if out is None else out.copy_(x)
