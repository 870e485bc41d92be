"""`AttachedCall`: what the memories and the attention of one call need, handed down the base model as a keyword.

A keyword, and not an attribute of a module: gradient checkpointing keeps it for the second forward pass.
Shapes: B, T as given; R rows of L tokens (models/row_layout.py); W window, S sinks, P past columns, C tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..models.loss import IGNORED
from ..models.row_layout import RowLayout
from .control import Switches

if TYPE_CHECKING:
    from .cache import AttachedCache

KEYWORD = "mnemos_call"


@dataclass(eq=False)
class AttachedCall:
    """One call of an attached model.

    layout: how valid tokens (B, T) become rows (R, L); None if they are rows already. mask: (R, L), True in slots with a token; None:
    all. start: (R,) positions of the first new tokens; None: 0. limits: window, sinks and own window of every layer; None: attention is
    that of the base. packed: rows are documents. reached: the layers whose memory was called. source: (B, T, D), what memories read instead of
    the input of their own layer.
    """

    shape: tuple[int, int]
    layout: RowLayout | None = None
    start: Tensor | None = None
    cache: AttachedCache | None = None
    limits: list[tuple[int, int, int | None]] | None = None
    switches: Switches = field(default_factory=Switches)
    packed: bool = False
    reached: list[int] = field(default_factory=list)
    plans: dict = field(default_factory=dict)
    source: Tensor | None = None

    @property
    def mask(self) -> Tensor | None:
        return None if self.layout is None else self.layout.mask

    @property
    def rows(self) -> tuple[int, int]:
        """(R, L)."""
        return self.shape if self.layout is None else (self.layout.mask.shape[0], self.layout.mask.shape[1])

    def pack(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (R, L, ...)."""
        return x if self.layout is None else self.layout.pack(x)

    def unpack(self, y: Tensor) -> Tensor:
        """(R, L, ...) -> (B, T, ...), 0 for tokens that are skipped."""
        return y if self.layout is None else self.layout.unpack(y)

    def pack_heads(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (R, H, L, D)."""
        return x if self.layout is None else self.layout.pack(x.transpose(1, 2)).transpose(1, 2)

    def ends(self, device: torch.device) -> Tensor:
        """(R,) or (1,) positions behind the last new token of each row."""
        new = torch.full((1,), self.rows[1], device=device) if self.mask is None else self.mask.sum(1)
        return new if self.start is None else self.start + new

    def positions(self, device: torch.device) -> Tensor:
        """(B, T) or (1, T) positions of the tokens in their own rows; 0 for tokens that are skipped."""
        index = torch.arange(self.rows[1], device=device).unsqueeze(0)
        index = index if self.start is None else self.start.unsqueeze(1) + index
        return index if self.layout is None else self.layout.unpack(index.expand(self.rows))

    def check_documents(self) -> None:
        """Raise a ValueError for padding inside a packed document: full attention would split the document there."""
        if self.layout is None or torch.compiler.is_compiling():
            return
        index = self.layout.token_index
        if bool((self.layout.mask[:, 1:] & (index[:, 1:] != index[:, :-1] + 1)).any()):
            raise ValueError(
                "attention_mask has padding inside a packed document: put it between documents, or set a window"
            )

    def targets(self, labels: Tensor) -> Tensor:
        """Labels (B, T) without those of padding and of the first token of each document."""
        if tuple(labels.shape) != self.shape:
            raise ValueError(f"labels have shape {tuple(labels.shape)}, but {self.shape} is expected, as of the tokens")
        if self.layout is None:
            return labels
        later = self.layout.mask.clone()
        later[:, 0] = False
        return labels.masked_fill(~self.layout.unpack(later), IGNORED)

    def plan(self, key: tuple, make, *args):
        """The value of `make(*args)`, made once in a call for all layers of one shape."""
        if key not in self.plans:
            self.plans[key] = make(*args)
        return self.plans[key]
