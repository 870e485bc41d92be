"""How a scan is carried out: in which precision, and by the torch path or by the kernel for CPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .spec import MemorySpec

BACKENDS = ("auto", "torch", "cpp")
MAPS = 16  # of a chain, at most, for the kernel


class Mode(NamedTuple):
    """low: precision of matmuls under autocast, None for that of the inputs. native: by the kernel."""

    low: torch.dtype | None = None
    native: bool = False


def _native_can(k: Tensor, spec: MemorySpec) -> bool:
    """Whether the kernels know this memory, and these keys are numbers in the CPU's memory."""
    plain = k.device.type == "cpu" and type(k) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    if not plain or spec.rule != "gd" or spec.anchor != "chunk" or spec.grows:
        return False
    chain = spec.network.chain
    return chain is not None and len(chain.groups) <= MAPS


def step_by_kernel(backend: str, k: Tensor, spec: MemorySpec) -> bool:
    """Whether a step with keys k (B, 1, H, K) is the kernel's work: without gradients only."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
    if backend == "torch" or torch.is_grad_enabled() or not _native_can(k, spec):
        return False
    from ..kernels import token

    return _available(backend, token.why_not())


def _available(backend: str, reason: str | None) -> bool:
    if reason is not None and backend == "cpp":
        raise ValueError(f"backend='cpp' cannot be had: {reason}; use 'auto' or 'torch'")
    return reason is None


def choose_mode(backend: str, k: Tensor, spec: MemorySpec) -> Mode:
    """The mode of a scan with keys k (B, T, H, K), under the autocast of the moment."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
    low = None
    if k.dtype != torch.float64 and torch.is_autocast_enabled(k.device.type):
        low = torch.get_autocast_dtype(k.device.type)
    if backend == "torch" or low is not None or not _native_can(k, spec):
        return Mode(low)
    idle = torch.get_num_threads() > 2 * k.shape[0] * k.shape[2]  # the kernel has one thread for each row and head
    if backend == "auto" and idle:
        return Mode(low)
    from ..kernels import chain

    return Mode(low, _available(backend, chain.why_not(torch.promote_types(k.dtype, torch.float32))))


def chain_kernel():
    """The chain engine's loop as a kernel, imported when it is first wanted."""
    from ..kernels.chain import Chain

    return Chain
