"""`Slots`: the states of running answers side by side, so that an answer that begins or ends is copied alone, not all others with it.

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models import MnemosCache

SHARED = "start."  # tensors that nothing writes: rows with equal ones share one


class Slots:
    """Buffers with room for more rows, whose first rows are the states of a cache.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("deltanet", "nano")).eval()
    >>> one, two = (model.state(torch.tensor([ids])) for ids in ([1, 2, 3], [4]))
    >>> slots = Slots()
    >>> cache, _ = slots.change(one, [], [two])
    >>> cache, [left] = slots.change(cache, [0], [])
    >>> cache.batch, left.batch, torch.equal(left.layers[0]["memory"].weights[0], one.layers[0]["memory"].weights[0])
    (1, 1, True)
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, str, str], Tensor] = {}

    def __bool__(self) -> bool:
        """Whether a cache is in the slots."""
        return bool(self._buffers)

    def change(
        self, cache: MnemosCache, leaving: Sequence[int], joining: Sequence[MnemosCache]
    ) -> tuple[MnemosCache, list[MnemosCache]]:
        """The cache without the rows `leaving`, and with those of `joining` (one each) behind the others; and caches of those that left.

        cache: of one row, or the last result after steps in place; at least one row stays or joins. `order` has the places of its rows.
        """
        for other in joining:
            cache.check_config(other.config)
        moves, stay = _moves(cache.batch, leaving), cache.batch - len(leaving)
        layers: list[dict] = [{} for _ in cache.layers]
        left: list[list[dict]] = [[{} for _ in cache.layers] for _ in leaving]
        for i, layer in enumerate(cache.layers):
            for name, state in layer.items():
                others = [other.layers[i][name] for other in joining]
                tensors: dict[str, Tensor] = {}
                gone: list[dict[str, Tensor]] = [{} for _ in leaving]
                added, held = [other.tensors() for other in others], state.tensors()
                shared = [x for x in held if x.startswith(SHARED) and _is_one([held[x], *(y[x] for y in added)])]
                # all of them before a row moves: an anchor may be the weights themselves
                buffers = {x: self._buffer((i, name, x), held[x], stay + len(others)) for x in held if x not in shared}
                for key, x in held.items():
                    rows = [found[key] for found in added]
                    if key in shared:
                        tensors[key] = x[:1].expand(stay + len(rows), *x.shape[1:])
                        for found in gone:
                            found[key] = x[:1]
                        continue
                    buffer = buffers[key]
                    for found, row in zip(gone, leaving):
                        found[key] = buffer[row : row + 1].clone()
                    for to, source in moves:
                        buffer[to].copy_(buffer[source])
                    for at, row in enumerate(rows, stay):
                        assert row.shape == (1, *x.shape[1:])
                        buffer[at].copy_(row[0])
                    tensors[key] = buffer[: stay + len(rows)]
                layers[i][name] = state.with_tensors(tensors, others)
                for found, parts in zip(left, gone):
                    found[i][name] = state.with_tensors(parts)
        length = max([cache.length, *(other.length for other in joining)])
        return MnemosCache(cache.config, layers, length), [MnemosCache(cache.config, x, cache.length) for x in left]

    def _buffer(self, key: tuple[int, str, str], x: Tensor, count: int) -> Tensor:
        """The buffer of a tensor x (R, ...), which it holds, with at least `count` rows."""
        buffer, rows = self._buffers.get(key), max(count, len(x))
        if buffer is None or len(buffer) < rows or buffer.dtype != x.dtype or buffer.device != x.device:
            buffer = self._buffers[key] = x.new_empty(1 << (rows - 1).bit_length(), *x.shape[1:])
        if x.data_ptr() != buffer.data_ptr() or not x.is_contiguous():
            buffer[: len(x)].copy_(x)
        return buffer

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


def order(rows: int, leaving: Sequence[int]) -> list[int]:
    """The rows that stay, in their new order: the last ones take the places of those that leave.

    >>> order(5, [1])
    [0, 4, 2, 3]
    """
    found = list(range(rows - len(leaving)))
    for to, source in _moves(rows, leaving):
        found[to] = source
    return found


def _moves(rows: int, leaving: Sequence[int]) -> list[tuple[int, int]]:
    """(place, row) of each row that moves."""
    gone, stay = set(leaving), rows - len(leaving)
    return list(zip(sorted(row for row in gone if row < stay), (row for row in range(stay, rows) if row not in gone)))


def _is_one(rows: Sequence[Tensor]) -> bool:
    """Whether all rows are equal."""
    first = rows[0][:1]
    return (rows[0].stride(0) == 0 or len(rows[0]) == 1) and all(torch.equal(first, row) for row in rows[1:])
