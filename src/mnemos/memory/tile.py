"""The buffers of one tile: every map of the chain in packed form, and views of its parts.

G = batch x heads, E entries, n layers of the chain, m = 2 matrices per map (W and S), or 1 without momentum.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .workspace import Workspace

Maps = list[Tensor]


class Side(NamedTuple):
    """For every map its input a and the error d at its output, or gradients of them: (G, E, d_in), (G, E, d_out)."""

    a: Maps
    d: Maps

    def block(self, span: slice) -> Side:
        return Side(*([x[:, span] for x in xs] for xs in self))


class Tile:
    """Z = [W; S; wide] and thin of every map (see `packed`), or gradients of them.

    Map 0's thin side is given by `keys` where that map widens: keys are not copied.
    """

    def __init__(self, state: Maps, entries: int, widens: tuple[bool, ...], momentum: bool, ws: Workspace):
        G, m = state[0].shape[0], 2 if momentum else 1
        self.widens, self.entries = widens, entries
        self.Z = [ws.empty(G, x.shape[1] + entries, x.shape[2]) for x in state]
        self.thin = [x if l == 0 and widens[0] else ws.empty(G, entries, x.shape[1] // m) for l, x in enumerate(state)]
        self.state = [z[:, : z.shape[1] - entries] for z in self.Z]
        self.wide = [z[:, z.shape[1] - entries :] for z in self.Z]
        self.weights = [x[:, : x.shape[1] // m] for x in self.state]
        self.side = Side(
            [t if up else x for t, x, up in zip(self.thin, self.wide, widens)],
            [x if up else t for t, x, up in zip(self.thin, self.wide, widens)],
        )

    def start(self, state: Maps) -> Tile:
        """Copy a state in."""
        for mine, x in zip(self.state, state):
            mine.copy_(x)
        return self

    def keys(self, k: Tensor) -> None:
        """The keys of the tile, (G, E, D): its map 0's inputs; or room for their gradient."""
        if self.widens[0]:
            self.thin[0] = self.side.a[0] = k
        else:
            self.wide[0].copy_(k)

    def errors(self, e: Tensor) -> None:
        """The errors at the chain's end, (G, E, V)."""
        if self.widens[-1]:
            self.wide[-1].copy_(e)
        else:
            self.thin[-1] = self.side.d[-1] = e

    def seen(self, entries: int) -> tuple[Maps, Maps]:
        """Z and thin without the entries from `entries` on."""
        drop = self.entries - entries
        return [z[:, : z.shape[1] - drop] for z in self.Z], [t[:, :entries] for t in self.thin]
