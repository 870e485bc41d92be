"""The memory: its specification, state, engine (`scan`, `step`, `reference_scan`) and layer (`NeuralMemory`).

Needs torch and safetensors alone. Start with `NeuralMemory`, or with `MemorySpec` and `scan` to program against the engine.
"""

from . import miras_losses, miras_retentions  # noqa: F401 (register their classes)
from .config import NeuralMemoryConfig
from .features import FeatureMap, make_features, register_features
from .gating import Gating, SparseGating, register_gating
from .layer import NeuralMemory
from .losses import InnerLoss, register_loss
from .networks import Structure, register_module, register_structure
from .newton_schulz import newton_schulz
from .reference import reference_scan
from .retention import Retention, TransformedRetention, register_retention
from .rules import CommittedRule, register_rule
from .scan import Trace, read, scan, step
from .spec import Gates, MemorySpec
from .state import MemoryState
from .vitality import Relearning, distance_from_w0, effective_rank, effective_ranks, measure_vitality, relearning

__all__ = [
    "CommittedRule",
    "FeatureMap",
    "Gates",
    "Gating",
    "InnerLoss",
    "MemorySpec",
    "MemoryState",
    "NeuralMemory",
    "NeuralMemoryConfig",
    "Relearning",
    "Retention",
    "SparseGating",
    "Structure",
    "Trace",
    "TransformedRetention",
    "distance_from_w0",
    "effective_rank",
    "effective_ranks",
    "make_features",
    "measure_vitality",
    "newton_schulz",
    "read",
    "reference_scan",
    "register_features",
    "register_gating",
    "register_loss",
    "register_module",
    "register_retention",
    "register_rule",
    "register_structure",
    "relearning",
    "scan",
    "step",
]
