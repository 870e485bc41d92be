"""The oracle: section 2 of the theory as a token loop, with every gradient taken by autograd. Slow and obviously right."""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_memory import Pairs
from .rules import norm_factor
from .spec import Gates, MemorySpec
from .state import MemoryState


def reference_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    spec: MemorySpec,
    features=None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, MemoryState]:
    """Same arguments and results as `scan`; see there."""
    B, T = k.shape[:2]
    if cu_seqlens is None:
        rows = [[(b, t) for t in range(T) if mask is None or bool(mask[b, t])] for b in range(B)]
    else:
        ends = cu_seqlens.tolist()
        rows = [
            [(0, t) for t in range(start, stop) if mask is None or bool(mask[0, t])]
            for start, stop in zip(ends, ends[1:])
        ]

    sources = [q, k, v, *vars(gates).values(), *state.tensors().values(), *getattr(features, "parameters", list)()]
    tracking = torch.is_grad_enabled() and any(x.requires_grad for x in sources if x is not None)
    outputs: dict[tuple[int, int], Tensor] = {}
    finals: list[MemoryState] = []
    with torch.inference_mode(False), torch.enable_grad():
        q, k, v, gates, state = _usable(q), _usable(k), _usable(v), gates.map(_usable), state.map(_usable)
        gates.decay = None if gates.decay is None else _usable(gates.decay)
        for row, tokens in enumerate(rows):
            memory = _Row(state, row, spec, features, k.dtype)
            for b, t in tokens:
                token_gates = gates.map(lambda x, b=b, t=t: x[b, t])
                outputs[b, t] = memory.token(q[b, t], k[b, t], v[b, t], token_gates)
            finals.append(memory.state())
        zero = v.new_zeros(v.shape[2], spec.value_dim)
        y = torch.stack([torch.stack([outputs.get((b, t), zero) for t in range(T)]) for b in range(B)])
        final = MemoryState.stack(finals)
        final.conv = state.conv
    return (y, final) if tracking else (y.detach(), final.detach())


def _usable(x: Tensor) -> Tensor:
    """x, or a copy of it where it was made in inference mode, which autograd refuses to save."""
    return x.clone() if x.is_inference() else x


class _Row:
    """One row of the batch: H independent memories that read one token at a time."""

    def __init__(self, state: MemoryState, row: int, spec: MemorySpec, features, dtype):
        self.spec, self.source, self.features = spec, state, features
        self.wide = torch.promote_types(dtype, state.dtype)
        self.W = [w[row].to(self.wide) for w in state.weights]
        self.S = [s[row].to(self.wide) for s in state.momentum] or [torch.zeros_like(w) for w in self.W]
        self.A = [a[row].to(self.wide) for a in state.anchor]
        self.start = [w[row].to(self.wide) for w in state.start]
        self.forget_towards: list[Tensor | float] = [*self.start] or [0.0] * len(self.W)
        self.position = int(state.position[row])
        self.keys = list(state.window_key[row].to(self.wide))
        self.values = list(state.window_value[row].to(self.wide))
        self.gates = list(state.window_gate[row].to(self.wide))
        if state.pairs is not None:  # the first map is a list: (H, tokens, outputs), and their lifted keys
            pairs = state.pairs.map(lambda x: x[row, : self.position].transpose(0, 1).to(self.wide))
            self.listed = pairs.key
            self.W.insert(0, pairs.weight)
            self.S.insert(0, torch.zeros_like(pairs.weight) if pairs.momentum is None else pairs.momentum)
            self.A.insert(0, pairs.anchor)
            self.forget_towards.insert(0, 0.0)

    def network(self, x: Tensor, weights: list[Tensor], probe: Tensor | None = None) -> Tensor:
        """M(x; weights) for x (H, D). probe: added to what the first map puts out."""

        def fast(i: int, z: Tensor) -> Tensor:
            if i == 0 and self.spec.is_kv_cache:
                z = self.kernel(z)
            z = (z.unsqueeze(-2) @ weights[i]).squeeze(-2)
            return z if i or probe is None else z + probe

        lifted = x if self.features is None else self.features(x)
        y = self.spec.network.forward(lifted, fast)
        return y + x if self.spec.has_residual else y

    def loss(self, keys: Tensor, values: Tensor, weights: list[Tensor], probe: Tensor | None) -> Tensor:
        """The inner loss of one token, over all its pairs: (H,)."""
        total = torch.zeros(len(keys), dtype=self.wide, device=keys.device)
        for key, value in zip(self.spec.pairs(keys), self.spec.pairs(values)):
            if self.spec.normalize:
                value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
            total = total + self.spec.loss.loss(self.network(key, weights, probe), value)
        return total

    def kernel(self, x: Tensor) -> Tensor:
        """φ*(x)·φ*(k) for all keys k of the list: (H, K) -> (H, tokens)."""
        scores = (self.listed @ x.unsqueeze(-1)).squeeze(-1)
        offset = getattr(self.features, "offset", None)
        return (scores if offset is None else scores + offset.unsqueeze(-1)).exp()

    def read(self, q: Tensor, weights: list[Tensor]) -> Tensor:
        y = self.network(q, weights)
        if not self.spec.normalize:
            return y
        y, total = y[..., :-1], y[..., -1:]
        return torch.where(total > 0, y / torch.where(total > 0, total, 1.0), 0.0)

    def token(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> Tensor:
        spec = self.spec
        one, zero = torch.ones_like(gates.lr), torch.zeros_like(gates.lr)
        retain = one if gates.retain is None else gates.retain
        momentum = zero if gates.momentum is None else gates.momentum
        self.keys.append(k.to(self.wide))
        self.values.append(spec.loss_value(v.to(self.wide), gates))
        self.gates.append((one if gates.gate is None else gates.gate).to(self.wide))
        if spec.is_kv_cache:
            self.listed = torch.cat([self.listed, self.lift(k).unsqueeze(1)], 1)
            self.W, self.S, self.A = (
                [torch.nn.functional.pad(x[0], (0, 0, 0, 1)), *x[1:]] for x in (self.W, self.S, self.A)
            )
        before = self.W
        if spec.anchor == "token":
            self.A = self.decayed(retain) if spec.decay_first else self.W
        elif not spec.depends_on_chunking or self.position % spec.chunk_size == 0:
            self.A = self.W

        # G: gradient at the anchor of the window's weighted loss
        A = [a if a.requires_grad else a.detach().requires_grad_() for a in self.A]
        # a gradient with respect to φ*(k)ᵀ δ is δ: that of what is added to the first map's output for k
        probes = torch.zeros_like(A[0]).requires_grad_() if spec.is_kv_cache else None
        leaves, losses = A if probes is None else [probes, *A[1:]], []
        for lag in range(spec.window):
            weight = self.gates[-1 - lag]
            if gates.decay is not None:
                weight = weight * gates.decay**lag
            if gates.lag is not None:
                weight = weight * gates.lag[..., lag]
            probe = None if probes is None or lag > self.position else probes[:, self.position - lag]
            losses.append((weight, self.loss(self.keys[-1 - lag], self.values[-1 - lag], A, probe)))
        if spec.max_grad_norm is None:
            G = _gradient(sum((weight * loss).sum() for weight, loss in losses), leaves)
        else:  # each token's gradient by itself
            parts = [_clipped(weight, _gradient(loss.sum(), leaves), spec.max_grad_norm) for weight, loss in losses]
            G = [torch.stack(part).sum(0) for part in zip(*parts)]

        if spec.commits:
            roles = spec.update_rule.roles(gates, spec)
            pull = G if roles.strength is None else [_per_head(roles.strength, g) for g in G]
            kept = zero if roles.momentum is None else roles.momentum
            self.S = [_per_head(kept, s) - g for s, g in zip(self.S, pull)]
            self.W = self.W if roles.retain is None else self.decayed(roles.retain)
            if (self.position + 1) % spec.commit == 0:
                along = [_per_head(kept, s) - g for s, g in zip(self.S, pull)] if spec.nesterov else self.S
                assert roles.rate is not None
                rate = roles.rate[:, None, None]
                self.W = [spec.update_rule.commit(w, s, rate, spec) for w, s in zip(self.W, along)]
        else:
            self.S = [_per_head(momentum, s) - _per_head(gates.lr, g) for s, g in zip(self.S, G)]
            self.W = [w + s for w, s in zip(self.decayed(retain), self.S)]
        self.position += 1
        self.keys, self.values, self.gates = (
            x[len(x) - spec.window + 1 :] for x in (self.keys, self.values, self.gates)
        )
        return self.read(q.to(self.wide), self.W if spec.read == "after" else before).to(v.dtype)

    def decayed(self, retain: Tensor) -> list[Tensor]:
        return [w0 + _per_head(retain, w - w0) for w, w0 in zip(self.W, self.forget_towards)]

    def lift(self, x: Tensor) -> Tensor:
        x = x.to(self.wide)
        return x if self.features is None else self.features(x)

    def state(self) -> MemoryState:
        spec, like = self.spec, self.source
        aligned = not spec.depends_on_chunking or self.position % spec.chunk_size == 0

        def window(items: list[Tensor], template: Tensor) -> Tensor:
            return torch.stack(items).unsqueeze(0) if items else template.new_zeros(1, *template.shape[1:])

        weights, momentum, anchor = ([x.unsqueeze(0) for x in xs] for xs in (self.W, self.S, self.A))
        anchor = list(weights) if aligned else anchor
        pairs = None
        if spec.is_kv_cache:
            first = [xs.pop(0).transpose(1, 2) for xs in (weights, momentum, anchor)]
            key, held = self.listed.unsqueeze(0).transpose(1, 2), first[1] if spec.momentum else None
            pairs = Pairs(key, first[0], held, first[0] if aligned else first[2])
        return MemoryState(
            spec=like.spec,
            weights=weights,
            momentum=momentum if spec.momentum else [],
            anchor=anchor,
            window_key=window(self.keys, like.window_key),
            window_value=window(self.values, like.window_value),
            window_gate=window(self.gates, like.window_gate),
            position=like.position.new_tensor([self.position]),
            chunk_offset=self.position % spec.chunk_size,
            pairs=pairs,
            start=[w.unsqueeze(0) for w in self.start],
        )


def _gradient(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    gradients = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves)]


def _clipped(weight: Tensor, gradients: list[Tensor], bound: float) -> list[Tensor]:
    """weight (H,) times the gradients of one token, whose norm over all maps is shortened to `bound`."""
    squared = torch.stack([g.square().sum((-2, -1)) for g in gradients]).sum(0)
    return [_per_head(weight * norm_factor(squared, bound), g) for g in gradients]


def _per_head(gate: Tensor, w: Tensor) -> Tensor:
    return gate[:, None, None] * w  # (H,) * (H, d_in, d_out)
