"""`scan`: a whole sequence through the memory, exactly as token by token. And `read`: look up, write nothing.

B batch, T time, H heads, K key dim, V value dim, c window, b chunk size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import check_backend, find
from ..nn.derivatives import refuse_transforms
from .kv_memory import read_pairs
from .spec import Gates, MemorySpec
from .state import MemoryState
from .validation import check_inputs, check_query, check_token


def scan(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    spec: MemorySpec,
    features: Callable[[Tensor], Tensor] | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, MemoryState]:
    """Write the tokens (k, v) into the memory and read it with q, token by token in meaning, in large matmuls in fact.

    q, k: (B, T, H, key_dim), unlifted; v: (B, T, H, value_dim); gates: (B, T, H). q=None writes without reading (y is None).
    With pairs_per_token > 1 in the spec, k and v have that many times the channels, pair after pair.
    features: the feature map of the spec, applied to keys and queries alike; None is the identity.
    mask: (B, T) bool, False tokens are skipped: no write, no step in position, y = 0.
    cu_seqlens: [0, end of document 1, ..., T] for B = 1; the state then has one row per document.
    backend: "torch" everywhere; "cpu", a kernel for CPUs that the machine's own compiler makes at first use, where the memory
    is one it knows (at a chunk's anchor, of a built-in structure); "auto", that one where it can be had.
    Returns y (B, T, H, value_dim) and the state after the last token. The input state is left as it was.

    >>> from mnemos.memory import Gates, MemorySpec, scan
    >>> spec = MemorySpec(key_dim=4, value_dim=4, structure="linear", chunk_size=8)
    >>> q, k, v = torch.randn(3, 2, 20, 1, 4)
    >>> state = spec.initial_state([torch.zeros(1, 4, 4)], batch=2)
    >>> y, state = scan(q, k, v, Gates(lr=torch.full((2, 20, 1), 0.1)), state, spec)
    >>> y.shape, state.position.tolist()
    (torch.Size([2, 20, 1, 4]), [20, 20])
    """
    refuse_transforms("scan")
    check_inputs(q, k, v, gates, state, spec, features, mask, cu_seqlens)
    compute = find("scan", check_backend(backend), k, spec, backend)
    assert compute is not None
    return compute(q, k, v, gates, state, spec, features, mask, cu_seqlens)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    spec: MemorySpec,
    features: Callable[[Tensor], Tensor] | None = None,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, MemoryState]:
    """One token: q, k (B, 1, H, key_dim), v (B, 1, H, value_dim), gates (B, 1, H) -> y (B, 1, H, value_dim), state.

    Equal to `scan` on one token; its cost does not depend on the position, but for features "exp". mask (B, 1): rows that are False are skipped.
    backend: as for `scan`; "cpu" works without gradients only. A state that is `inplace` may be written into, and is then spent.

    >>> from mnemos.memory import Gates, MemorySpec, step
    >>> spec = MemorySpec(key_dim=4, value_dim=4, structure="linear")
    >>> state = spec.initial_state([torch.zeros(1, 4, 4)], batch=2)
    >>> y, state = step(*torch.randn(3, 2, 1, 1, 4), Gates(lr=torch.ones(2, 1, 1)), state, spec)
    >>> y.shape
    torch.Size([2, 1, 1, 4])
    """
    check_token(q, k, v, gates, state, spec, features, mask)
    if spec.is_kv_cache:  # reading the list is the work, for one token as for many
        return scan(q, k, v, gates, state, spec, features, mask, backend=backend)
    compute = find("step", check_backend(backend), k, spec, backend)
    assert compute is not None
    return compute(q, k, v, gates, state, spec, features, mask)


def inner_loss(key: Tensor, value: Tensor, state: MemoryState, spec: MemorySpec, features=None) -> Tensor:
    """Inner loss of tokens at the state's weights, summed over their pairs: (B, T, H). value: as `MemorySpec.loss_value` returns it."""
    losses = [
        spec.loss.loss(prediction, v.to(prediction))
        for k, v in zip(spec.pairs(key), spec.pairs(value))
        for prediction in [read(k, state, spec, features)]
    ]
    return sum(losses[1:], losses[0])


def read(q: Tensor, state: MemoryState, spec: MemorySpec, features: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """M(q; W) at the state's weights, for q (B, T, H, key_dim) -> (B, T, H, value_dim). Writes nothing.

    >>> from mnemos.memory import MemorySpec, read
    >>> spec = MemorySpec(key_dim=4, value_dim=3, structure="linear")
    >>> read(torch.randn(2, 5, 1, 4), spec.initial_state([torch.ones(1, 4, 3)], batch=2), spec).shape
    torch.Size([2, 5, 1, 3])
    """
    check_query(q, state, spec, features)
    wide = q.to(torch.promote_types(q.dtype, state.dtype))
    lifted = (wide if features is None else features(wide)).transpose(1, 2)  # B H T F
    if state.pairs is not None:
        y = read_pairs(lifted, state, spec, features)
    else:
        y = spec.network.forward(lifted, lambda i, x: x @ state.weights[i].to(x.dtype))
    y = y.transpose(1, 2)
    return (y + wide if spec.has_residual else y).to(q.dtype)


@dataclass
class Trace:
    """A record of one call of a `NeuralMemory`, token by token, cut from the graph: for inspection, not for training. Masked tokens have surprise and norms 0.

    surprise: (B, T, H), the inner loss of each token at the anchor, before it is written.
    gradient_norm: (B, T, H), momentary surprise: Frobenius norm, over all fast maps, of the token's gradient, summed over its window
    and before lr. momentum_norm: (B, T, H), past surprise: the same norm of the accumulator after the token.
    lr, momentum, retain, gate: (B, T, H), the gates as used (momentum 0, retain 1, gate 1 where the memory has none).
    weight_norms: (B, P, H, maps), Frobenius norm of every fast map after the first ends[0], ends[1], … tokens of the call:
    wherever a row ends a chunk, and at the end.
    """

    surprise: Tensor
    gradient_norm: Tensor
    momentum_norm: Tensor
    lr: Tensor
    momentum: Tensor
    retain: Tensor
    gate: Tensor
    weight_norms: Tensor
    ends: list[int]
