"""A layer computed by `reference_scan`, and comparisons of a layer with it in outputs, state and every gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from helpers import assert_close_rms
from mnemos.memory import MemoryState, NeuralMemory, reference_scan


def reference(monkeypatch) -> None:
    """Layers compute by `reference_scan` from here on, to the end of the monkeypatch's context."""

    def scan(q, k, v, gates, state, spec, features=None, mask=None, cu_seqlens=None, backend="auto"):
        return reference_scan(q, k, v, gates, state, spec, features, mask, cu_seqlens)

    monkeypatch.setattr("mnemos.memory.layer.scan", scan)
    monkeypatch.setattr("mnemos.memory.layer.decode", lambda *_: None)


def assert_states_close(a: MemoryState, b: MemoryState, tol: float = 1e-10) -> None:
    left, right = a.tensors(), b.tensors()
    assert left.keys() == right.keys()
    assert (a.spec, a.chunk_offset) == (b.spec, b.chunk_offset)
    for name in left:
        assert_close_rms(left[name], right[name], tol, name)


def gradients(mem: NeuralMemory, y: Tensor, state: MemoryState, *inputs: Tensor) -> dict[str, Tensor]:
    """Gradients of a random functional of the output and the final state, by the inputs and all parameters."""
    g = torch.Generator().manual_seed(7)
    parts = [y, *(x for x in state.tensors().values() if x.is_floating_point())]
    total = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x)).sum() for x in parts)
    leaves = dict(mem.named_parameters()) | {f"input {i}": x for i, x in enumerate(inputs)}
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True, allow_unused=True)
    return dict(zip(leaves, found))


def assert_is_the_reference(mem: NeuralMemory, monkeypatch, x: Tensor, tol: float = 1e-10, **options) -> None:
    """mem(x, **options) by the engine and by the reference: outputs, state, gradients of x, of `kv` and of every parameter."""
    inputs = [t.requires_grad_() for t in (x, options.get("kv")) if t is not None]
    y, state = mem(x, **options)
    found = gradients(mem, y, state, *inputs)
    with monkeypatch.context() as patched:
        reference(patched)
        expected, end = mem(x, **options)
        wanted = gradients(mem, expected, end, *inputs)
    assert_close_rms(y, expected, tol, "y")
    assert_states_close(state, end, tol)
    for name, gradient in wanted.items():
        assert_close_rms(found[name], gradient, tol, f"gradient of {name}")


def token_by_token(mem: NeuralMemory, x: Tensor, **timed: Tensor) -> tuple[Tensor, MemoryState]:
    """mem(x) one token at a time without gradients, with its options (B, T, ...) cut alike."""
    state, parts = None, []
    with torch.no_grad():
        for t in range(x.shape[1]):
            y, state = mem(x[:, t : t + 1], state, **{name: o[:, t : t + 1] for name, o in timed.items()})
            parts.append(y)
    assert state is not None
    return torch.cat(parts, 1), state


def in_calls(mem: NeuralMemory, x: Tensor, lengths: list[int], **timed: Tensor) -> tuple[Tensor, MemoryState]:
    """mem(x) in calls of these lengths."""
    state, parts = None, []
    cut = {name: option.split(lengths, 1) for name, option in timed.items()}
    for i, part in enumerate(x.split(lengths, 1)):
        y, state = mem(part, state, **{name: pieces[i] for name, pieces in cut.items()})
        parts.append(y)
    assert state is not None
    return torch.cat(parts, 1), state
