"""Everything a memory knows at one moment, of a size that does not depend on how much it has read (but for features "exp")."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .files import read_tensors, write_tensors
from .kv_memory import Pairs
from .spec import MemorySpec
from .state_validation import check_state

FORMAT = "mnemos.memory-state/1"


@dataclass
class MemoryState:
    """Fast weights, momentum, anchor, window buffers and position of B rows.

    weights, momentum, anchor: one (B, H, d_in, d_out) per fast map. The anchor is the weights themselves at a chunk's
    start; momentum is [] where the spec has none. window_*: the last window-1 raw keys, values and gates, zero-filled.
    start: the initial weights W0 in the same shapes, under a retention that keeps them; else [].
    position: (B,) tokens written so far. chunk_offset: position % chunk_size while all rows agree, else None.
    conv: (B, width-1, channels), the tails of a layer's convolution.
    pairs: with features "exp", the first fast map, a list with a pair for every token read; None for all other memories.
    inplace: `step` without gradients may write into this state instead of copying it; set it where nobody else goes on from it.
    own: such a step made the tensors, and no other state holds them; a call that is not in place ends that.
    start_from_file: `start` was read from a file, and no layer has compared it with its own W0 since.
    """

    spec: MemorySpec
    weights: list[Tensor]
    momentum: list[Tensor]
    anchor: list[Tensor]
    window_key: Tensor
    window_value: Tensor
    window_gate: Tensor
    position: Tensor
    chunk_offset: int | None
    conv: Tensor | None = None
    pairs: Pairs | None = None
    inplace: bool = False
    own: bool = False
    start: list[Tensor] = dataclasses.field(default_factory=list)
    start_from_file: bool = False

    @property
    def batch(self) -> int:
        return self.position.shape[0]

    @property
    def heads(self) -> int:
        return self.window_key.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.window_key.dtype

    @property
    def is_kv_cache(self) -> bool:
        """Whether the state grows with every token, as an attention cache does."""
        return self.pairs is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the logical state: the same at every position, unless the state `grows`."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, each with the row as its first axis: what `save` writes."""
        named = {f"weights.{i}": w for i, w in enumerate(self.weights)}
        named |= {f"momentum.{i}": s for i, s in enumerate(self.momentum)}
        named |= {f"anchor.{i}": a for i, a in enumerate(self.anchor)}
        named |= {f"start.{i}": w for i, w in enumerate(self.start)}
        named |= {"window_key": self.window_key, "window_value": self.window_value, "window_gate": self.window_gate}
        named["position"] = self.position
        if self.conv is not None:
            named["conv"] = self.conv
        return named if self.pairs is None else named | self.pairs.tensors()

    def map(self, function: Callable[[Tensor], Tensor]) -> MemoryState:
        """Apply `function` to every tensor; an anchor that is the weights stays the weights."""
        weights = [function(w) for w in self.weights]
        aliased = all(a is w for a, w in zip(self.anchor, self.weights))
        return dataclasses.replace(
            self,
            weights=weights,
            momentum=[function(s) for s in self.momentum],
            anchor=list(weights) if aliased else [function(a) for a in self.anchor],
            window_key=function(self.window_key),
            window_value=function(self.window_value),
            window_gate=function(self.window_gate),
            position=function(self.position),
            conv=None if self.conv is None else function(self.conv),
            pairs=None if self.pairs is None else self.pairs.map(function),
            inplace=False,
            own=False,
            start=[function(w) for w in self.start],
        )

    def _anchor_is_weights(self) -> bool:
        pairs = self.pairs is None or self.pairs.anchor is self.pairs.weight
        return pairs and all(a is w for a, w in zip(self.anchor, self.weights))

    def detach(self) -> MemoryState:
        """The same state cut from the graph that made it (truncated back-propagation)."""
        return self.map(Tensor.detach)

    def clone(self) -> MemoryState:
        """A fork: an independent copy that can go another way."""
        return self.map(Tensor.clone)

    def to(self, target: torch.device | str | torch.dtype) -> MemoryState:
        """Move to a device, or change the floating-point type (float32 or wider)."""
        if isinstance(target, torch.dtype):
            if target not in (torch.float32, torch.float64):
                raise ValueError(f"a memory state is float32 or float64, not {target}")
            return self.map(lambda x: x.to(target) if x.is_floating_point() else x)
        return self.map(lambda x: x.to(target))

    def select(self, rows: Sequence[int] | Tensor) -> MemoryState:
        """Rows by index, in the order given, repeats allowed (beam search, batching)."""
        try:
            index = torch.as_tensor(rows, device=self.position.device)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"rows must be a list of whole numbers, not {type(rows).__name__} {str(rows)[:40]}"
            ) from None
        if index.dim() != 1 or index.numel() == 0:
            raise ValueError("rows must be a non-empty list of row numbers")
        if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise ValueError(
                f"rows must be whole numbers, not {index.dtype}; for a mask give mask.nonzero().squeeze(-1)"
            )
        index = index.to(torch.int64)
        if int(index.min()) < 0 or int(index.max()) >= self.batch:
            raise ValueError(f"rows must lie in 0..{self.batch - 1}, not {index.tolist()}")
        state = self.map(lambda x: x.index_select(0, index))
        return dataclasses.replace(
            state,
            chunk_offset=common_chunk_offset(state.position, self.spec)
            if self.chunk_offset is None
            else self.chunk_offset,
            pairs=None if state.pairs is None else state.pairs.resized(int(state.position.max())),
        )

    @classmethod
    def stack(cls, states: Sequence[MemoryState]) -> MemoryState:
        """One state with the rows of all, in order."""
        if not states:
            raise ValueError("stack needs at least one state")
        lists = [state.pairs for state in states if state.pairs is not None]
        if len(lists) == len(states):
            longest = max(pairs.length for pairs in lists)
            states = [dataclasses.replace(s, pairs=pairs.resized(longest)) for s, pairs in zip(states, lists)]
        first = states[0]
        for other in states[1:]:
            if other.spec != first.spec:
                raise ValueError("stack: the states have different specs")
            if {k: (v.shape[1:], v.dtype, v.device) for k, v in other.tensors().items()} != {
                k: (v.shape[1:], v.dtype, v.device) for k, v in first.tensors().items()
            }:
                raise ValueError("stack: the states differ in heads, convolution, dtype or device")
        chunk_offsets = {state.chunk_offset for state in states}
        aliased = all(state._anchor_is_weights() for state in states)
        parts = [state.tensors() for state in states]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        stacked = _assemble(first.spec, joined, chunk_offsets.pop() if len(chunk_offsets) == 1 else None, aliased)
        stacked.start_from_file = any(state.start_from_file for state in states)
        return stacked

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file with the spec in its header; whole or not at all.

        >>> import tempfile, torch
        >>> from mnemos.memory import MemorySpec, MemoryState
        >>> state = MemorySpec(key_dim=4, value_dim=4).initial_state([torch.randn(2, 4, 16), torch.randn(2, 16, 4)], batch=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state.save(f"{folder}/a.safetensors")
        ...     MemoryState.load(f"{folder}/a.safetensors").heads
        2
        """
        write_tensors(path, self.tensors(), {"format": FORMAT, "spec": self.spec.to_json()})

    @classmethod
    def load(
        cls, path: str | os.PathLike, spec: MemorySpec | None = None, device: torch.device | str = "cpu"
    ) -> MemoryState:
        """Read what `save` wrote. Give `spec` to be sure that the state belongs to your memory."""
        tensors, metadata = read_tensors(path, "memory state", FORMAT, device)
        try:
            saved = MemorySpec.from_json(metadata["spec"])
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as broken:
            raise ValueError(f"{path} has a broken header: {broken!r}") from None
        if spec is not None and spec != saved:
            differing = [
                f"{f.name}={getattr(saved, f.name)!r} (here {getattr(spec, f.name)!r})"
                for f in dataclasses.fields(spec)
                if getattr(saved, f.name) != getattr(spec, f.name)
            ]
            raise ValueError(f"{path} belongs to another memory: {', '.join(differing)}")
        return state_from_tensors(path, saved, tensors)


def state_from_tensors(
    path, spec: MemorySpec, tensors: dict[str, Tensor], heads: int | None = None, conv: tuple[int, int] | None = None
) -> MemoryState:
    """The state of tensors named as `MemoryState.save` names them, after `check_state`; `path` is where they come from."""
    check_state(path, spec, tensors, heads, conv)
    chunk_offset = common_chunk_offset(tensors["position"], spec)
    aliased = chunk_offset == 0 or (spec.is_kv_cache and not spec.depends_on_chunking)
    state = _assemble(spec, tensors, chunk_offset, aliased)
    state.start_from_file = bool(state.start)
    return state


def common_chunk_offset(position: Tensor, spec: MemorySpec) -> int | None:
    """The offset in the chunk of rows at these positions, or None if they differ. Reads the numbers: not under torch.compile."""
    if spec.chunk_size == 1 or torch.compiler.is_compiling():
        return 0 if spec.chunk_size == 1 else None
    chunk_offsets = {t % spec.chunk_size for t in position.tolist()}
    return chunk_offsets.pop() if len(chunk_offsets) == 1 else None


def _assemble(spec: MemorySpec, tensors: dict[str, Tensor], chunk_offset: int | None, aliased: bool) -> MemoryState:
    n = len(spec.shapes)
    weights = [tensors[f"weights.{i}"] for i in range(n)]
    return MemoryState(
        spec=spec,
        weights=weights,
        momentum=[tensors[f"momentum.{i}"] for i in range(n)] if spec.momentum else [],
        anchor=list(weights) if aliased else [tensors[f"anchor.{i}"] for i in range(n)],
        window_key=tensors["window_key"],
        window_value=tensors["window_value"],
        window_gate=tensors["window_gate"],
        position=tensors["position"],
        chunk_offset=chunk_offset,
        conv=tensors.get("conv"),
        pairs=Pairs.of(tensors, aliased) if spec.is_kv_cache else None,
        start=[tensors[f"start.{i}"] for i in range(n)] if spec.retains.keeps_start else [],
    )
