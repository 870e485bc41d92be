"""The one place where arguments from outside are checked, in words a user understands."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from ..dispatch import operation
from .features import FEATURES
from .spec import Gates, MemorySpec
from .state import MemoryState, check_owner
from .state_validation import check_parts

GATE_NAMES = tuple(field.name for field in dataclasses.fields(Gates))
UNBOUNDED = ("lr", "threshold")  # gates that may exceed 1
ON_META = "on the meta device, which holds no numbers, but a memory checks the values of its gates"


class NotFiniteError(ValueError):
    """A NaN or an infinity where a memory needs numbers; the message names its batch row and position."""


class NoValuesError(ValueError):
    """A tensor on the meta device where a memory checks values."""


def check_inputs(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    spec: MemorySpec,
    features,
    mask,
    cu_seqlens,
) -> None:
    """The arguments of `scan`: shapes, types and devices; and values, but under torch.compile."""
    _check_floats("k", k, spec.key_channels)
    others = [("v", v, spec.pairs_per_token * spec.value_dim)]
    others = others if q is None else [("q", q, spec.key_dim), *others]
    for name, x, dim in others:
        _check_floats(name, x, dim)
        if x.shape[:3] != k.shape[:3]:
            raise ValueError(f"{name} has (B, T, H) = {tuple(x.shape[:3])}, but k has {tuple(k.shape[:3])}")
        if x.device != k.device:
            raise ValueError(f"{name} is on {x.device}, but k is on {k.device}")
    B, T, H = k.shape[:3]
    if k.is_meta:
        raise NoValuesError(
            f"k is {ON_META}: move q, k, v, gates and state to a device that holds numbers, such as 'cpu'"
        )
    if T == 0:
        raise ValueError("the sequence is empty: T must be >= 1")
    documents = B
    if cu_seqlens is not None:
        documents = check_cu_seqlens(cu_seqlens, B, T)
    check_state(state, spec, documents, H, k.device)
    if mask is not None:
        check_mask("mask", mask, k)
    _check_features(features, spec, H)
    _check_gates(gates, (B, T, H), spec, k.device)
    _check_network(spec, k)


def check_token(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState, spec: MemorySpec, features, mask
) -> None:
    """The arguments of `step`."""
    if not isinstance(k, Tensor) or k.dim() != 4 or k.shape[1] != 1:
        raise ValueError(f"k has shape {_shape(k)}, but step takes one token: (B, 1, H, {spec.key_channels})")
    if q is None:
        raise ValueError("q is None, but step reads: give (B, 1, H, key_dim), or use scan(None, ...) to write alone")
    check_inputs(q, k, v, gates, state, spec, features, mask, None)


def check_query(q: Tensor, state: MemoryState, spec: MemorySpec, features) -> None:
    """The arguments of `read`."""
    _check_floats("q", q, spec.key_dim)
    check_state(state, spec, q.shape[0], q.shape[2], q.device)
    _check_features(features, spec, q.shape[2])


def check_state(state: MemoryState, spec: MemorySpec, batch: int, heads: int, device: torch.device) -> None:
    steps = isinstance(state, MemoryState) and _same_but_for_steps(state.spec, spec)
    check_owner(state, state.spec if steps else spec, batch, heads, device, "the input")
    if not torch.compiler.is_compiling():
        check_parts(state, spec, batch, heads)
    if state.own and not state.inplace:
        state.own = False  # what comes of this call may hold its tensors too


def _same_but_for_steps(own: MemorySpec, spec: MemorySpec) -> bool:
    """Whether a call may use `spec` on a state of `own`: more or fewer Newton–Schulz iterations leave the state what it is."""
    return own is not spec and own.commits and dataclasses.replace(own, ns_steps=spec.ns_steps) == spec


def check_mask(name: str, mask, like: Tensor) -> None:
    """Raise a ValueError unless `mask` is a bool tensor of the first two axes of `like`, batch and time."""
    if not isinstance(mask, Tensor) or mask.shape != like.shape[:2] or mask.dtype != torch.bool:
        raise ValueError(f"{name} {describe(mask)}, but bool {tuple(like.shape[:2])} is expected")


def describe(x) -> str:
    """A description of x, for messages."""
    return f"has shape {tuple(x.shape)} and type {x.dtype}" if isinstance(x, Tensor) else f"is a {_kind(x)}"


def _kind(x) -> str:
    return type(x).__name__


def _shape(x) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else _kind(x)


def _check_floats(name: str, x, dim: int) -> None:
    if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[-1] != dim:
        raise ValueError(f"{name} has shape {_shape(x)}, but (B, T, H, {dim}) is expected")
    if not x.is_floating_point():
        raise ValueError(f"{name} has type {x.dtype}, but must be a floating-point tensor")


def as_boundaries(cu_seqlens) -> Tensor:
    """cu_seqlens as a tensor: lists, tuples and arrays of numbers become one."""
    if isinstance(cu_seqlens, Tensor):
        return cu_seqlens
    try:
        return torch.as_tensor(cu_seqlens)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"cu_seqlens is a {_kind(cu_seqlens)}, but must be a whole-number vector [0, end of document 1, ..., T]"
        ) from None


def check_cu_seqlens(cu_seqlens: Tensor, B: int, T: int) -> int:
    """The number of documents that cu_seqlens packs into one row of T tokens."""
    if B != 1:
        raise ValueError(f"cu_seqlens needs one packed sequence (batch 1), but the batch is {B}")
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dim() != 1
        or len(cu_seqlens) < 2
        or cu_seqlens.is_floating_point()
    ):
        raise ValueError("cu_seqlens must be a vector of whole numbers, [0, end of document 1, ..., T]")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != T or any(a > b for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"cu_seqlens must rise from 0 to T={T}, but is {bounds[:4]}...{bounds[-1:]}")
    return len(bounds) - 1


def _check_features(features, spec: MemorySpec, heads: int) -> None:
    if features is None:
        if not (FEATURES[spec.features].is_identity or spec.is_kv_cache):  # without a module the kernel is exp(q·k)
            raise ValueError(
                f"the spec has features={spec.features!r}: pass features=make_features(spec, heads={heads})"
            )
        return
    dims = getattr(features, "dim_in", None), getattr(features, "dim_out", None)
    if not callable(features) or None in dims:
        raise ValueError(
            f"features is a {_kind(features)} without dim_in and dim_out: pass a FeatureMap, as make_features makes it"
        )
    if dims != (spec.key_dim, spec.lifted_dim):
        raise ValueError(
            f"features map {dims[0]} to {dims[1]} dimensions, but the spec needs {spec.key_dim} to {spec.lifted_dim}"
        )
    if getattr(features, "heads", heads) != heads:
        raise ValueError(
            f"features are of {features.heads} heads, but the input has {heads}: use make_features(spec, heads={heads})"
        )
    name = getattr(features, "name", None if FEATURES[spec.features].is_identity else spec.features)
    if name != spec.features:
        raise ValueError(f"features are {name or _kind(features)!r}, but the spec has features={spec.features!r}")


@operation
def value_range(x: Tensor) -> tuple[float, float]:
    """The smallest and the largest number of x; NaN if it holds one."""
    low, high = torch.aminmax(x.detach())
    return low.item(), high.item()


def _check_gates(gates: Gates, shape: tuple[int, int, int], spec: MemorySpec, device: torch.device) -> None:
    if not isinstance(gates, Gates) or not isinstance(gates.lr, Tensor):
        raise ValueError("gates must be Gates(lr=...) with a tensor lr (B, T, H)")
    if gates.momentum is not None and not spec.momentum:
        raise ValueError("gates.momentum is given, but the spec has momentum=False")
    if gates.momentum is not None and not spec.update_rule.momentum_gate:
        raise ValueError(f"gates.momentum is given, but retention={spec.retention!r} has no momentum")
    if gates.threshold is not None and not spec.loss.has_threshold:
        raise ValueError(f"gates.threshold is given, but objective={spec.objective!r} has no threshold per token")
    for name in GATE_NAMES:
        x = getattr(gates, name)
        if x is None:
            continue
        wanted = shape[2:] if name == "decay" else (*shape, spec.window) if name == "lag" else shape
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = f"has type {x.dtype}" if isinstance(x, Tensor) else f"is a {_kind(x)}"
            raise ValueError(f"gates.{name} {kind}, but must be a floating-point tensor {tuple(wanted)}")
        if x.shape != wanted:
            raise ValueError(f"gates.{name} has shape {tuple(x.shape)}, but {tuple(wanted)} is expected")
        if x.device != device:
            raise ValueError(f"gates.{name} is on {x.device}, but k is on {device}")
        if not torch.compiler.is_compiling():
            low, high = value_range(x)
            if not (low >= 0.0 and high < float("inf")) or (name not in UNBOUNDED and high > 1.0):
                raise _gate_error(name, x, low, high)


def _gate_error(name: str, x: Tensor, low: float, high: float) -> ValueError:
    allowed = "finite and >= 0" if name in UNBOUNDED else "in [0, 1]"
    wrong = f"gates.{name} must be {allowed}, but ranges over [{low}, {high}]"
    if name != "decay":  # which is a number per head
        fine = x.isfinite() & (x >= 0) & ((x <= 1) | (name in UNBOUNDED))
        row, position = (~fine).flatten(2).any(2).nonzero()[0].tolist()
        wrong += f", first in batch row {row}, position {position}"
    return ValueError(wrong) if x.isfinite().all() else NotFiniteError(wrong)


def _check_network(spec: MemorySpec, like: Tensor) -> None:
    """A structure of the user's own holds no trained parameters: the engine would lose a part of their gradients."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or spec.network.chain is not None:
        return
    x = like.new_zeros(1, 1, spec.lifted_dim)
    if spec.network.forward(x, lambda i, z: z.sum(-1, keepdim=True).expand(1, 1, spec.shapes[i][1])).requires_grad:
        raise ValueError(
            f"structure {spec.structure!r} holds parameters that require gradients, but may be made of fast maps and functions alone"
        )


def blame(layer: nn.Module, wrong: Exception, inputs: dict[str, Tensor], mask: Tensor | None) -> None:
    """Raise an error that names the input or parameter that made the layer fail with `wrong`; return if none is found.

    Runs only after a failure: a call that works pays nothing for it.
    inputs: (B, T, dim) each, by the names of the layer's arguments.
    """
    if any(t.is_meta for t in (*inputs.values(), *layer.parameters())):
        raise ValueError(
            f"x or the layer's parameters are {ON_META}: move the layer with to_empty(device='cpu'), load its weights, and move x"
        ) from None
    if not isinstance(wrong, NotFiniteError):
        return
    for name, x in inputs.items():
        bad = ~x.isfinite().all(-1)  # B T
        bad = bad if mask is None else bad & mask
        if bad.any():
            row, position = bad.nonzero()[0].tolist()
            token = x[row, position]
            rows = bad.any(1).nonzero().flatten().tolist()
            others = f" (rows {', '.join(map(str, rows[:8]))}{' …' * (len(rows) > 8)})" if len(rows) > 1 else ""
            raise NotFiniteError(
                f"{name} is {token[~token.isfinite()][0].item()} in batch row {row}, position {position}{others}: "
                "a memory takes only finite numbers; repair that sequence, or mask the token"
            ) from None
    damaged = [name for name, p in layer.named_parameters() if not p.isfinite().all()]
    if damaged:
        raise NotFiniteError(
            f"{wrong}: x is finite, but the layer's {damaged[0]} is not; load weights that are"
        ) from None
    largest = max(x.abs().max().item() for x in inputs.values())
    raise NotFiniteError(f"{wrong}: x is finite, but as large as {largest:.3g}; normalise it") from None
