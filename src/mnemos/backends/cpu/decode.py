"""One token of the fast maps of a memory, of its layer, of sliding-window attention, or of a residual block, each by one call of a kernel;
and a piece of some tokens of a residual block.

Parts and parameters are looked up anew at every token: a module may get hooks, adapters or other weights between two of them. A module
that a kernel does not know is left to torch (`decode` returns None). B batch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ...dispatch import is_unmodified
from ...memory.config import NeuralMemoryConfig
from ...memory.features import Monomials
from ...memory.gating import Gating
from ...memory.layer import NeuralMemory
from ...memory.rules import GradientDescent, Roles
from ...memory.spec import Gates, MemorySpec
from ...memory.state import MemoryState
from ...memory.state_validation import check_place
from ...nn.attention import Attention, AttentionCache
from ...nn.block import BlockParts, ResidualBlock
from ...nn.feedforward import SwiGLU
from ...nn.norm import RMSNorm
from ..torch.step import step as torch_step
from . import token
from .build import SMALL_NUMEL, Shape, readable, unavailable_reason, unsupported_call
from .engine import unsupported, unsupported_spec
from .structs import LONGEST_WINDOW, LOSSES

MEMORY_PARTS = "qkv", "conv", "norm", "start_norm", "output_gate", "out"  # parts with a weight that the kernel reads
ATTENTION_PARTS = "qkv", "q_norm", "k_norm", "out", "conv"
Begin = Callable[[], tuple[Any, Callable[[], Any]]]  # the kernel's call, and the state once it is done
_shapes: weakref.WeakKeyDictionary[nn.Module, tuple[Shape | None, ...]] = weakref.WeakKeyDictionary()


def unsupported_decode(module: nn.Module, x: Tensor, state: Any) -> str | None:
    if not isinstance(module, (NeuralMemory, Attention, ResidualBlock)):
        return f"{type(module).__name__} has no kernel"
    if x.shape[1] > 1 and (not isinstance(module, ResidualBlock) or x.numel() > SMALL_NUMEL):
        return "pieces of several tokens: the kernel has residual blocks, and up to 32,768 numbers"
    return (unsupported_memory(module) if type(module) is NeuralMemory else None) or unsupported_call(x)


def decode(module: nn.Module, x: Tensor, state: Any) -> tuple[Tensor, Any] | None:
    """x (B, 1, dim) -> y (B, 1, dim) and the state after it; None where no kernel knows the module as it is now.

    A block may have several tokens, x (B, T, dim).
    """
    if isinstance(module, ResidualBlock):
        return _block(module, x, state)
    begin = _begin(module, x, state)
    if begin is None:
        return None
    call, after = begin()
    y = call(x)
    return None if y is None else (y, after())


def _begin(module: nn.Module | None, x: Tensor, state: Any) -> Begin | None:
    """A function that prepares the kernel's call, or None. Nothing is changed until it is called."""
    if type(module) is NeuralMemory:
        return _begin_memory(module, x, state)
    return _begin_attention(module, x, state) if type(module) is Attention else None


# Fast maps of a memory ------------------------------------------------------------


def unsupported_step(k: Tensor, spec: MemorySpec, backend: str = "auto") -> str | None:
    if torch.is_grad_enabled():
        return "the kernel for one token has no gradients"
    return unsupported(k, spec) or unsupported_rule(spec) or unavailable_reason("token")


def unsupported_rule(spec: MemorySpec) -> str | None:
    """Why the kernels for one token do not compute this rule, or None if they do."""
    if type(spec.update_rule) is GradientDescent or (spec.windowed and spec.window <= LONGEST_WINDOW):
        return None
    return "one token: the kernel has rule='gd', and rule='muon' with commit_every=1 and momentum=False"


def step(q, k, v, gates: Gates, state: MemoryState, spec: MemorySpec, features, mask):
    inplace = state.inplace and mask is None

    def write(query: Tensor, window_tokens, weight: Tensor | None, roles: Roles, state, spec, dtype):
        maps = matrices(state, dtype, inplace)
        weight = query.new_ones(len(query), 1, 1) if weight is None else weight
        gates = roles.momentum, roles.retain, roles.rate
        y = token.chain_step(spec, query, (*window_tokens, weight), gates, maps)
        return y, maps.new_W, maps.new_S, maps.A

    return torch_step(q, k, v, gates, state, spec, features, mask, write, inplace)


def matrices(state: MemoryState, dtype: torch.dtype, inplace: bool) -> token.Maps:
    """The fast maps of a state for a kernel. Where `inplace`, those to write are the state's own or, the first time, copies of them."""

    def ready(x: Tensor) -> Tensor:
        return x if x.dtype == dtype and x.is_contiguous() else x.to(dtype).contiguous()

    W, S, A = ([ready(x) for x in xs] for xs in (state.weights, state.momentum, state.anchor))
    W0 = token.shared_rows(state.start, state.batch, dtype)
    if not inplace:
        state.own = False
        return token.Maps(W, S, A, W0, [torch.empty_like(w) for w in W], [torch.empty_like(s) for s in S])
    if state.own and state.dtype == dtype:
        A = [a.clone() if a is w else a for a, w in zip(A, W)]
    else:
        W, S, A = ([x.clone() for x in xs] for xs in (W, S, A))
    return token.Maps(W, S, A, W0, W, S)


# Memory -------------------------------------------------------------------------------------------------------------


def unsupported_memory(memory: NeuralMemory) -> str | None:
    """Why the kernel for one token does not compute this kind of layer, or None if it does."""
    return _unsupported_layer(memory.config, type(memory.gating), type(memory.features))


@functools.lru_cache(maxsize=256)
def _unsupported_layer(config: NeuralMemoryConfig, gating: type[nn.Module], features: type) -> str | None:
    spec = config.spec
    if type(spec.loss) not in LOSSES:
        return "one token: the kernel has objectives 'l2' and 'dot'"
    if gating is not Gating:
        return "one token: the kernel has gating='linear'"
    if features not in (NoneType, Monomials):
        return "one token: the kernel has features 'identity' and 'monomials'"
    if config.backend == "torch":
        return "backend='torch'"
    return unsupported_spec(spec) or unsupported_rule(spec)


def _begin_memory(memory: NeuralMemory, x: Tensor, state: MemoryState) -> Begin | None:
    config = memory.config
    x, state = memory.check(x, state)
    check_place(state, x.shape[0])  # the kernel itself compares the matrices
    parts = memory._modules
    gating = memory.gating
    if not is_unmodified(*map(parts.get, MEMORY_PARTS), parts.get("features"), gating, gating.linear):
        return None
    if type(gating.token) not in (NoneType, nn.Linear):
        return None
    parameters = memory_parameters(memory)
    shapes = _shapes.get(memory)
    if shapes is None:
        shapes = _shapes[memory] = _memory_shapes(memory)
    raw = state.window_key, state.window_value, state.window_gate
    if not readable(parameters, shapes, x.dtype) or unsupported_call(x, *raw, state.conv) is not None:
        return None
    T, chunk = x.shape[1], config.chunk_size
    if T > 1 and (not takes_pieces(memory) or state.chunk_offset is None):
        return None

    def begin():
        maps = matrices(state, x.dtype, state.inplace)
        end = (state.chunk_offset or 0) + T
        moves = T > 1 and end > chunk and end % chunk
        anchor = [torch.empty_like(a) for a in maps.A] if moves else maps.A
        call, tail, window = token.layer(x.shape[0], state.conv, raw, parameters, config, maps)

        def after() -> MemoryState:
            final = state.after_token(maps.new_W, maps.new_S, anchor, window, state.inplace, T)
            final.conv = tail
            return final

        call.piece = token.Piece(state.chunk_offset or 0, chunk, anchor if moves else ())
        return call, after

    return begin


def takes_pieces(memory: NeuralMemory) -> bool:
    """Whether a block with this memory may read a piece of several tokens by one call."""
    spec = memory.spec
    return type(spec.update_rule) is GradientDescent and spec.window == 1 and memory.features is None


def memory_parameters(memory: NeuralMemory) -> tuple[Tensor | None, ...]:
    """The parameters that the kernel reads, in its order: qkv, convolution, gates and their offset, the offset of fixed retain, norm,
    norm of the static branch, output gate, out; the features' coefficients, the token gate, its offset, the offset of the decay over
    lags; and the maps of the static branch."""
    part = memory._modules.get  # a third of the time of `memory.conv`, at every token
    qkv, conv, norm, start_norm, gate, out = (
        None if module is None else module._parameters["weight"] for module in map(part, MEMORY_PARTS)
    )
    gating = memory.gating
    gates = gating.linear.weight, gating.offset, gating.retain_offset
    features, token = part("features"), gating.token
    window = (
        None if features is None else features._parameters["log_coefficients_offset"],
        None if token is None else token._parameters["weight"],
        gating.token_offset,
        gating.decay_offset,
    )
    maps = () if start_norm is None or memory.W0 is None else memory.W0._parameters.values()
    return qkv, conv, *gates, norm, start_norm, gate, out, *window, *maps


def _memory_shapes(memory: NeuralMemory) -> tuple[Shape | None, ...]:
    config, spec, H = memory.config, memory.spec, memory.heads
    dim, mixed, values, gates = config.dim, sum(memory.splits), H * spec.value_dim, sum(memory.gating.sizes.values())
    maps = [(H, *shape) for shape in spec.shapes] if config.has_w0_branch and config.learn_w0 else []
    return (
        (mixed, dim),
        (config.conv_width, mixed) if config.conv_width else None,
        (gates, dim),
        (gates,),
        (H,) if config.retain == "fixed" else None,
        (spec.value_dim,),
        (spec.value_dim,) if config.has_w0_branch else None,
        (values, dim) if config.output_gate else None,
        (dim, values),
        None if memory.features is None else (H, spec.degree + 1),
        (H, config.gate_hidden) if "token" in config.gate_parts else None,
        (H,) if "token" in config.gate_parts else None,
        (H,) if "decay" in config.gate_parts else None,
        *maps,
    )


# Attention ----------------------------------------------------------------------------------------------------------


def _begin_attention(attention: Attention, x: Tensor, cache: AttentionCache) -> Begin | None:
    attention.check(x, None, cache, AttentionCache)
    attention.check_cache(cache, 0)
    W, P = attention.window, cache.persistent
    parts = [attention._modules.get(name) for name in ATTENTION_PARTS]
    if W is None or not is_unmodified(*parts):
        return None
    parameters = [None if module is None else module._parameters["weight"] for module in parts]
    shapes = _shapes.get(attention)
    if shapes is None:
        D, rows = attention.head_dim, attention.heads * attention.head_dim
        norm = None if attention.q_norm is None else (D,)
        mixed, conv = rows + 2 * attention.kv_heads * D, attention.conv
        kernel = None if conv is None else (conv.width, mixed)
        shapes = _shapes[attention] = (mixed, attention.dim), norm, norm, (attention.dim, rows), kernel
    if not readable(parameters, shapes, x.dtype):
        return None
    if unsupported_call(x, cache.key, cache.value, cache.conv) is not None:
        return None
    if not cache.position.is_contiguous():
        return None

    def begin():
        key, value = cache.key.contiguous(), cache.value.contiguous()
        if not cache.inplace:
            key, value = key.clone(), value.clone()
        old, tail = (cache.position, key, value), None if cache.conv is None else cache.conv.contiguous()
        call, tail = token.attend(parameters, old, tail, attention.heads, W, P, attention.rope_theta, attention.eps)
        return call, lambda: AttentionCache(
            cache.position + x.shape[1], key, value, W, P, cache.inplace, cache.spare, tail
        )

    return begin


# Block --------------------------------------------------------------------------------------------------------------


def _block(block: ResidualBlock, x: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]] | None:
    parts = block.parts()
    if parts is None or x.numel() > SMALL_NUMEL or not _known(parts):
        return None
    memory, attention, gate, between, first, last, feed = parts
    up, down, gate_modules = feed.gate_up, feed.down, () if gate is None else (gate.module, gate.linear)
    if not is_unmodified(block.mixer, memory, attention, between, first, last, feed, up, down, *gate_modules):
        return None
    norms = first.weight, None if between is None else between.weight, last.weight
    join = () if gate is None else (gate.linear.weight, gate.offset)
    maps, dim, hidden = (up.weight, down.weight), x.shape[-1], feed.hidden
    shapes: list[Shape | None] = [None if norm is None else (dim,) for norm in norms]
    shapes += [] if gate is None else [(gate.heads, dim), (gate.heads,)]
    shapes += [(2 * hidden, dim), (dim, hidden)]
    if not readable((*norms, *join, *maps), shapes, x.dtype):
        return None
    begin = {}
    for name, part in (("memory", memory), ("attention", attention)):
        if part is not None:
            function = _begin(part, x, state[name])
            if function is None:
                return None
            begin[name] = function
    calls, after = {}, {}
    for name, function in begin.items():
        calls[name], after[name] = function()
    eps = first.eps, 0.0 if between is None else between.eps, last.eps
    logit, additive = (0.0, False) if gate is None else (gate.logit, gate.additive)
    piece = calls["memory"].piece if "memory" in calls else token.ONE_TOKEN
    y = token.block(x, norms, eps, join, logit, additive, maps, **calls, piece=piece)
    return None if y is None else (y, {name: after[name]() for name in state})


def _known(parts: BlockParts) -> bool:
    """Whether the kernel knows every part: a part of another kind is computed by torch."""
    memory, attention, _, between, first, last, feed = parts
    if memory is not None and (type(memory) is not NeuralMemory or unsupported_memory(memory) is not None):
        return False
    if attention is not None and type(attention) is not Attention:
        return False
    norms = first, last, *(() if between is None else (between,))
    return type(feed) is SwiGLU and all(type(norm) is RMSNorm for norm in norms)
