"""How work is carried out: in which precision, and by the torch path or by a kernel for CPUs."""

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


def choose_mode(backend: str, k: Tensor, spec: MemorySpec) -> Mode:
    """The mode of a scan with keys k (B, T, H, K), under the autocast of the moment."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
    low = None
    if k.dtype != torch.float64 and torch.is_autocast_enabled(k.device.type):
        low = torch.get_autocast_dtype(k.device.type)
    chain = spec.network.chain
    known = spec.rule == "gd" and spec.anchor == "chunk" and not spec.grows
    known = known and chain is not None and len(chain.groups) <= MAPS
    plain = k.device.type == "cpu" and type(k) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    if backend == "torch" or low is not None or not known or not plain:
        return Mode(low)
    idle = torch.get_num_threads() > 2 * k.shape[0] * k.shape[2]  # the kernel has one thread for each row and head
    if backend == "auto" and idle:
        return Mode(low)
    from ..kernels import chain

    reason = chain.why_not(torch.promote_types(k.dtype, torch.float32))
    if reason is not None and backend == "cpp":
        raise ValueError(f"backend='cpp' cannot be had: {reason}; use 'auto' or 'torch'")
    return Mode(low, reason is None)


def chain_kernel():
    """The chain engine's loop as a kernel, imported when it is first wanted."""
    from ..kernels.chain import Chain

    return Chain


def layer_kernel(backend: str, *tensors: Tensor | None):
    """The kernels for what a layer does around its scan, where they can take these tensors."""
    if backend == "torch" or torch.compiler.is_compiling():
        return None
    from ..kernels import layer

    return layer if layer.usable(*tensors) else None
