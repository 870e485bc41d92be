"""Ablations: switch off one component of a preset at a time, train with several seeds, and measure the effect.

`ABLATIONS` lists the components and the overrides that switch them off, `AblationSettings` describes a training, `run` trains in parallel processes, `summary` compares.
"""

from ..trials.intervals import student_t
from .grid import ABLATIONS, Ablation, applicable
from .runner import AblationSettings, run
from .summary import summary
from .tasks import TASKS

__all__ = ["ABLATIONS", "TASKS", "Ablation", "AblationSettings", "applicable", "run", "student_t", "summary"]
