"""States of any form: their bytes, and the selection of batch rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

NUMBER_BYTES = 8  # of a Python number, as it would be saved


def state_bytes(state: Any) -> int:
    """Bytes of all tensors and numbers that a state holds, however deep; a tensor that it holds twice counts once.

    >>> state_bytes({"key": torch.zeros(2, 3), "seen": [1, 2]})
    40
    """
    return sum(_sizes(state, set()))


def _sizes(x: Any, seen: set[Any]):
    if isinstance(x, bool | str | bytes | type | torch.dtype | torch.device) or x is None:
        return
    if isinstance(x, int | float):
        yield NUMBER_BYTES
        return
    if isinstance(x, Tensor):
        key = (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype) if x.numel() else id(x)
    else:
        key = id(x)
    if key in seen:
        return
    seen.add(key)
    if isinstance(x, Tensor):
        yield x.numel() * x.element_size()
    elif isinstance(x, np.ndarray):
        yield x.nbytes
    elif isinstance(x, Mapping):
        for value in x.values():
            yield from _sizes(value, seen)
    elif isinstance(x, list | tuple | set | frozenset):
        for value in x:
            yield from _sizes(value, seen)
    elif not isinstance(x, nn.Module) and not callable(x) and not _is_config(x):
        for value in _attributes(x).values():
            yield from _sizes(value, seen)


def _attributes(x: Any) -> dict[str, Any]:
    slots = {name: getattr(x, name, None) for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())}
    return slots | getattr(x, "__dict__", {})


def _is_config(x: Any) -> bool:
    return hasattr(x, "to_dict") and hasattr(x, "model_type")


def select_rows(state: Any, rows: Tensor) -> Any:
    """A state with the batch rows (R,) of another one, which may change in place; None if its form is unknown.

    >>> select_rows((torch.tensor([[1], [2]]),), torch.tensor([1, 0]))[0].tolist()
    [[2], [1]]
    """
    if hasattr(state, "reorder_cache"):
        state.reorder_cache(rows)
        return state
    if hasattr(state, "select") and not isinstance(state, Tensor):
        return state.select(rows)
    if isinstance(state, Tensor):
        return state.index_select(0, rows) if state.dim() else state
    if isinstance(state, Mapping):
        made = {name: select_rows(value, rows) for name, value in state.items()}
        return None if any(made[name] is None for name in made if state[name] is not None) else made
    if isinstance(state, list | tuple):
        parts = [None if x is None else select_rows(x, rows) for x in state]
        if any(new is None for x, new in zip(state, parts) if x is not None):
            return None
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state if isinstance(state, int | float) else None
