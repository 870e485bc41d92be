"""`mnemos backends`: the backend that computes each memory, and the reasons against the others."""

from __future__ import annotations

from typing import Literal


def backends(device: str = "cpu", dtype: Literal["float32", "float64", "bfloat16"] = "float32") -> None:
    """Print the backend that computes each preset's memory on this machine, and the reason.

    Args:
        device: device of the tensors, in torch's notation.
        dtype: dtype of the model's parameters.
    """
    import torch

    from ..dispatch import MODULES, reasons, unavailable_reason
    from ..memory import NeuralMemory
    from ..models import presets
    from .tables import print_table

    try:
        like = torch.zeros(1, device=device, dtype=getattr(torch, dtype))
    except RuntimeError as wrong:
        raise ValueError(f"device {device!r} is not available here: {str(wrong).splitlines()[0]}") from None
    for name in MODULES:
        print(f"{name}: {unavailable_reason(name) or 'available'}")
    rows = []
    for name in presets.names():
        config = presets.config(name, "nano")
        if not config.has_memory:
            continue
        memory = NeuralMemory(config.memory_config).to(like)
        spec = memory.spec
        k, x = like.new_zeros(1, 4, memory.heads, spec.key_dim), like.new_zeros(1, 1, memory.config.dim)
        scan = reasons("scan", k, spec)
        with torch.no_grad():
            token = reasons("decode", memory, x, memory.initial_state(1)) | {"torch": None}
        why = [reason for found in (scan, token) for reason in found.values() if reason is not None]
        rows.append([name, _first(scan), _first(token), "; ".join(dict.fromkeys(why))])
    columns = ["preset", "training and prefill", "one token", "why not another"]
    print_table(columns, rows, left=columns, title=f"Memories on {device} in {dtype}")


def _first(found: dict[str, str | None]) -> str:
    return next(name for name, reason in found.items() if reason is None)
