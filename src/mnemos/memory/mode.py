"""How work is carried out: in which precision, and by the torch path or by a kernel for CPUs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as module_calls

from .derivatives import transformed
from .spec import NS_COEFFICIENTS, MemorySpec

BACKENDS = ("auto", "torch", "cpp")
MAPS = 16  # of a chain, at most, for the kernel


FEW = 1 << 15  # numbers up to which one call of a kernel is quicker than a chain of torch's operations
PLAIN = (Tensor, torch.nn.Parameter)


class Mode(NamedTuple):
    """low: precision of matmuls under autocast, None for that of the inputs. native: by the kernel."""

    low: torch.dtype | None = None
    native: bool = False


Shape = tuple[int, ...]


def shapes_of(tensors: Sequence[Tensor | None]) -> tuple[Shape | None, ...]:
    """For `token_kernels`, from parameters as they were made."""
    return tuple(None if x is None else tuple(x.shape) for x in tensors)


def token_kernels(
    *tensors: Tensor | None, parameters: Sequence[Tensor | None] = (), shapes: Sequence[Shape | None] = ()
):
    """kernels/token.py where it can work on these tensors, else None: numbers of one type in the CPU's memory, no gradients, no
    autocast, and nobody who records or transforms operations. Parameters must be contiguous and have these shapes too: a kernel reads
    as much as it was made for, whatever somebody has put in their place."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return None
    if torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cpu"):
        return None
    first = tensors[0]
    if first is None or first.dtype not in (torch.float32, torch.float64):
        return None
    dtype = first.dtype
    for x in tensors:
        if x is not None and (type(x) not in PLAIN or not x.is_cpu or x.dtype is not dtype):
            return None
    for x, shape in zip(parameters, shapes, strict=True):
        if x is None:
            if shape is not None:
                return None
        elif x.shape != shape or type(x) not in PLAIN or not (x.is_cpu and x.dtype is dtype and x.is_contiguous()):
            return None
    token = _token()
    return token if token.why_not() is None else None


def plain(*modules: torch.nn.Module | None) -> bool:
    """Whether a kernel may read the parameters of these modules instead of calling them: they are this package's own, not put in
    their place by somebody else (adapters, quantised maps, parametrisations), and nobody listens to their calls or has replaced them."""
    if module_calls._global_forward_hooks or module_calls._global_forward_pre_hooks:
        return False
    for module in modules:
        if module is None:
            continue
        if not type(module).__module__.startswith("mnemos.") or "forward" in module.__dict__:
            return False
        if module._forward_hooks or module._forward_pre_hooks:
            return False
    return True


@functools.cache
def _token():
    """kernels/token.py, imported when it is first wanted."""
    from ..kernels import token

    return token


def _native_can(k: Tensor, spec: MemorySpec) -> bool:
    """Whether the kernels know this memory, and these keys are numbers in the CPU's memory."""
    plain = k.is_cpu and type(k) in PLAIN and not torch.compiler.is_compiling()
    if not plain or transformed() or spec.anchor != "chunk" or spec.grows:
        return False
    if spec.rule == "muon" and (spec.nesterov or len(NS_COEFFICIENTS[spec.ns_coefficients]) > 1):
        return False  # the kernel orthogonalises S itself, with one polynomial for all iterations
    return spec.chain is not None and len(spec.chain.groups) <= MAPS


def step_by_kernel(backend: str, k: Tensor, spec: MemorySpec) -> bool:
    """Whether a step with keys k (B, 1, H, K) is the kernel's work: without gradients only."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
    if backend == "torch" or torch.is_grad_enabled() or spec.rule != "gd" or not _native_can(k, spec):
        return False
    return _available(backend, _token().why_not())


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

    name = "chain" if spec.rule == "gd" else "muon"
    return Mode(low, _available(backend, chain.why_not(torch.promote_types(k.dtype, torch.float32), name)))


def chain_kernel():
    """kernels/chain.py's `run`, imported at first use."""
    from ..kernels.chain import run

    return run


def muon_kernel():
    """kernels/muon.py's `run`, imported at first use."""
    from ..kernels.muon import run

    return run


def layer_kernel(backend: str, *tensors: Tensor | None):
    """The kernels for what a layer does around its scan, where they can take these tensors."""
    if backend == "torch" or torch.compiler.is_compiling() or transformed():
        return None
    from ..kernels import layer

    return layer if layer.usable(*tensors) else None
