"""What tests of every folder share."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from torch import Tensor, nn

from mnemos.backends.cpu.build import unavailable_reason

NO_KERNEL = unavailable_reason("chain", "decay")
needs_kernel = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no compiled kernel: {NO_KERNEL}")
every_backend = pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_kernel)])

TALE = "the memory of a model learns at test time what it has read so that nothing told is lost "
TALE += "and every question about the first page of a book finds its answer on the last"


def random_words(count: int) -> str:
    """Words in an order that is always the same: a text that small models learn something from."""
    draw, words = random.Random(0), TALE.split()
    return " ".join(draw.choice(words) for _ in range(count))


def run_here(work, pieces, workers=None):
    """`mnemos.trials.run_all` in this process: pieces and results are pickled as between processes, but none has to start."""
    from mnemos.trials import pool

    for index, piece in enumerate(pieces):
        yield index, pool._result(pickle.dumps((work, piece)))


def randomise(module: nn.Module, scale: float = 0.3, seed: int = 0) -> nn.Module:
    """Move every parameter off its initial value, so that no property holds merely because something starts at 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((scale * noise).to(parameter))
    return module


def relative_rms(a: Tensor, b: Tensor) -> float:
    """RMS of a - b over the RMS of b."""
    a, b = a.detach().double(), b.detach().double()
    size = b.square().mean().sqrt().item()
    return (a - b).square().mean().sqrt().item() / max(size, 1e-30)


def assert_close_rms(a: Tensor, b: Tensor, tol: float, what: str = "") -> None:
    """a equals b to a relative RMS of `tol`; a failure prints both the error and the tolerance."""
    assert a.shape == b.shape, f"{what} shapes differ: {tuple(a.shape)} and {tuple(b.shape)}"
    if a.numel() == 0:
        return
    error = relative_rms(a, b)
    assert error <= tol, f"{what} relative RMS {error:.3e} > {tol:.1e}"  # NaN fails too


assert_close = assert_close_rms
