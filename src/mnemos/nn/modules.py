"""Checks of modules."""

from __future__ import annotations

import torch
from torch.nn.modules import module as module_calls


def is_unmodified(*modules: torch.nn.Module | None) -> bool:
    """Whether the parameters of these modules may be read instead of calling them.

    False for modules of other packages (adapters, quantised or parametrised maps), and for modules with hooks or a replaced `forward`.
    """
    if module_calls._global_forward_hooks or module_calls._global_forward_pre_hooks:
        return False
    for module in modules:
        if module is None:
            continue
        if not type(module).__module__.startswith("mnemos.") or "forward" in module.__dict__:
            return False
        if module._forward_hooks or module._forward_pre_hooks:
            return False
    return True
