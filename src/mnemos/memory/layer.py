"""`NeuralMemory`: a memory as a layer, (B, T, dim) in and out, with its state explicit.

Shapes: B batch, T time, H heads, K key dim, V value dim, N documents of a packed row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..deprecation import current_names, old_names
from ..dispatch import decode, find, is_unmodified, load, operation
from ..nn.conv import CausalConv1d, causal_conv
from ..nn.derivatives import recomputed, refuse_transforms
from ..nn.linear import Linear
from ..nn.norm import RMSNorm, rms_norm
from .config import GATINGS, NeuralMemoryConfig, check_fields
from .features import Exp, make_features
from .gating import momentum_since_commit
from .initial_weights import draw_w0, initial_weights
from .scan import Trace, read, scan, step
from .spec import Gates, MemorySpec
from .state import MemoryState, check_owner
from .validation import NotFiniteError, NoValuesError, as_boundaries, blame, check_cu_seqlens, check_mask, describe

START_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative, of a start that was rounded to these types
Norms = tuple[tuple[float, float], ...]  # for q, k and v: alpha and epsilon of s / sqrt(alpha Σ s² + epsilon)


class NeuralMemory(nn.Module):
    """A layer whose memory learns at test time. x (B, T, dim) -> y (B, T, dim), and the state to resume from.

    q, k, v projections → causal convolution → SiLU → norm of q, k → memory per head → RMS norm → output gate → projection.
    Takes the fields of `NeuralMemoryConfig` as keywords, or a config (and keywords that override it).
    Train, prefill, stream and decode as you like: any split of a sequence into calls gives the same outputs and state.

    >>> mem = NeuralMemory(dim=32, heads=2, chunk_size=8)
    >>> x = torch.randn(2, 20, 32)
    >>> y, state = mem(x)                          # write and read, causally
    >>> first, state = mem(x[:, :13])
    >>> second, state = mem(x[:, 13:], state)      # goes on exactly where it stopped
    >>> y.shape, torch.allclose(y, torch.cat([first, second], 1), atol=1e-5)
    (torch.Size([2, 20, 32]), True)
    """

    def __init__(self, dim: int | NeuralMemoryConfig, **fields):
        super().__init__()
        load()
        check_fields(fields)
        if isinstance(dim, NeuralMemoryConfig):
            fields = current_names("NeuralMemory", fields, old_names(NeuralMemoryConfig))
            config = dataclasses.replace(dim, **fields) if fields else dim
        else:
            config = NeuralMemoryConfig(dim, **fields)
        self.config = config
        self.spec: MemorySpec = config.spec
        self.heads = H = config.head_count
        self.splits = config.splits
        self.qkv = Linear(config.dim, sum(self.splits), bias=False)
        self._channels_of_gates = config.conv_channels - sum(self.splits)  # of the convolution
        self.conv = CausalConv1d(config.conv_channels, config.conv_width) if config.conv_width else None
        self.gating = GATINGS[config.gating](config)
        self.features = make_features(self.spec, H)
        if self.spec.is_kv_cache and config.qk_norm != "l2":
            self.features = Exp(self.spec.key_dim, H, key_norm=self.spec.key_dim**0.5)
        self.W0 = nn.ParameterList(torch.empty(H, *shape) for shape in self.spec.shapes) if config.learn_w0 else None
        self.norm = RMSNorm(self.spec.value_dim, config.eps)
        self.start_norm = RMSNorm(self.spec.value_dim, config.eps) if config.has_w0_branch else None
        self.output_gate = Linear(config.dim, H * self.spec.value_dim, bias=False) if config.output_gate else None
        self.out = Linear(H * self.spec.value_dim, config.dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_w0(self.spec, list(self.W0 or ()))

    def initial_state(self, batch: int) -> MemoryState:
        """The state before the first token of `batch` rows (or, with cu_seqlens, documents)."""
        like = self.qkv.weight
        if self.W0 is None:
            start = [like.new_zeros(self.heads, *shape) for shape in self.spec.shapes]
        else:
            start = initial_weights(self.config, list(self.W0))
        state = self.spec.initial_state(start, batch, *(() if start else (self.heads, like.dtype, like.device)))
        return state if self.conv is None else dataclasses.replace(state, conv=self.conv.initial_tail(batch))

    def forward(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        trace: bool = False,
        ns_steps: int | None = None,
        write_mask: Tensor | None = None,
        kv: Tensor | None = None,
    ) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Trace]:
        """Write x (B, T, dim) and read it, token by token in meaning.

        mask: (B, T) bool; False tokens are skipped and their y is 0. cu_seqlens: (N+1,) boundaries of the documents packed
        in a single row; the state then has N rows. trace=True also returns a `Trace`. ns_steps: Newton–Schulz iterations of this
        call alone (rule "muon"); the state continues under the layer's own.
        write_mask: (B, T) bool; False tokens are read, but their gradient is not written, neither at their position nor later as a part of
        another token's window. Time passes: decay, momentum, commits, position and convolution advance.
        kv: (B, T, dim), the input of keys, values and gates instead of x; queries and output gate are those of x.
        """
        return self._call(x, state, mask, cu_seqlens, ns_steps, write_mask, kv, trace)

    def _call(self, x: Tensor, state: MemoryState | None, mask, *options, reads: bool = True) -> Any:
        """`forward`, or `write`; errors name the input that is to blame."""
        if torch.compiler.is_compiling():
            return self._run(x, state, mask, *options, reads=reads)
        try:
            return self._run(x, state, mask, *options, reads=reads)
        except (NotFiniteError, NoValuesError, RuntimeError) as wrong:
            kv = options[3]
            blame(self, wrong, {"x": x} if kv is None else {"x": x, "kv": kv}, mask)
            raise

    def _run(self, x: Tensor, state, mask, cu_seqlens, ns_steps, write_mask, kv, trace: bool, reads: bool) -> Any:
        cu_seqlens = None if cu_seqlens is None else as_boundaries(cu_seqlens)
        x, state = self.check(x, state, mask, cu_seqlens)
        kv = self._check_kv(kv, x, mask)
        spec = self.spec if ns_steps is None else self.spec.with_ns_steps(ns_steps)
        whole = mask is None and cu_seqlens is None and write_mask is None and kv is None and ns_steps is None
        if x.shape[1] == 1 and whole and reads and not trace:
            done = decode(self, x, state, self.config.backend)
            if done is not None:
                return done
        q, k, v, tail = self.project(x, state, mask, cu_seqlens, kv)
        gates = self.gates(x if kv is None else kv, state, mask, cu_seqlens, write_mask)
        record, before = None, state
        if trace:
            if cu_seqlens is not None:
                raise ValueError(
                    "trace=True cannot be combined with cu_seqlens; run the documents as a batch, with a mask"
                )
            position = _positions(x, state, mask, None)
            traced_scan = find("traced_scan", "torch")
            assert traced_scan is not None
            y, state, record = traced_scan(q, k, v, gates, state, spec, self.features, mask, position)
        elif x.shape[1] == 1 and reads and cu_seqlens is None and not torch.is_grad_enabled():
            y, state = step(q, k, v, gates, state, spec, self.features, mask, self.config.backend)
        else:
            read_by = q if reads else None
            y, state = scan(read_by, k, v, gates, state, spec, self.features, mask, cu_seqlens, self.config.backend)
        opened = self.read_gate(x, before, mask, cu_seqlens) if reads else None
        state = dataclasses.replace(state, conv=tail)
        if not reads:
            return state
        y = self._output(y if opened is None else y * opened.unsqueeze(-1), q, x)
        if mask is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling() and not mask.any():
            y = y + sum(p.flatten()[:0].sum() for p in self.parameters())  # 0: DDP waits for every parameter's gradient
        return (y, state) if record is None else (y, state, record)

    def read(self, x: Tensor, state: MemoryState) -> Tensor:
        """Look up with x (B, T, dim), as if it came next, without writing it: -> (B, T, dim). The state stays as it is.

        >>> mem = NeuralMemory(dim=32, heads=2)
        >>> mem.read(torch.randn(1, 3, 32), mem.write(torch.randn(1, 100, 32))).shape
        torch.Size([1, 3, 32])
        """
        if state is None:
            raise ValueError("read needs a state: what mem(x) or mem.write(x) returned, or mem.initial_state(batch)")
        x, state = self.check(x, state, None, None)
        q, opened = self.project(x, state, None, None)[0], self.read_gate(x, state, None, None)
        y = read(q, state, self.spec, self.features)
        return self._output(y if opened is None else y * opened.unsqueeze(-1), q, x)

    def write(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        ns_steps: int | None = None,
        write_mask: Tensor | None = None,
    ) -> MemoryState:
        """Memorise x (B, T, dim) without reading: the state `forward` would return, for less work."""
        return self._call(x, state, mask, cu_seqlens, ns_steps, write_mask, None, False, reads=False)

    def project(
        self, x: Tensor, state: MemoryState, mask, cu_seqlens, kv: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k (B, T, H, K), v (B, T, H, V) and the convolution's new tail. kv: the input of k and v, if it is not x.

        With pairs_per_token > 1, k and v have the channels of all pairs of a token, pair after pair.
        """
        mixed, tail = self.qkv(x), None
        if kv is not None:
            mixed = torch.cat([mixed[..., : self.splits[0]], self.qkv(kv)[..., self.splits[0] :]], -1)
        shape = self.heads, tuple(n // self.heads for n in self.splits), self._norms()
        pairs, own = self.spec.pairs_per_token, self._channels_of_gates
        if mask is None and cu_seqlens is None and is_unmodified(self.conv) and pairs == 1 and not own:
            weight = None if self.conv is None else self.conv.checked_weight()
            return project_heads(mixed, state.conv, weight, *shape, backend=self.config.backend)
        if own:
            hidden = self.gating.hidden(x)
            mixed = torch.cat([mixed, hidden.to(mixed.dtype)], dim=-1)
        if self.conv is not None:
            mixed, tail = self.conv(mixed, state.conv, mask, cu_seqlens)
            mixed = mixed[..., : sum(self.splits)]
        return *activate(mixed, *shape, pairs), tail

    def _norms(self) -> tuple[tuple[float, float], ...]:
        """(alpha, epsilon) for q, k and v: each head s becomes s / sqrt(alpha Σ s² + epsilon), as `activate` takes them."""
        config, bound = self.config, self.config.value_bound
        keys = {"l2": (1.0, config.eps), "rms": (1 / self.spec.key_dim, config.eps)}.get(config.qk_norm, (0.0, 1.0))
        return keys, keys, (0.0, 1.0) if bound is None else (bound**-2, 1.0)

    def gates(self, x: Tensor, state: MemoryState, mask, cu_seqlens, write_mask: Tensor | None = None) -> Gates:
        hidden = self._hidden_of_gates(x, state, mask, cu_seqlens)
        gates = self.gating(x) if hidden is None else self.gating(x, hidden)
        accumulates = self.spec.commits and self.spec.momentum and self.spec.update_rule.momentum_gate
        if accumulates and not self.config.momentum:
            position = _positions(x, state, mask, cu_seqlens)
            gates.momentum = momentum_since_commit(position, self.spec.commit, gates.lr)
        if write_mask is None:
            return gates
        check_mask("write_mask", write_mask, x)
        return gates.masked(write_mask, self.spec.window)

    def read_gate(self, x: Tensor, state: MemoryState, mask, cu_seqlens) -> Tensor | None:
        """(B, T, H), the factor of what each token of x (B, T, dim) reads; None: 1, as for gatings without such a gate."""
        hidden = self._hidden_of_gates(x, state, mask, cu_seqlens)
        return None if hidden is None else self.gating.stretched(self.gating.read_logits(hidden).sigmoid())

    def _hidden_of_gates(self, x: Tensor, state: MemoryState, mask, cu_seqlens) -> Tensor | None:
        """The gating's channels behind the convolution: (B, T, ·). None for a gating that has none."""
        own = self._channels_of_gates
        if not own or self.conv is None or state.conv is None:
            return None
        weight, tail = self.conv.checked_weight()[:, -own:], state.conv[..., -own:]
        hidden = self.gating.hidden(x)
        return causal_conv(hidden, weight, tail, mask, cu_seqlens)[0]

    def _output(self, y: Tensor, q: Tensor, x: Tensor) -> Tensor:
        """y (B, T, H, V), as q (B, T, H, K) read it from the memory -> (B, T, dim)."""
        gate = None if self.output_gate is None else self.output_gate(x).view(y.shape)
        z = self._normed(self.norm, y, gate)
        if self.start_norm is not None:
            z = z + self._normed(self.start_norm, self._read_w0(q), gate)
        return self.out(z.flatten(2))

    def _normed(self, norm: RMSNorm, y: Tensor, gate: Tensor | None) -> Tensor:
        if is_unmodified(norm):
            return rms_norm(y, norm.weight, norm.eps, gate, backend=self.config.backend)
        return norm(y) if gate is None else norm(y) * F.silu(gate)

    def _read_w0(self, q: Tensor) -> Tensor:
        """What the learned start says of q (B, T, H, K), whatever was written since: -> (B, T, H, V)."""
        lifted = (q if self.features is None else self.features(q)).transpose(1, 2)  # B H T F
        maps, kind = tuple(self.W0 or ()), q.device.type
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # meta has none
        low = torch.get_autocast_dtype(kind) if autocast else q.dtype

        def network(x: Tensor, *maps: Tensor) -> tuple[Tensor]:
            return (self.spec.network.forward(x.to(low), lambda i, x: x @ maps[i].to(low)),)

        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        (y,) = recomputed(network, lifted, *maps) if again else network(lifted, *maps)
        y = y.transpose(1, 2)
        return y + q if self.spec.has_residual else y

    @torch.no_grad()
    def _with_checked_start(self, state: MemoryState) -> MemoryState:
        """Raise a ValueError if a state from a file decays towards initial weights that are not this layer's."""
        for i, (found, own) in enumerate(zip(state.start, self.initial_state(1).start)):
            own = own.to(found)
            distance, size = (found - own).flatten(1).norm(dim=1).max().item(), own.norm().item()
            if not distance <= START_TOLERANCE.get(self.qkv.weight.dtype, 1e-4) * size:
                raise ValueError(
                    f"state comes from a file and forgets towards initial weights that are not this layer's (map {i} differs by "
                    f"{distance:.3g}, its norm is {size:.3g}): load the layer's own weights, or begin with state=None"
                )
        return dataclasses.replace(state, start_from_file=False)

    def check(
        self, x: Tensor, state: MemoryState | None = None, mask=None, cu_seqlens=None
    ) -> tuple[Tensor, MemoryState]:
        """Refuse what does not fit, in words; fill in the state; blank masked tokens, which may hold anything."""
        refuse_transforms("NeuralMemory")
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.config.dim or 0 in x.shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"x has shape {got}, but (batch, time, dim={self.config.dim}) with at least one token is expected"
            )
        dtype = self.out.weight.dtype
        if not x.is_floating_point() or (x.dtype != dtype and not torch.is_autocast_enabled(x.device.type)):
            raise ValueError(
                f"x has type {x.dtype}, but the layer's parameters are {dtype}; convert one, or use torch.autocast"
            )
        if cu_seqlens is not None and (x.shape[0] != 1 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2):
            raise ValueError("cu_seqlens must be a vector [0, end of document 1, …, T] for an x of batch 1")
        rows = x.shape[0] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, 1, x.shape[1])
        if state is None:
            state = self.initial_state(rows)
        else:
            check_owner(state, self.spec, rows, self.heads, x.device, "the layer")
        if state.start_from_file and not torch.compiler.is_compiling():
            state = self._with_checked_start(state)
        tail = None if self.conv is None else (rows, self.conv.width - 1, self.conv.channels)
        if (None if state.conv is None else tuple(state.conv.shape)) != tail:
            raise ValueError("state has convolution tails that do not fit conv_width, heads or dims of this layer")
        if mask is not None:
            check_mask("mask", mask, x)
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        return x, state

    def _check_kv(self, kv: Tensor | None, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """kv with masked tokens blanked. Raises a ValueError unless it is a tensor such as x."""
        if kv is None:
            return None
        if self._channels_of_gates:
            raise ValueError(f"gating={self.config.gating!r} has gates of reads from the input of writes: leave out kv")
        if not isinstance(kv, Tensor) or kv.shape != x.shape or kv.dtype != x.dtype:
            raise ValueError(f"kv {describe(kv)}, but must have the shape and dtype of x, which {describe(x)}")
        return kv if mask is None else kv.masked_fill(~mask.unsqueeze(-1), 0.0)


def _positions(x: Tensor, state: MemoryState, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Position of every token in its own row (or document), counting valid tokens from the state's: (B, T)."""
    B, T = x.shape[:2]
    valid = torch.ones(B, T, dtype=torch.int64, device=x.device) if mask is None else mask.to(torch.int64)
    before = valid.cumsum(1) - valid  # valid tokens before t
    if cu_seqlens is None:
        return state.position.unsqueeze(1) + before
    bounds = cu_seqlens.to(device=x.device, dtype=torch.int64)
    document = torch.searchsorted(bounds[1:].contiguous(), torch.arange(T, device=x.device), right=True)
    document = document.clamp(max=len(bounds) - 2)
    return state.position[document].unsqueeze(0) + before - before[:, bounds[document]]


@operation
def project_heads(
    x: Tensor, tail: Tensor | None, weight: Tensor | None, heads: int, dims: tuple[int, ...], norms: Norms
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x (B, T, C) -> q, k, v (B, T, H, ·), and the convolution's new tail.

    tail (B, width-1, C) and weight (width, C) of the convolution, or None and None. dims: of a head's q, k and v.
    """
    if weight is not None:
        x, tail = causal_conv(x, weight, tail)
    return *activate(x, heads, dims, norms), tail


def activate(
    x: Tensor, heads: int, dims: tuple[int, ...], norms: Norms, pairs: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """SiLU and norms: x (B, T, C) -> q, k, v (B, T, H, ·). Elementwise work, cheaper to recompute than to keep.

    pairs: of keys and values of a head, each with a norm of its own.
    """

    def function(x: Tensor) -> tuple[Tensor, ...]:
        parts = F.silu(x).split([heads * dim for dim in dims], dim=-1)
        counts = heads, heads * pairs, heads * pairs
        vectors = (part.unflatten(-1, (count, -1)) for part, count in zip(parts, counts))
        return tuple(_normalize(s, *norm).flatten(-2).unflatten(-1, (heads, -1)) for s, norm in zip(vectors, norms))

    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return recomputed(function, x)
    return function(x)  # ty: ignore[invalid-explicit-return]


def _normalize(s: Tensor, alpha: float, epsilon: float) -> Tensor:
    if alpha == 0.0:
        return s
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    return (wide * torch.rsqrt(alpha * wide.square().sum(-1, keepdim=True) + epsilon)).to(s.dtype)
