"""Which of a layer's inputs a failure comes from. Runs only after something has failed: a call that works pays nothing for it.

Shapes: B batch, T time.
"""

from __future__ import annotations

from torch import Tensor, nn

from .validation import ON_META, NotFiniteError


def blame(layer: nn.Module, wrong: Exception, inputs: dict[str, Tensor], mask: Tensor | None) -> None:
    """Raise an error that names the input or parameter that made the layer fail with `wrong`; return where none is found.

    inputs: (B, T, dim) each, by the names of the layer's arguments.
    """
    if any(t.is_meta for t in (*inputs.values(), *layer.parameters())):
        raise ValueError(
            f"x or the layer's parameters are {ON_META}: move the layer with to_empty(device='cpu'), load its weights, and move x"
        ) from None
    if not isinstance(wrong, NotFiniteError):
        return
    for name, x in inputs.items():
        bad = ~x.isfinite().all(-1)  # B T
        bad = bad if mask is None else bad & mask
        if bad.any():
            row, position = bad.nonzero()[0].tolist()
            token = x[row, position]
            rows = bad.any(1).nonzero().flatten().tolist()
            others = f" (rows {', '.join(map(str, rows[:8]))}{' …' * (len(rows) > 8)})" if len(rows) > 1 else ""
            raise NotFiniteError(
                f"{name} is {token[~token.isfinite()][0].item()} in row {row}, position {position}{others}: "
                "a memory takes finite numbers alone; repair that row, or mask the token"
            ) from None
    damaged = [name for name, p in layer.named_parameters() if not p.isfinite().all()]
    if damaged:
        raise NotFiniteError(
            f"{wrong}: x is finite, but the layer's {damaged[0]} is not; load weights that are"
        ) from None
    largest = max(x.abs().max().item() for x in inputs.values())
    raise NotFiniteError(f"{wrong}: x is finite, but as large as {largest:.3g}; normalise it") from None
