"""Everything a memory knows at one moment, of a size that does not depend on how much it has read (but for features "exp")."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..nn.cache import Rows
from .files import read_tensors, write_tensors
from .kv_memory import Pairs
from .spec import MemorySpec
from .state_validation import check_state

FORMAT = "mnemos.memory-state/1"


@dataclass
class MemoryState(Rows):
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
    def heads(self) -> int:
        return self.window_key.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.window_key.dtype

    @property
    def is_kv_cache(self) -> bool:
        """Whether the state grows with every token, as an attention cache does."""
        return self.pairs is not None

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

    def map(self, function: Callable[..., Tensor], *others: MemoryState) -> MemoryState:
        """Apply `function` to every tensor (and to those of the same name in `others`); an anchor that is the weights stays the weights."""
        aliased = all(state._anchor_is_weights() for state in (self, *others))
        named = [state.tensors() for state in (self, *others)]
        names = (name for name in named[0] if not (aliased and name.startswith(("anchor.", "pairs.anchor"))))
        mapped = {name: function(*(tensors[name] for tensors in named)) for name in names}
        state = _assemble(self.spec, mapped, self.chunk_offset, aliased)
        state.start_from_file = self.start_from_file
        return state

    def with_tensors(self, tensors: dict[str, Tensor], others: Sequence[MemoryState] = ()) -> MemoryState:
        """The state with other `tensors()`, which belong to it alone. others: whose rows are in them too."""
        if any(other.spec != self.spec for other in others):
            raise ValueError("the states have different specs")
        aliased = all(tensors[f"anchor.{i}"] is tensors[f"weights.{i}"] for i in range(len(self.weights)))
        state = _assemble(self.spec, tensors, common_chunk_offset(tensors["position"], self.spec), aliased)
        state.start_from_file = any(x.start_from_file for x in (self, *others))
        state.own = True
        return state

    def after_token(self, weights, momentum, anchor, window, inplace: bool, count: int = 1) -> MemoryState:
        """The state with these matrices and window buffers, one token later. anchor: before the token; inplace: it may be written into.

        count: tokens; with more than one, rows are at one place of a chunk, and `anchor` is the one after the last token.
        """
        spec, position, chunk_offset = self.spec, self.position + count, self.chunk_offset
        assert count == 1 or chunk_offset is not None
        chunk_offset = (
            common_chunk_offset(position, spec) if chunk_offset is None else (chunk_offset + count) % spec.chunk_size
        )
        if spec.anchor == "token" or chunk_offset == 0:  # a chunk has ended: the anchor is the new weights
            anchor = list(weights)
        elif chunk_offset is None and inplace:
            for row, t in enumerate(position.tolist()):
                if t % spec.chunk_size == 0:
                    for w, a in zip(weights, anchor):
                        a[row] = w[row]
        elif chunk_offset is None:
            ended = (position % spec.chunk_size == 0).reshape(-1, 1, 1, 1)
            anchor = [torch.where(ended, w, a) for w, a in zip(weights, anchor)]
        return MemoryState(
            spec,
            weights,
            momentum,
            anchor,
            *window,
            position=position,
            chunk_offset=chunk_offset,
            conv=self.conv,
            inplace=self.inplace,
            own=inplace,
            start=[w.to(weights[0].dtype) for w in self.start],
            start_from_file=self.start_from_file,
        )

    def _anchor_is_weights(self) -> bool:
        pairs = self.pairs is None or self.pairs.anchor is self.pairs.weight
        return pairs and all(a is w for a, w in zip(self.anchor, self.weights))

    def to(self, target: torch.device | str | torch.dtype) -> MemoryState:
        """Move to a device, or change the floating-point type (float32 or wider)."""
        if isinstance(target, torch.dtype) and target not in (torch.float32, torch.float64):
            raise ValueError(f"a memory state is float32 or float64, not {target}")
        return super().to(target)

    def select(self, rows: Sequence[int] | Tensor) -> MemoryState:
        """Rows by index, in the order given, repeats allowed (beam search, batching)."""
        state = super().select(rows)
        if state.chunk_offset is None:
            state.chunk_offset = common_chunk_offset(state.position, self.spec)
        state.pairs = None if state.pairs is None else state.pairs.resized(int(state.position.max()))
        return state

    @classmethod
    def stack(cls, states: Sequence[MemoryState]) -> MemoryState:
        """One state with the rows of all, in order."""
        if not states:
            raise ValueError("stack needs at least one state")
        lists = [state.pairs for state in states if state.pairs is not None]
        if len(lists) == len(states):
            longest = max(pairs.length for pairs in lists)
            states = [dataclasses.replace(s, pairs=pairs.resized(longest)) for s, pairs in zip(states, lists)]
        named = [state.tensors() for state in states]
        kinds = [{name: (x.shape[1:], x.dtype, x.device) for name, x in tensors.items()} for tensors in named]
        for state, kind in zip(states, kinds):
            if state.spec != states[0].spec:
                raise ValueError("stack: the states have different specs")
            if kind != kinds[0]:
                raise ValueError("stack: the states differ in heads, convolution, dtype or device")
        chunk_offsets = {state.chunk_offset for state in states}
        aliased = all(state._anchor_is_weights() for state in states)
        joined = {name: torch.cat([tensors[name] for tensors in named]) for name in named[0]}
        stacked = _assemble(states[0].spec, joined, chunk_offsets.pop() if len(chunk_offsets) == 1 else None, aliased)
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


def check_owner(state, spec: MemorySpec, rows: int, heads: int, device: torch.device, owner: str) -> None:
    """Raise a ValueError unless `state` is one of this spec, of so many rows and heads and on this device."""
    if not isinstance(state, MemoryState):
        kind = type(state).__name__
        raise ValueError(
            f"state is a {kind}, but must be a MemoryState: what an earlier call returned, or an initial_state"
        )
    if state.spec is not spec and state.spec != spec:
        raise ValueError("state belongs to another spec; begin with state=None or with an initial_state of this memory")
    if state.heads != heads:
        raise ValueError(f"state has {state.heads} heads, but {owner} has {heads}; it is another layer's state")
    if state.batch != rows:
        raise ValueError(
            f"state has {state.batch} batch rows, but {rows} are expected; use state.select([...]) to pick batch rows"
        )
    if state.position.device != device:
        found = state.position.device
        raise ValueError(f"state is on {found}, but {owner} is on {device}; use state.to({str(device)!r})")


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


def initial_state(
    self: MemorySpec,
    W0: list[Tensor],
    batch: int,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> MemoryState:
    """State before the first token, for `batch` rows. W0: list of (H, d_in, d_out), one per fast map; gradients reach it.

    heads, dtype (float32) and device (cpu) are for a memory without matrices, features "exp" and structure "linear", whose W0 is [];
    otherwise they are those of W0.

    >>> spec = MemorySpec(key_dim=4, value_dim=4, structure="linear")
    >>> spec.initial_state([torch.zeros(2, 4, 4)], batch=3).weights[0].shape
    torch.Size([3, 2, 4, 4])
    """
    spec = self
    if not isinstance(batch, (int, torch.SymInt)) or isinstance(batch, bool) or batch < 1:
        raise ValueError(f"batch={batch!r} must be a whole number >= 1")
    W0 = list(W0) if isinstance(W0, Iterable) else [W0]
    if not all(isinstance(w, Tensor) for w in W0):
        raise ValueError("W0 must be a list of tensors (heads, d_in, d_out), one per fast map")
    if len(W0) != len(spec.shapes):
        raise ValueError(
            f"W0 has {len(W0)} matrices, but structure {spec.structure!r} has {len(spec.shapes)} fast maps"
        )
    if not W0:
        if type(heads) is not int or heads < 1:
            raise ValueError(
                f"heads={heads!r} must be a whole number >= 1, because W0 is empty and does not show the number of heads"
            )
        W0 = [torch.zeros(heads, 0, 0, dtype=dtype, device=device)]
    elif (heads, dtype, device) != (None, None, None):
        raise ValueError("heads, dtype and device are those of W0: give them only where W0 is []")
    heads = W0[0].shape[0] if W0[0].dim() == 3 else 0
    dtype = torch.promote_types(torch.float32, W0[0].dtype)
    for i, (w, shape) in enumerate(zip(W0, spec.shapes)):
        if tuple(w.shape) != (heads, *shape) or heads == 0:
            wanted = f"({heads or 'heads'}, {shape[0]}, {shape[1]})"
            raise ValueError(f"W0[{i}] has shape {tuple(w.shape)}, but (heads, d_in, d_out) = {wanted} is expected")
        if not w.is_floating_point():
            raise ValueError(f"W0[{i}] has type {w.dtype}, but must be a floating-point tensor")
        if w.device != W0[0].device:
            raise ValueError(f"W0[{i}] is on {w.device}, but W0[0] is on {W0[0].device}")
        dtype = torch.promote_types(dtype, w.dtype)

    def rows(w: Tensor) -> Tensor:
        return w.unsqueeze(0).expand(batch, *w.shape)

    rule, initial = spec.update_rule, [w.to(dtype) for w in W0[: len(spec.shapes)]]
    weights = [rows(rule.initial_weights(w)) for w in initial]
    c, like = spec.window - 1, W0[0].to(dtype)
    empty = like.new_zeros
    return MemoryState(
        spec=spec,
        weights=weights,
        momentum=[rows(rule.initial_accumulator(w)).contiguous() for w in initial] if spec.momentum else [],
        anchor=list(weights),
        window_key=empty(batch, c, heads, spec.key_channels),
        window_value=empty(batch, c, heads, spec.loss_value_dim),
        window_gate=empty(batch, c, heads),
        position=torch.zeros(batch, dtype=torch.int64, device=like.device),
        chunk_offset=0,
        pairs=Pairs.empty(spec, batch, heads, like) if spec.is_kv_cache else None,
        start=[rows(w.clone()) for w in initial] if spec.retains.keeps_start else [],  # an optimiser may move W0
    )


MemorySpec.initial_state = initial_state
